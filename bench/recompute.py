"""Time and memory with recompute of no block, every block and every second block.

Two ranks in threads, 1F1B, the built-in model. Memory is the allocator's (see bench.memory): the peak between ops, which
recompute reduces, and the peak at any moment, which adds the block that is back in memory and the temporary tensors of a
backward. For comparison: the unsplit model with and without ``torch.utils.checkpoint`` around every block, with the bytes
in use after the forward of as many microbatches as the first rank holds.

    python -m bench.recompute [--rounds N] [--quick] [--json]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bench.compare import Figures, alternate, main, ratio
from bench.memory import Live, watch
from penstock.runtime.pipeline import Pipeline
from penstock.stage.compute.recompute import Policy
from penstock.stage.module import StageModule
from penstock.train.config.sections import ModelConfig
from penstock.train.model.llama import layers, next_token_loss

RANKS, MICROBATCHES, ROWS, SEQUENCE, QUICK_SEQUENCE = 2, 8, 4, 128, 32
CONFIG = ModelConfig(width=128, layers=8, heads=4, kv_heads=4, hidden=352)
POLICIES: tuple[Policy, ...] = ("none", "full", 2)


def batch(sequence: int) -> tuple[Tensor, Tensor]:
    """Return a step's tokens."""
    size = (MICROBATCHES * ROWS, sequence + 1)
    tokens = torch.randint(0, 256, size, generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def pipeline(policy: Policy) -> Pipeline:
    """Return a pipeline of the built-in model on two ranks."""
    return Pipeline(layers(CONFIG), next_token_loss, microbatches=MICROBATCHES, ranks=RANKS, recompute=policy)


def memory(policy: Policy, x: Tensor, y: Tensor) -> tuple[int, int]:
    """Return the bytes of the rank that holds most, between ops and at any moment; the gradients exist before."""
    with pipeline(policy) as pipe:
        pipe.step(x, y)
        between, within = [0] * RANKS, [0] * RANKS
        pipe.wrap_ops(watch(between, within))
        pipe.step(x, y)
    return max(between), max(within)


def unsplit(checkpointed: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss of the full model in plain PyTorch, with or without ``torch.utils.checkpoint`` on every block."""
    module = StageModule(layers(CONFIG))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        value: Tensor = x
        for layer in module.layers:
            value = checkpoint(layer, value, use_reentrant=False) if checkpointed else layer(value)
        return next_token_loss(value, y)

    return loss


def plain_step(checkpointed: bool, x: Tensor, y: Tensor) -> Callable[[], float]:
    """Return the seconds of a step of the unsplit model."""
    loss = unsplit(checkpointed)
    parts = list(zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True))

    def step() -> float:
        begin = perf_counter()
        for a, b in parts:
            (loss(a, b) / MICROBATCHES).backward()
        return perf_counter() - begin

    return step


def plain_memory(checkpointed: bool, x: Tensor, y: Tensor) -> int:
    """Return bytes in use after the forwards of the first rank's microbatches through its half of the model."""
    loss, live, kept = unsplit(checkpointed), Live(), []
    with live:
        for a, b in list(zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True))[:RANKS]:
            kept.append(loss(a, b))
        return live.bytes // 2


def measure(options: argparse.Namespace) -> Figures:
    """Time all policies in turn, then measure the memory of each."""
    torch.set_num_threads(1 if options.quick else RANKS)  # more than one each do badly beside other work
    x, y = batch(QUICK_SEQUENCE if options.quick else SEQUENCE)
    pipes = {policy: pipeline(policy) for policy in POLICIES}

    def timed(pipe: Pipeline) -> float:
        begin = perf_counter()
        pipe.step(x, y)
        return perf_counter() - begin

    runs: dict[str, Callable[[], float]] = {
        f"recompute={policy}": (lambda pipe=pipe: timed(pipe)) for policy, pipe in pipes.items()
    }
    runs |= {"plain": plain_step(False, x, y), "plain, checkpointed": plain_step(True, x, y)}
    times = alternate(runs, options.rounds)
    for pipe in pipes.values():
        pipe.close()
    rows = []
    yield f"{'':22}{'time':>7}{'held between ops':>18}{'at any moment':>16}   (over none)"
    bytes_of = {policy: memory(policy, x, y) for policy in POLICIES}
    base = bytes_of["none"]
    for policy, (between, within) in bytes_of.items():
        slower = ratio(times[f"recompute={policy}"], times["recompute=none"])
        rows.append({"recompute": policy, "time": slower, "between": between, "within": within})
        yield (
            f"{f'recompute={policy}':22}{slower:7.3f}{between / base[0]:8.3f} {between / 2**20:6.2f} MB"
            f"{within / base[1]:6.3f} {within / 2**20:6.2f} MB"
        )
    peer = ratio(times["plain, checkpointed"], times["plain"])
    kept = plain_memory(True, x, y) / plain_memory(False, x, y)
    yield f"{'plain, checkpointed':22}{peer:7.3f}{kept:8.3f}              (over plain)"
    yield f"{options.rounds} rounds"
    ours = rows[1]["time"]
    return {"ours": ours, "peer": peer, "ratio": ours / peer, "rows": rows}


if __name__ == "__main__":
    main(measure, __doc__, rounds=7)
