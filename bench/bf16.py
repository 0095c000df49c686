"""A step in fp32, under bf16 autocast, and with bf16 weights whose gradients and main weights are fp32.

The built-in model on two ranks in threads, 1F1B, AdamW and clipping. Times are those of a full step, optimizer included,
from alternating runs. Bytes are those of the whole pipeline: weights, gradients and optimizer (its state and main weights)
are counted; activations are the largest sum over ranks of the bytes that the stages measure, after each rank's fullest op.

    python -m bench.bf16 [--rounds N] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable
from time import perf_counter

import torch
from torch import Tensor

from bench.compare import Figures, alternate, main, ratio
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.pipeline import Pipeline
from penstock.stage.layers import Layer
from penstock.train.config.sections import ModelConfig
from penstock.train.model.llama import layers, next_token_loss

RANKS, MICROBATCHES, ROWS, SEQUENCE = 2, 4, 2, 64
CONFIG = ModelConfig(vocabulary=512, width=128, layers=4, heads=4, kv_heads=2, hidden=384)
VARIANTS: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "fp32": (torch.float32, None),
    "bf16 autocast": (torch.float32, torch.bfloat16),
    "bf16 weights": (torch.bfloat16, None),
}
PARTS = ("weights", "gradients", "optimizer", "activations")


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Return the loss in fp32, as users of every variant would compute it."""
    return next_token_loss(output.float(), target)


def model(dtype: torch.dtype) -> list[Layer]:
    """Return the built-in model's layers in a dtype."""
    return [Layer(one.name, lambda one=one: one.build().to(dtype), one.role) for one in layers(CONFIG)]


def batch() -> tuple[Tensor, Tensor]:
    """Return random tokens, int64 (MICROBATCHES * ROWS, SEQUENCE) each."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(CONFIG.vocabulary, (MICROBATCHES * ROWS, SEQUENCE + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Contestant:
    """One variant, ready to step."""

    def __init__(self, dtype: torch.dtype, autocast: torch.dtype | None) -> None:
        self.pipe = Pipeline(
            model(dtype),
            loss_fn,
            microbatches=MICROBATCHES,
            ranks=RANKS,
            autocast=autocast,
        )
        self.optimizer = PipelineOptimizer(
            self.pipe, torch.optim.AdamW, lr=1e-3, clip=1.0, main_weights=dtype != torch.float32
        )
        self.loss = 0.0

    def step(self) -> float:
        """Return the seconds of a step."""
        begin = perf_counter()
        result = self.pipe.step(*batch())
        self.optimizer.step()
        seconds = perf_counter() - begin
        assert result.loss is not None
        self.loss = float(result.loss)
        return seconds

    def bytes(self) -> dict[str, int]:
        """Return the bytes of each of `PARTS` after a step."""
        self.pipe.step(*batch())
        parameters = list(self.pipe.parameters())
        state = self.optimizer.state_dict()
        trace = self.pipe.trace()
        assert trace is not None
        found = {
            "weights": size(parameters),
            "gradients": size(p.grad for p in parameters if p.grad is not None),
            "optimizer": size(state["main_weights"].values())
            + size(t for entry in state["state"].values() for t in entry.values() if isinstance(t, Tensor)),
            "activations": sum(int(trace.held[trace.rank == r].max()) for r in range(RANKS)),
        }
        self.optimizer.zero_grad()
        return found


def size(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors."""
    return sum(t.nbytes for t in tensors)


def measure(options: argparse.Namespace) -> Figures:
    """Time all variants in turn, then count the bytes of each."""
    torch.set_num_threads(1 if options.quick else RANKS)  # more than one each do badly beside other work
    contestants = {name: Contestant(*given) for name, given in VARIANTS.items()}
    runs: dict[str, Callable[[], float]] = {name: c.step for name, c in contestants.items()}
    times = alternate(runs, options.rounds)
    held = {name: c.bytes() for name, c in contestants.items()}
    for contestant in contestants.values():
        contestant.pipe.close()
    totals = {name: sum(parts.values()) for name, parts in held.items()}
    yield f"{'':15}{'step/fp32':>10}{'seconds':>9}{'loss':>8}" + "".join(
        f"{p:>13}" for p in (*PARTS, "total")
    )
    rows = {}
    for name, parts in held.items():
        rows[name] = {
            "time over fp32": ratio(times[name], times["fp32"]),
            "bytes over fp32": totals[name] / totals["fp32"],
            "seconds": statistics.median(times[name]),
            "loss": contestants[name].loss,
            "bytes": parts,
        }
        sizes = "".join(f"{value / 2**20:10.1f} MB" for value in (*parts.values(), totals[name]))
        yield (
            f"{name:15}{rows[name]['time over fp32']:10.2f}{statistics.median(times[name]):9.3f}"
            f"{contestants[name].loss:8.4f}{sizes}"
        )
    yield f"{options.rounds} rounds, median of the ratios round by round"
    weights = rows["bf16 weights"]
    return {
        "ours": weights["seconds"], "peer": rows["fp32"]["seconds"], "ratio": weights["time over fp32"],
        "variants": rows, "rounds": options.rounds,
    }  # fmt: skip


if __name__ == "__main__":
    main(measure, __doc__, rounds=5)
