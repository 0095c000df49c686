"""Experts of the built-in decoder beside a plain loop over them in torch: forward and backward in one process.

The loop takes each expert's tokens, its two products, and adds to the output: a matrix of a stack at a time, whose gradient
PyTorch makes as large as the stack. "unbound" is the loop with the stacks unbound before, which avoids that.

    python -m bench.experts [--threads N] [--rounds N] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.compare import Figures, alternate, main, ratio
from penstock.train.model.experts import Experts

SIZES = (
    (512, 128, 352, 8, 2), (2048, 512, 512, 8, 2), (512, 256, 128, 64, 8), (64, 256, 512, 32, 2),
)  # fmt: skip
"""Tokens, width, hidden size, experts, and experts of a token."""


def by_loop(
    gate_up: Tensor | Sequence[Tensor],
    down: Tensor | Sequence[Tensor],
    x: Tensor,
    index: Tensor,
    weights: Tensor,
) -> Tensor:
    """Compute what `Experts` does, expert by expert."""
    out = torch.zeros_like(x)
    for expert in range(len(gate_up)):
        token, place = torch.where(index == expert)
        gate, up = F.linear(x[token], gate_up[expert]).chunk(2, -1)
        made = F.linear(F.silu(gate) * up, down[expert])
        out.index_add_(0, token, made * weights[token, place, None])
    return out


def compared(sizes: tuple[int, int, int, int, int], rounds: int) -> dict[str, float]:
    """Return ratios of times, and the time of `Experts` in ms."""
    tokens, width, hidden, count, chosen = sizes
    torch.manual_seed(0)
    experts = Experts(count, width, hidden)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=width**-0.5)
    x = torch.randn(tokens, width, requires_grad=True)
    weights, index = torch.rand(tokens, count).topk(chosen)
    weights.requires_grad_()
    up, down = experts.gate_up_proj, experts.down_proj
    outputs: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: experts(x, index, weights),
        "loop": lambda: by_loop(up, down, x, index, weights),
        "unbound": lambda: by_loop(up.unbind(0), down.unbind(0), x, index, weights),
    }

    def seconds(name: str) -> float:
        experts.zero_grad()
        x.grad = weights.grad = None
        begin = perf_counter()
        out = outputs[name]()
        out.backward(torch.ones_like(out))
        return perf_counter() - begin

    times = alternate({name: partial(seconds, name) for name in outputs}, rounds)
    return {
        "loop": ratio(times["ours"], times["loop"]),
        "unbound": ratio(times["ours"], times["unbound"]),
        "ms": statistics.median(times["ours"]) * 1e3,
    }


def measure(options: argparse.Namespace) -> Figures:
    """Measure all sizes."""
    torch.set_num_threads(options.threads)
    yield " tokens  width hidden experts chosen  ours/loop  ours/unbound  ours ms"
    rows = []
    for sizes in SIZES[-1:] if options.quick else SIZES:
        row = compared(sizes, options.rounds)
        rows.append({"sizes": sizes, **row})
        tokens, width, hidden, count, chosen = sizes
        yield (
            f"{tokens:7}{width:7}{hidden:7}{count:8}{chosen:7}"
            f"{row['loop']:11.3f}{row['unbound']:14.3f}{row['ms']:9.2f}"
        )
    yield f"{options.rounds} rounds, {options.threads} threads, median of the ratios round by round"
    return {"ratio": max(row["loop"] for row in rows), "cases": rows}


def _add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default 1)")


if __name__ == "__main__":
    main(measure, __doc__, rounds=11, add=_add)
