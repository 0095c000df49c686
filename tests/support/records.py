"""Records of many lengths in files, and a Hugging Face folder with a tokenizer of bytes and a chat template."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support import hf_models

WORDS = ("the", "cat", "sat", "on", "a", "mat", "éü", "saw", "3", "dogs", "run")
START, END = 256, 257

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
)
LAST_DIFFERS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that writes an answer differently when more follows, as those of some models that think do."""


def folder(root: Path, family: str = "llama", template: str | None = PLAIN, **changes: Any) -> Path:
    """A model of 4 blocks whose tokens are bytes and four special ones."""
    place = root / f"{family}-chat"
    torch.manual_seed(5)
    changes = {"vocab_size": 260, "max_position_embeddings": 512, **changes}
    net = hf_models.model(family, bos_token_id=START, eos_token_id=END, pad_token_id=None, **changes)
    net.save_pretrained(place)
    vocabulary = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    specials = {"<s>": START, "</s>": END, "<|im_start|>": 258, "<|im_end|>": 259}
    tokenizer = Tokenizer(models.BPE({**vocabulary, **specials}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(specials))
    tokenizer.save(str(place / "tokenizer.json"))
    (place / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    if template is not None:
        (place / "chat_template.jinja").write_text(template)
    return place


def chats(count: int = 40, seed: int = 0, words: int = 6) -> list[dict[str, Any]]:
    drawn = random.Random(seed)
    found = []
    for _ in range(count):
        messages = [{"role": "system", "content": "be nice"}] * (drawn.random() < 0.5)
        for _ in range(drawn.randint(1, 3)):
            messages.append({"role": "user", "content": sentence(drawn, words)})
            messages.append({"role": "assistant", "content": sentence(drawn, words)})
        found.append({"messages": messages})
    return found


def completions(count: int = 40, seed: int = 0, words: int = 6) -> list[dict[str, Any]]:
    drawn = random.Random(seed)
    return [
        {"prompt": sentence(drawn, words) + " =>", "completion": " " + sentence(drawn, words)}
        for _ in range(count)
    ]


def texts(count: int = 40, seed: int = 0, words: int = 12) -> list[dict[str, Any]]:
    drawn = random.Random(seed)
    return [{"text": sentence(drawn, words), "id": n} for n in range(count)]


def sentence(drawn: random.Random, words: int) -> str:
    return " ".join(drawn.choice(WORDS) for _ in range(drawn.randint(1, words)))


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    return path
