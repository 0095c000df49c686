"""Local folders in the layout of Hugging Face: a tiny model and the tokenizer of the tiny text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support import hf_models
from tests.support.tiny_run import WORDS

END, UNKNOWN = 0, 1
BYTES_START, BYTES_END = 256, 257


def folder(root: Path, family: str, *, tied: bool, tokenizer: bool = True, **changes: Any) -> Path:
    """A model of 4 blocks, its tokens the words of `text_folder`."""
    place = root / family
    torch.manual_seed(5)
    hf_models.model(
        family, tied=tied, bos_token_id=END, eos_token_id=END, pad_token_id=None, **changes
    ).save_pretrained(place)
    if tokenizer:
        vocabulary = {"<end>": END, "<unknown>": UNKNOWN, **{word: n + 2 for n, word in enumerate(WORDS)}}
        words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        words.add_special_tokens(["<end>"])
        words.save(str(place / "tokenizer.json"))
    return place


def of_bytes(root: Path, family: str = "llama", **changes: Any) -> Path:
    """A model of 4 blocks whose tokens are the bytes and two special ones."""
    place = root / f"{family}-bytes"
    torch.manual_seed(5)
    changes = {"vocab_size": 260, "max_position_embeddings": 512, **changes}
    net = hf_models.model(
        family, bos_token_id=BYTES_START, eos_token_id=BYTES_END, pad_token_id=None, **changes
    )
    net.save_pretrained(place)
    vocabulary = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    specials = {"<s>": BYTES_START, "</s>": BYTES_END}
    tokenizer = Tokenizer(models.BPE({**vocabulary, **specials}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(specials))
    tokenizer.save(str(place / "tokenizer.json"))
    return place
