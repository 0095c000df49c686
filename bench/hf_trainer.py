"""`penstock.PipelineTrainer` beside transformers' Trainer and TRL's trainers: the same numbers, and the time of a step.

A small random Llama and a tokenizer trained on the spot see the same rows for 20 steps in float32, with plain Trainer in one
process and with a pipeline of two ranks: as threads, as processes, and as processes with two replicas beside each other.
Chats go through TRL's SFTTrainer, with assistant masks or packed, pairs through its RewardTrainer and its DPOTrainer (with
adapters, and without a reference model); a classifier has a loss with a weight for each row, a small Qwen2-VL reads rows
with one image or two of several sizes, and QLoRA has a base of 4 bits. The table has the largest relative difference of a
loss and of a gradient norm over all steps, and the distance of the final weights over their norm. Steps are timed in turn:
plain Trainer with two threads of torch, and the pipelines with one for each rank; and QLoRA in two processes beside the same
processes one after the other (one microbatch), which is what ``device_map`` does. Bases of 4 bits are read within
`penstock.own_stages`. The last table has what each of two processes holds of a larger one, and how much memory its loading
took at most.

    python -m bench.hf_trainer [--quick] [--json]
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import datasets
import peft
import torch
import transformers
import trl
from safetensors.torch import load_file
from tests.support import image_models
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    LlamaConfig,
    PreTrainedTokenizerFast,
    TrainerCallback,
    TrainingArguments,
)

import penstock
from bench.compare import Figures, alternate, main, ratio
from penstock.runtime.workers.pool import LocalProcesses

ROWS = 8
"""Rows of a step, over all replicas."""
DATA = 12 * ROWS
"""Rows of an epoch: whole batches, since Accelerate fills the last one up where there are replicas."""
CASES: dict[str, dict[str, Any]] = {
    "full training": {},
    "LoRA": {"lora": True},
    "chats, assistant masks": {"kind": "chats"},
    "accumulation 2": {"accumulated": 2},
    "chats, packed": {"kind": "packed"},
    "rewards": {"kind": "rewards"},
    "preferences, LoRA": {"kind": "preferences", "lora": True},
    "classifier, own loss": {"kind": "classes"},
    "images, Qwen2-VL": {"kind": "images"},
    "QLoRA, 4 bits": {"quantised": "base of width 32", "lora": True},
}
QUICK = ("full training", "QLoRA, 4 bits")
"""Cases with --quick: the tests compare the others with plain trainers, too."""
LAYOUTS = {"threads 2": (1, 2), "processes 2": (2, 2), "pp 2 x dp 2": (4, 2)}
"""Name of a layout → number of processes, and of ranks of a pipeline."""
TIMED = ("plain", "threads 2", "processes 2")
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
)


class Weighted(transformers.Trainer):  # type: ignore[misc]  # transformers is untyped here
    """Trainer of a classifier whose rows weigh by their class."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        losses = torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="none")
        loss = (losses * (1 + labels)).mean()
        return (loss, outputs) if return_outputs else loss


KINDS = {
    "texts": transformers.Trainer, "chats": trl.SFTTrainer, "packed": trl.SFTTrainer, "rewards": trl.RewardTrainer,
    "preferences": trl.DPOTrainer, "classes": Weighted, "images": transformers.Trainer,
}  # fmt: skip
CONFIGS = {
    "chats": trl.SFTConfig, "packed": trl.SFTConfig, "rewards": trl.RewardConfig, "preferences": trl.DPOConfig,
}  # fmt: skip


class StepTimes(TrainerCallback):
    """Times at which steps end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(perf_counter())

    def median(self) -> float:
        """Return the median seconds of a step, without the first two."""
        return statistics.median(b - a for a, b in zip(self.ends[1:], self.ends[2:], strict=False))


def chats(count: int) -> list[dict[str, Any]]:
    """Chats of different lengths."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"What is {n} + {3 * n}?"},
                {"role": "assistant", "content": f"The sum of {n} and {3 * n} is {4 * n}." * (1 + n % 3)},
            ]
        }
        for n in range(count)
    ]


def make_tokenizer(folder: Path) -> None:
    """Train a tokenizer on the chats, and save it."""
    texts = [message["content"] for chat in chats(200) for message in chat["messages"]]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    whole.chat_template = TEMPLATE
    whole.save_pretrained(folder)


def make_model(
    tokenizer: PreTrainedTokenizerFast,
    width: int,
    blocks: int,
    labels: int,
    lora: bool,
    base: Callable[[], Any] | None,
) -> Any:
    """Return a random Llama, the same on every call.

    Args:
        labels: classes of a classifier; 0 for a causal language model.
        base: function that reads a base of 4 bits; None if its weights are not quantised.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=3 * width, num_hidden_layers=blocks,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=512, bos_token_id=0, eos_token_id=1,
        pad_token_id=1, num_labels=max(labels, 1),
    )  # fmt: skip
    kind = AutoModelForSequenceClassification if labels else AutoModelForCausalLM
    model = kind.from_config(config)
    if base is not None:
        model = peft.prepare_model_for_kbit_training(base(), use_gradient_checkpointing=False)
    if not lora:
        return model
    torch.manual_seed(1)
    return peft.get_peft_model(
        model, peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    )


def read_quantised(folder: str, pipeline: dict[str, Any] | None) -> Any:
    """Return a folder's model with weights of 4 bits; in the processes of a pipeline, those of own stages alone."""
    bits = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    with nullcontext() if pipeline is None else penstock.own_stages(pipeline):
        return AutoModelForCausalLM.from_pretrained(folder, quantization_config=bits, device_map={"": "cpu"})


def memory_of_reading(rank: int, folder: str, pipeline: dict[str, Any] | None) -> tuple[int, int]:
    """Return bytes of the tensors that a process has read, and by how much its memory grew at most (of Linux)."""
    quiet()
    status = Path("/proc/self/status")

    def kilobytes(name: str) -> int:
        return int(next(line for line in status.read_text().splitlines() if line.startswith(name)).split()[1])

    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = kilobytes("VmRSS:")
    model = read_quantised(folder, pipeline)
    tensors = [*model.parameters(), *model.buffers()]
    return sum(t.nbytes for t in tensors if not t.is_meta), 1024 * (kilobytes("VmHWM:") - before)


def quiet() -> None:
    """Silence what trainers write besides the figures."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"


def job(
    rank: int,
    tokenizer_folder: str,
    folder: str,
    pipeline: dict[str, Any] | None,
    replicas: int,
    steps: int,
    *,
    width: int = 32,
    blocks: int = 4,
    rows: int = ROWS,
    repeats: int = 1,
    lora: bool = False,
    quantised: str = "",
    kind: str = "texts",
    accumulated: int = 1,
) -> dict[str, Any]:
    """Train in one process of a run; returns losses, gradient norms, and the seconds of a step."""
    quiet()
    torch.set_num_threads(2 if pipeline is None and width > 32 else 1)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    labels = {"rewards": 1, "classes": 3}.get(kind, 0)
    base = partial(read_quantised, quantised, pipeline) if quantised else None
    times = StepTimes()
    data: dict[str, Any]
    if kind == "images":
        model = image_models.model("qwen2_vl")
        rows_with_images = image_models.rows_with_grids(model, DATA)
        data = {"train_dataset": rows_with_images, "data_collator": image_models.collate}
    else:
        model = make_model(tokenizer, width, blocks, labels, lora, base)
        data = data_of(kind, tokenizer, repeats)
    options: dict[str, Any] = {
        "max_steps": steps, "per_device_train_batch_size": rows // replicas, "gradient_accumulation_steps": accumulated,
        "learning_rate": 1e-3, "logging_steps": 1, "report_to": [], "use_cpu": True, "bf16": False, "seed": 5,
        "save_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False, "log_level": "error",
    }  # fmt: skip
    given: dict[str, Any] = {"model": model, "callbacks": [times], **data}
    if pipeline is not None:
        given["pipeline"] = pipeline
    if kind in CONFIGS:
        own = {"assistant_only_loss": True} if kind == "chats" else {}
        # How many rows they make does not divide into batches, and Accelerate fills the last one where there are replicas.
        own |= {"packing": True, "dataloader_drop_last": True} if kind == "packed" else {}
        # Longer chats are cut, where rows are packed into one of this length.
        given["args"] = CONFIGS[kind](folder, max_length=64 if kind == "packed" else 256, **own, **options)
        given["processing_class"] = tokenizer
    else:
        given["args"] = TrainingArguments(folder, **options)
    trainer_class = KINDS[kind]
    if pipeline is not None:
        trainer_class = type("Piped", (penstock.PipelineTrainerMixin, trainer_class), {})
    trainer = trainer_class(**given)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    trainer.save_model(folder)
    lines = [line for line in trainer.state.log_history if "loss" in line]
    return {
        "losses": [line["loss"] for line in lines],
        "norms": [line["grad_norm"] for line in lines],
        "seconds": times.median() if steps > 3 else 0.0,
    }


def data_of(kind: str, tokenizer: PreTrainedTokenizerFast, repeats: int) -> dict[str, Any]:
    """Return the data of a trainer, and its collator if it has one of its own.

    Args:
        repeats: how often each text is written.
    """
    rows = chats(DATA)
    if kind in ("chats", "packed"):
        return {"train_dataset": datasets.Dataset.from_list(rows)}
    if kind in ("rewards", "preferences"):
        pairs = [
            {"prompt": f"{n} + {3 * n} = ", "chosen": f"{4 * n} " * (1 + n % 3), "rejected": f"{n} "}
            for n in range(DATA)
        ]
        found = datasets.Dataset.from_list(pairs)
        return {"train_dataset": found.remove_columns("prompt") if kind == "rewards" else found}
    texts = [tokenizer.apply_chat_template(chat["messages"], tokenize=False) for chat in rows]
    tokens = [{"input_ids": tokenizer(repeats * text)["input_ids"]} for text in texts]
    if kind == "classes":
        tokens = [{**row, "labels": n % 3} for n, row in enumerate(tokens)]
        return {"train_dataset": tokens, "data_collator": DataCollatorWithPadding(tokenizer)}
    return {
        "train_dataset": tokens,
        "data_collator": DataCollatorForLanguageModeling(tokenizer, mlm=False),
    }


def run(
    pool: LocalProcesses,
    layout: str,
    tokenizer: str,
    folder: Path,
    steps: int,
    microbatches: int = 4,
    **options: Any,
) -> dict[str, Any]:
    """Train with a layout, or with plain Trainer for "plain", and return the figures of the first process."""
    if layout == "plain":
        processes, replicas, pipeline = 1, 1, None
    else:
        processes, ranks = LAYOUTS[layout]
        replicas = max(1, processes // ranks)
        pipeline = {"ranks": ranks, "microbatches": microbatches // replicas, "report": False}
    if "quantised" in options:
        # A folder beside the tokenizer's, written once: processes read it.
        width = options.get("width", 32)
        options["quantised"] = base = str(Path(tokenizer).parent / options["quantised"])
        if not Path(base).exists():
            words = PreTrainedTokenizerFast.from_pretrained(tokenizer)
            make_model(words, width, 4, 0, False, None).save_pretrained(base)
    given = (tokenizer, str(folder), pipeline, replicas, steps, options)
    first: dict[str, Any] = pool.run(processes, _started, *given)[0]
    return first


def _started(rank: int, *args: Any) -> dict[str, Any]:
    *others, options = args
    return job(rank, *others, **options)


def weights(folder: Path) -> torch.Tensor:
    """Return what a trainer has saved as one vector."""
    (file,) = folder.glob("*model.safetensors")
    saved = load_file(file)
    return torch.cat([saved[name].flatten() for name in sorted(saved)])


def largest(ours: list[float], theirs: list[float]) -> float:
    """Return the largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def measure(options: argparse.Namespace) -> Figures:
    """Train every case with every layout, and time steps."""
    quiet()
    steps = 3 if options.quick else 20
    figures: dict[str, Any] = {"differences": {}, "step": {}}
    with LocalProcesses(4) as pool, TemporaryDirectory() as scratch:
        root = Path(scratch)
        tokenizer = str(root / "tokenizer")
        make_tokenizer(Path(tokenizer))
        yield f"{'largest difference from plain Trainer':41} {'loss':>8} {'grad norm':>10} {'weights':>8}"
        for case, changes in CASES.items():
            if options.quick and case not in QUICK:
                continue
            expected = run(pool, "plain", tokenizer, root / case / "plain", steps, **changes)
            for layout in LAYOUTS:
                found = run(pool, layout, tokenizer, root / case / layout, steps, **changes)
                ours, theirs = (weights(root / case / name) for name in (layout, "plain"))
                row = {
                    "loss": largest(found["losses"], expected["losses"]),
                    "grad norm": largest(found["norms"], expected["norms"]),
                    "weights": float((ours - theirs).norm() / theirs.norm()),
                }
                figures["differences"][f"{case}, {layout}"] = row
                yield (
                    f"{case:25} {layout:15} {row['loss']:8.1e} {row['grad norm']:10.1e} {row['weights']:8.1e}"
                )
        large: dict[str, Any] = {"width": 64} if options.quick else {"width": 128, "repeats": 3}

        of_stages: dict[str, Any] = large | {"quantised": f"base of width {large['width']}", "lora": True}
        count = 4 if options.quick else 8

        def seconds(name: str, layout: str, microbatches: int, given: dict[str, Any]) -> Callable[[], float]:
            def once() -> float:
                found = run(pool, layout, tokenizer, root / f"timed {name}", count, microbatches, **given)
                return float(found["seconds"])

            return once

        timed = {name: seconds(name, name, 4, large) for name in TIMED}
        in_turn = {
            name: seconds(name, "processes 2", microbatches, of_stages)
            for name, microbatches in (("stage after stage", 1), ("8 microbatches", 8))
        }
        for title, runs, peer in (
            ("a step; over plain Trainer's with two threads of torch", timed, "plain"),
            ("a step of QLoRA, 2 processes; over stage after stage", in_turn, "stage after stage"),
        ):
            times = alternate(runs, options.rounds)
            yield f"seconds of {title}"
            for name in runs:
                figures["step"][name] = row = {
                    "seconds": statistics.median(times[name]),
                    f"over {peer}": ratio(times[name], times[peer]),
                }
                yield f"{name:41} {row['seconds']:8.3f} {row[f'over {peer}']:10.2f}"
        width, blocks = (256, 4) if options.quick else (1024, 12)
        words = PreTrainedTokenizerFast.from_pretrained(tokenizer)
        make_model(words, width, blocks, 0, False, None).save_pretrained(root / "large")
        yield f"{'MB of a base of 4 bits, in each of 2 processes':46} {'held':>6} {'peak':>6}"
        figures["memory"] = {}
        for name, pipeline in (
            ("whole, by each", None),
            ("within own_stages", {"ranks": 2, "microbatches": 4}),
        ):
            told = pool.run(2, memory_of_reading, str(root / "large"), pipeline)
            held, peak = (max(each) / 1e6 for each in zip(*told, strict=True))
            figures["memory"][name] = {"held": held, "peak": peak}
            yield f"{name:46} {held:6.1f} {peak:6.1f}"
    return figures


if __name__ == "__main__":
    main(measure, __doc__, rounds=3)
