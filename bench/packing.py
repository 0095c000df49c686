"""Packed samples beside unpacked ones: the same loss and gradients, in fewer samples.

100 random completions of 6 to 150 tokens, in samples of 256 tokens: one per sample, padded; and several, with positions and
attention that end at their boundaries. Both are one batch, through two ranks in threads. Differences are those of the loss
and of the largest gradient entry, relative to the loss and to the largest entry of the same parameter.

    python -m bench.packing [--rounds N] [--quick] [--json]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from tests.support import records
from torch import Tensor

from bench.compare import Figures, alternate, main, ratio
from penstock.base.scratch import Scratch
from penstock.runtime.pipeline import Pipeline
from penstock.train.config.config import Config, from_mapping
from penstock.train.data.run_data import open_data, training_batch
from penstock.train.data.samples.batches import Batch
from penstock.train.model.trainable import TrainableModel, build_model

RANKS, SEQUENCE = 2, 256
FAMILIES = ("own", "llama", "gemma3_text", "gpt2")


class Contestant:
    """One way to fill samples, with an epoch of them as one batch."""

    def __init__(self, folder: Path, family: str, packing: bool, count: int) -> None:
        model: dict[str, Any] = (
            {"width": 128, "layers": 4} if family == "own" else {"path": str(folder / f"{family}-chat")}
        )
        data = {
            "path": str(folder / "pairs.jsonl"),
            "packing": packing,
            "sequence": SEQUENCE,
            "held_out": 0.01,
        }

        def config(batch: int) -> Config:
            train = {"batch": batch, "folder": str(folder), "eval_batches": 1, "report": False}
            return from_mapping(
                {"model": model, "data": data, "train": train, "schedule": {"microbatches": 1}}
            )

        trainable: TrainableModel = build_model(config(1))
        self.rows = open_data(config(1), trainable).per_epoch
        opened = open_data(config(self.rows), trainable)
        self.batch: Batch = training_batch(opened, config(self.rows), trainable, 0)
        self.padding = 1 - count / (self.rows * SEQUENCE)
        self.pipe = Pipeline(
            trainable.layers,
            trainable.masked_loss_fn,
            microbatches=4,
            ranks=RANKS,
            reduction=trainable.valid_tokens,
        )

    def step(self) -> float:
        """Return the seconds of a step."""
        self.pipe.zero_grad()
        begin = perf_counter()
        self.loss = float(self.pipe.step(self.batch.x, self.batch.y, **self.batch.named).loss or 0.0)
        return perf_counter() - begin

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the last step by name."""
        return {name: p.grad for name, p in self.pipe.named_parameters() if p.grad is not None}


def tokens_of(batch: Batch) -> int:
    """Return the tokens of a batch of unpacked completions of bytes: those up to the last label of each row."""
    last = (batch.y != -100).long() * torch.arange(1, SEQUENCE + 1)
    return int(last.amax(1).sum())


def compare(folder: Path, family: str, rounds: int) -> dict[str, float]:
    """Return the figures of a family."""
    if family != "own":
        records.folder(folder, family, hidden_size=128)
    plain = Contestant(folder, family, False, 0)
    count = tokens_of(plain.batch)
    packed = Contestant(folder, family, True, count)
    runs: dict[str, Callable[[], float]] = {"plain": plain.step, "packed": packed.step}
    times = alternate(runs, rounds)
    assert plain.batch.valid == packed.batch.valid
    ours, theirs = packed.gradients(), plain.gradients()
    with plain.pipe, packed.pipe:
        return {
            "samples": plain.rows,
            "packed samples": packed.rows,
            "padding": 1 - count / (plain.rows * SEQUENCE),
            "packed padding": packed.padding,
            "loss": abs(packed.loss - plain.loss) / plain.loss,
            "gradient": max(
                float((ours[name] - grad).abs().max() / grad.abs().max()) for name, grad in theirs.items()
            ),
            "time": ratio(times["packed"], times["plain"]),
        }


def measure(options: argparse.Namespace) -> Figures:
    """Compare the families one after the other."""
    torch.set_num_threads(1 if options.quick else RANKS)
    figures = {}
    yield "                      samples             padding          difference of          seconds,"
    yield "model              one  packed         one  packed        loss   gradient   packed / one"
    with Scratch() as scratch:
        records.write_lines(
            scratch.path / "pairs.jsonl", records.completions(40 if options.quick else 100, words=20)
        )
        run = partial(compare, scratch.path, rounds=options.rounds)
        for family in FAMILIES[:2] if options.quick else FAMILIES:
            found = figures[family] = run(family)
            yield (
                f"{family:<14}{found['samples']:>8}{found['packed samples']:>8}"
                f"{found['padding']:>12.1%}{found['packed padding']:>8.1%}"
                f"{found['loss']:>12.1e}{found['gradient']:>11.1e}{found['time']:>15.3f}"
            )
    return figures


if __name__ == "__main__":
    main(measure, __doc__, rounds=3)
