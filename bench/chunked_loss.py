"""The last stage with `LinearCrossEntropy` and with plain cross entropy of its logits: peak bytes, time and differences.

The stage is a linear layer and a head of the vocabulary of Llama 3, on microbatches of 2 x 1,024 tokens of width 512; in
bf16, which many CPUs emulate, 2,048 classes and 2 x 64 tokens of width 32.
On CUDA both dtypes have the full size.
Bytes are what its ops allocate in a step, after a first one has made the gradients. Times are those of a whole step, in
alternating runs. Differences are |ours - plain| / |plain| of the loss, and the largest one of all gradients, by their norms.

    python -m bench.chunked_loss [--device cuda] [--rounds N] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import statistics
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bench.compare import Figures, alternate, main, ratio
from bench.memory import watch
from bench.peer import add_device
from penstock.runtime.pipeline import Pipeline
from penstock.stage.compute.linear_cross_entropy import LinearCrossEntropy

MICROBATCHES, ROWS, CHUNKS = 2, 2, 8


class Size(NamedTuple):
    """Sizes of a microbatch's sequences and of the head."""

    vocabulary: int
    tokens: int
    width: int


FULL, QUICK = Size(128_256, 1024, 512), Size(2048, 64, 32)


def plain(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy of logits, in fp32."""
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), target.flatten())


class Contestant:
    """A pipeline of one rank with one of the losses, ready to step."""

    def __init__(self, size: Size, dtype: torch.dtype, *, chunked: bool, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(size.width, size.width), nn.Linear(size.width, size.vocabulary, bias=False)
        )
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.normal_(0.0, size.width**-0.5, generator=generator)
        self.device = device
        self.model.to(device, dtype)
        shape = (MICROBATCHES * ROWS, size.tokens)
        self.x = torch.randn(*shape, size.width, generator=generator).to(device, dtype)
        self.y = torch.randint(size.vocabulary, shape, generator=generator).to(device)
        loss = LinearCrossEntropy(CHUNKS) if chunked else plain
        self.pipe = Pipeline(self.model, loss, ranks=1, microbatches=MICROBATCHES)
        self.loss = self.step_loss()
        self.grads = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]

    def step_loss(self) -> float:
        """Return the loss of a step."""
        result = self.pipe.step(self.x, self.y)
        assert result.loss is not None
        return float(result.loss)

    def step(self) -> float:
        """Return the seconds of a step."""
        begin = perf_counter()
        self.step_loss()
        return perf_counter() - begin

    def bytes(self) -> int:
        """Return the most bytes that the ops of a step allocate."""
        if self.device == "cuda":
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self.step_loss()
            return torch.cuda.max_memory_allocated() - before
        between, within = [0], [0]
        self.pipe.wrap_ops(watch(between, within))
        self.step_loss()
        return within[0]


def measure(options: argparse.Namespace) -> Figures:
    """Compare both losses in fp32 and bf16."""
    torch.set_num_threads(2)
    size = QUICK if options.quick else FULL
    rows = {}
    yield f"{'dtype':6}{'peak/plain':>12}{'peak MB':>10}{'plain MB':>10}{'loss':>10}{'gradients':>12}{'time/plain':>12}"
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        at = (
            size if name == "fp32" or options.device == "cuda" else QUICK
        )  # many CPUs emulate bf16, a hundred times slower
        ours, theirs = (
            Contestant(at, dtype, chunked=chunked, device=options.device) for chunked in (True, False)
        )
        differences = [
            float((a - b).float().norm() / b.float().norm())
            for a, b in zip(ours.grads, theirs.grads, strict=True)
        ]
        times = alternate({"ours": ours.step, "plain": theirs.step}, options.rounds)
        peak, plain_peak = ours.bytes(), theirs.bytes()
        rows[name] = {
            "bytes": peak,
            "plain bytes": plain_peak,
            "bytes over plain": peak / plain_peak,
            "loss difference": abs(ours.loss - theirs.loss) / theirs.loss,
            "gradient difference": max(differences),
            "time over plain": ratio(times["ours"], times["plain"]),
            "seconds": statistics.median(times["ours"]),
            "plain seconds": statistics.median(times["plain"]),
        }
        row = rows[name]
        yield (
            f"{name:6}{row['bytes over plain']:12.3f}{peak / 2**20:10.1f}{plain_peak / 2**20:10.1f}"
            f"{row['loss difference']:10.1e}{row['gradient difference']:12.1e}{row['time over plain']:12.2f}"
        )
        ours.pipe.close()
        theirs.pipe.close()
    yield f"{options.rounds} rounds, median of the ratios round by round; {CHUNKS} chunks"
    fp32 = rows["fp32"]
    return {
        "ours": fp32["seconds"], "peer": fp32["plain seconds"], "ratio": fp32["time over plain"],
        "rows": rows, "rounds": options.rounds,
    }  # fmt: skip


if __name__ == "__main__":
    main(measure, __doc__, rounds=5, add=add_device)
