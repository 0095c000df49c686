"""LoRA on a chat file through two processes, against transformers and peft alone: losses, adapters and logits.

The base is a Llama-style model with random weights, a tokenizer and a chat template, all made here, as is the file:
questions about sums with their answers, one conversation a line; the loss is that of the answers. One command trains:
`penstock train`, two pipeline ranks, 1F1B. The plain loop begins with the same adapters, takes the same batches, each as a
whole, and uses the same optimizer. Losses are below 4, so that a step of float32 is 2.4e-7. Logits are those of the saved
adapters as peft loads them, against those of the plain loop's model. Bytes are those on the disk.

    python -m bench.lora [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import transformers
from tests.support import peft_curve, peft_models
from tests.support.trainer import lines
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig

from bench.compare import Figures, main
from penstock.huggingface.adapters.supported import ADAPTER_WEIGHTS
from penstock.train.model.sampling import read_config

STEPS, QUICK_STEPS = 50, 10
CHATS = 800
VOCABULARY = 48
END = "<|end|>"
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = [END, "<|user|>", "<|assistant|>"]


def write_chats(path: Path) -> Path:
    """Write conversations about sums, one JSON object a line."""
    with path.open("w") as file:
        for n in range(CHATS):
            a, b = 7 * n % 100, (13 * n + n // 100) % 100
            user, assistant = f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}."
            messages = [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def write_base(folder: Path, chats: Path) -> Path:
    """Write a model with random weights, and a tokenizer that is trained on the conversations."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        show_progress=False,
    )
    words.train([str(chats)], trainer)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=None,
        )
    )
    model.save_pretrained(folder)
    words.save(str(folder / "tokenizer.json"))
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def bytes_of(folder: Path, pattern: str) -> int:
    """Return the size of a folder's files."""
    return sum(path.stat().st_size for path in folder.rglob(pattern))


def measure(options: argparse.Namespace) -> Figures:
    """Train by the command and by the plain loop, and compare."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, message="`is_gradient")  # what peft calls
    steps = QUICK_STEPS if options.quick else STEPS
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        chats = write_chats(root / "chats.jsonl")
        base = write_base(root / "base", chats)
        settings = (
            "model.path=base data.path=chats.jsonl data.sequence=64 lora.rank=8 optim.lr=1e-3 "
            f"train.steps={steps} train.log_every=1 train.checkpoint_every={steps} train.name=sums "
            "train.report=false sample.length=0"
        )
        command = f"penstock train --ranks 2 --set {settings}"
        yield f"$ {command}"
        words = [sys.executable, "-m", *shlex.split(command), "runtime.threads=1"]
        done = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise SystemExit(done.stderr)
        said = next(line for line in done.stdout.splitlines() if line.startswith("LoRA of rank"))
        yield said
        run = root / "runs" / "sums"
        seen = [line["loss"] for line in lines(run, "train")]

        os.chdir(root)  # the run's config names the base and the file by relative paths
        try:
            config = read_config(run)
            plain = peft_curve.train_with_peft(config, peft_curve.initial_adapters(config, root / "initial"))
        finally:
            os.chdir("/")
        ours = peft_models.with_peft(base, run, trainable=False)
        tokens = torch.randint(VOCABULARY, (4, 64), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            logits = (ours(input_ids=tokens).logits - plain.model(input_ids=tokens).logits).abs().max().item()
        theirs = dict(plain.model.named_parameters())
        weights = max(
            (p - theirs[name]).abs().max().item() for name, p in ours.named_parameters() if "lora_" in name
        )
        losses = peft_curve.largest_difference(seen, plain.losses)
        sizes = {
            "base": bytes_of(base, "*.safetensors"),
            "adapters": (run / ADAPTER_WEIGHTS).stat().st_size,
            "checkpoint": bytes_of(run / "checkpoints", "*"),
        }
    yield ""
    yield f"{'step':<24} {'penstock':>11} {'peft alone':>11}"
    for step in sorted({1, steps // 2, steps}):
        yield f"{step:<24} {seen[step - 1]:>11.7f} {plain.losses[step - 1]:>11.7f}"
    yield ""
    yield f"largest difference of {steps} losses          {losses:.1e}"
    yield f"largest difference of a trained weight   {weights:.1e}"
    yield f"largest difference of a logit            {logits:.1e}"
    yield "bytes: " + ", ".join(f"{name} {size:,}" for name, size in sizes.items())
    assert losses < 1e-6, "the losses are those of peft alone"
    return {
        "steps": steps,
        "losses": {"penstock": seen, "peft": plain.losses},
        "largest_difference": {"loss": losses, "weight": weights, "logit": logits},
        "bytes": sizes,
    }


if __name__ == "__main__":
    main(measure, __doc__)
