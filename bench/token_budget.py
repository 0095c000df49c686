"""Examples of unequal length in `penstock.PipelineTrainer`: a padded batch, collated parts, and parts by a number of tokens.

A small random Llama trains on rows of log-normal lengths, at three spreads, with a pipeline of two ranks in threads: the
whole batch padded and divided by rows (``collate="batch"``), eight parts that the data collator pads (``microbatches``), and
as many as a number of tokens needs (``tokens_per_microbatch``). Runs are in turn, with the same batches in the same order.
"Computed" is the number of tokens in the microbatches over those in the rows, and "processor" a ratio of processor seconds,
which other processes on the machine disturb less than those of the clock. Differences are relative, from the padded batch:
the largest of a loss over all steps, and of a parameter's gradient, by its norm, in the first step.

Then, what a number of microbatches costs that a pipeline has not had before, on a model without work: the time of its first
step over that of its second.

    python -m bench.token_budget [--quick] [--json]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import penstock
from bench.compare import Figures, alternate, main, ratio
from bench.hf_trainer import StepTimes, largest, quiet
from penstock.runtime.workers.pool import LocalProcesses

ROWS, PARTS, VOCABULARY = 32, 8, 512
SPREADS = (0.3, 0.6, 0.9)
"""Standard deviations of the logarithm of a length; chats have about 0.8 to 1."""
SCHEDULES = ("1f1b", "zb-h1", "zb-v")
NUMBERS = range(5, 17)


class Watch(StepTimes):
    """Times at which steps end, and the gradients of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.used: list[float] = []
        self.gradients: list[Tensor] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        super().on_step_end()
        self.used.append(process_time())

    def on_pre_optimizer_step(self, *args: Any, model: Any, **kwargs: Any) -> None:
        if not self.gradients:
            self.gradients = [p.grad.clone() for p in model.parameters()]


def make_rows(count: int, spread: float) -> list[dict[str, Tensor]]:
    """Return rows of token ids whose lengths are log-normal around 64, the same on every call."""
    generator = torch.Generator().manual_seed(1)
    lengths = (torch.randn(count, generator=generator) * spread).exp() * 64
    return [
        {"input_ids": torch.randint(3, VOCABULARY, (n,), generator=generator)}
        for n in lengths.clamp(8, 512).long().tolist()
    ]


class Padding:
    """Data collator that pads to the longest row, and counts what it makes."""

    def __init__(self) -> None:
        self.tokens = 0

    def __call__(self, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        ids = [row["input_ids"] for row in rows]
        padded = pad_sequence(ids, True, 0)
        self.tokens += padded.numel()
        return {
            "input_ids": padded,
            "attention_mask": pad_sequence([torch.ones_like(each) for each in ids], True, 0),
            "labels": pad_sequence(ids, True, -100),
        }


def train(
    folder: str, pipeline: dict[str, Any], rows: list[dict[str, Tensor]], steps: int, width: int
) -> dict[str, Any]:
    """Train on all rows, and return losses, gradients, tokens, numbers of microbatches, and the seconds of a step."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=width, intermediate_size=8 * width // 3, num_hidden_layers=4,
            num_attention_heads=4, max_position_embeddings=512,
        )
    )  # fmt: skip
    watch, padding, numbers = Watch(), Padding(), list[int]()
    args = transformers.TrainingArguments(
        folder, max_steps=steps, per_device_train_batch_size=ROWS, learning_rate=1e-3, logging_steps=1, report_to=[],
        use_cpu=True, seed=5, save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, log_level="error",
    )  # fmt: skip
    trainer: Any = penstock.PipelineTrainer(
        model=model,
        args=args,
        train_dataset=rows,
        data_collator=padding,
        callbacks=[watch],
        pipeline={"ranks": 2, "report": False, **pipeline},
    )
    trainer.remove_callback(transformers.PrinterCallback)
    step = trainer.pipe.step

    def counted(*given: Any, microbatches: int, **named: Any) -> Any:
        numbers.append(microbatches)
        return step(*given, microbatches=microbatches, **named)

    trainer.pipe.step = counted
    trainer.train()
    trainer.pipe.close()
    return {
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
        "gradients": watch.gradients,
        "tokens": padding.tokens,
        "numbers": numbers,
        "seconds": (watch.ends[-1] - watch.ends[0]) / (steps - 1),
        "processor": watch.used[-1] - watch.used[0],
    }


def new_number(rank: int, schedule: str) -> float:
    """Return the median seconds that the first step with a number of microbatches takes longer than the second."""
    torch.set_num_threads(1)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    more = []
    with penstock.Pipeline(model, nn.functional.mse_loss, ranks=2, microbatches=4, schedule=schedule) as pipe:
        x = torch.ones(max(NUMBERS), 4)
        pipe.step(x, x)
        for number in NUMBERS:
            times = []
            for _ in range(2):
                begin = perf_counter()
                pipe.step(x, x, microbatches=number)
                times.append(perf_counter() - begin)
            more.append(times[0] - times[1])
    return statistics.median(more)


def measure(options: argparse.Namespace) -> Figures:
    """Train at every spread, in every way, and measure new numbers."""
    quiet()
    torch.set_num_threads(1)
    steps, width = (2, 32) if options.quick else (4, 128)
    figures: dict[str, Any] = {"spreads": {}, "new number": {}}
    yield (
        f"{'seconds of a step':22} {'padded':>7} {'parts':>7} {'tokens':>7}  {'computed':^14}  {'microbatches':12} "
        f"{'padded / tokens':>15} {'processor':>9} {'parts / tokens':>14} {'processor':>9} {'loss':>8} {'gradient':>8}"
    )
    with TemporaryDirectory() as folder:
        for spread in SPREADS:
            rows = make_rows(steps * ROWS, spread)
            lengths = [len(row["input_ids"]) for row in rows]
            budget = max(*lengths, round(1.2 * sum(lengths) / steps / PARTS))
            ways = {
                "padded": {"microbatches": PARTS, "collate": "batch"},
                "parts": {"microbatches": PARTS},
                "tokens": {"tokens_per_microbatch": budget},
            }
            last: dict[str, dict[str, Any]] = {}
            used: dict[str, list[float]] = {way: [] for way in ways}

            def timed(way: str) -> Callable[[], float]:
                def once() -> float:
                    last[way] = train(folder, ways[way], rows, steps, width)  # noqa: B023 - called at once
                    used[way].append(last[way]["processor"])  # noqa: B023
                    return float(last[way]["seconds"])  # noqa: B023

                return once

            times = alternate({way: timed(way) for way in ways}, options.rounds)
            expected, found = last["padded"], last["tokens"]
            figures["spreads"][spread] = row = {
                "seconds": {way: statistics.median(times[way]) for way in ways},
                "computed": {way: last[way]["tokens"] / sum(lengths) for way in ways},
                "tokens per microbatch": budget,
                "microbatches": sorted(set(found["numbers"])),
                "padded over tokens": ratio(times["padded"], times["tokens"]),
                "parts over tokens": ratio(times["parts"], times["tokens"]),
                "padded over tokens, processor": ratio(used["padded"], used["tokens"]),
                "parts over tokens, processor": ratio(used["parts"], used["tokens"]),
                "loss": largest(found["losses"], expected["losses"]),
                "gradient": max(
                    float((one - other).norm() / other.norm())
                    for one, other in zip(found["gradients"], expected["gradients"], strict=True)
                ),
            }
            seconds = " ".join(f"{row['seconds'][way]:7.3f}" for way in ways)
            computed = " ".join(f"{row['computed'][way]:4.2f}" for way in ways)
            numbers = ", ".join(map(str, row["microbatches"]))
            yield (
                f"spread {spread}, {budget:4} tokens {seconds}  {computed}  {numbers:12} {row['padded over tokens']:15.2f} "
                f"{row['padded over tokens, processor']:9.2f} {row['parts over tokens']:14.2f} "
                f"{row['parts over tokens, processor']:9.2f} {row['loss']:8.1e} {row['gradient']:8.1e}"
            )
    yield f"{'a new number of microbatches, milliseconds':44} {'threads':>9} {'processes':>9}"
    with LocalProcesses(2) as pool:
        for schedule in SCHEDULES:
            cost = {
                "threads": new_number(0, schedule),
                "processes": max(pool.run(2, new_number, schedule)),
            }
            figures["new number"][schedule] = cost
            yield f"{schedule:44} {1e3 * cost['threads']:9.1f} {1e3 * cost['processes']:9.1f}"
    return figures


if __name__ == "__main__":
    main(measure, __doc__, rounds=3)
