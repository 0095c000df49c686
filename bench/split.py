"""Cost of splitting the backward: I + W over B, ours and torch.distributed.pipelining's, in one thread.

The mid-size block is a transformer block of width 256 on 4 sequences of 128. The tiny one has 48 parameters (24 linear
layers of width 16) and a batch of 4. "with forward" includes the forward's share of the cost. On CUDA the mid-size block has
width 2048 and sequences of 1024, in bf16.

    python -m bench.split [--device cuda] [--rounds N] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from time import perf_counter

import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from bench.compare import Figures, alternate, main, ratio
from bench.peer import add_device
from penstock.stage.compute.stage import Stage
from penstock.stage.layers import Layer
from penstock.stage.module import StageModule
from penstock.stage.values import Message
from penstock.train.config.sections import ModelConfig
from penstock.train.model.llama import LlamaBlock

MICROBATCHES = 8


def mid_size(device: str = "cpu") -> tuple[nn.Module, torch.Tensor]:
    """Return a block of the built-in model, and an input."""
    torch.manual_seed(0)
    width, sequence, dtype = (256, 128, torch.float32) if device == "cpu" else (2048, 1024, torch.bfloat16)
    block = LlamaBlock(ModelConfig(width=width, heads=8, kv_heads=8, hidden=4 * width))
    return block.to(device, dtype), torch.randn(4, sequence, width, device=device, dtype=dtype)


def tiny(device: str = "cpu") -> tuple[nn.Module, torch.Tensor]:
    """Return a block of 48 tiny parameters, and an input."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(16, 16) for _ in range(24)])
    return net.to(device), torch.randn(4, 16, device=device)


def now(x: torch.Tensor) -> float:
    """Return the time in seconds at which the device of `x` is done with what it was given."""
    if x.is_cuda:
        torch.cuda.synchronize()
    return perf_counter()


def ours(block: nn.Module, x: torch.Tensor, split: bool) -> tuple[float, float]:
    """Return the seconds of (forwards, backwards) of all microbatches through a Stage, after the split is checked."""
    stage = Stage(0, StageModule([Layer("0", lambda: block)]))
    forward = backward = 0.0
    for n in range(-1, MICROBATCHES):
        if n == 0:
            forward = backward = 0.0
        message = (Message((x.clone(),), None, (True,)),)
        begin = now(x)
        (out,) = stage.forward(n, message, split)
        middle = now(x)
        grad = (Message((torch.ones_like(out.leaves[0]),)),)
        start = now(x)
        if split:
            stage.backward_input(n, grad)
            stage.backward_weight(n)
        else:
            stage.backward(n, grad)
        forward += middle - begin
        backward += now(x) - start
    block.zero_grad()
    return forward, backward


def peer(block: nn.Module, x: torch.Tensor) -> tuple[float, float]:
    """Return the same for the functions by which torch.distributed.pipelining splits."""
    forward = backward = 0.0
    for _ in range(MICROBATCHES):
        leaf = x.clone().requires_grad_()
        begin = now(x)
        out = block(leaf)
        middle = now(x)
        grad = torch.ones_like(out)
        start = now(x)
        _, groups = stage_backward_input([out], [grad], [leaf], iter(block.parameters()))
        stage_backward_weight(iter(block.parameters()), groups)
        forward += middle - begin
        backward += now(x) - start
    block.zero_grad()
    return forward, backward


def compared(made: tuple[nn.Module, torch.Tensor], rounds: int) -> dict[str, float]:
    """Return ratios to the full backward, from alternating runs."""
    block, x = made
    seen: dict[str, list[tuple[float, float]]] = {"whole": [], "halves": [], "peer": []}
    runs: dict[str, Callable[[], tuple[float, float]]] = {
        "whole": lambda: ours(block, x, False),
        "halves": lambda: ours(block, x, True),
        "peer": lambda: peer(block, x),
    }

    def noted(name: str) -> float:
        found = runs[name]()
        seen[name].append(found)
        return found[1]

    times = alternate({name: (lambda name=name: noted(name)) for name in runs}, rounds)
    both = {name: [f + b for f, b in found[-rounds:]] for name, found in seen.items()}
    return {
        "ours": ratio(times["halves"], times["whole"]),
        "peer": ratio(times["peer"], times["whole"]),
        "ours with forward": ratio(both["halves"], both["whole"]),
        "peer with forward": ratio(both["peer"], both["whole"]),
        "backward_ms": statistics.median(times["whole"]) / MICROBATCHES * 1e3,
    }


def measure(options: argparse.Namespace) -> Figures:
    """Measure both blocks."""
    torch.set_num_threads(1)
    columns = ("ours", "peer", "ours with forward", "peer with forward")
    yield f"{'(I + W) / B':20}" + "".join(f"{c:>19}" for c in columns)
    rows = {}
    for name, make in (("mid-size block", mid_size), ("48 tiny parameters", tiny)):
        row = rows[name] = compared(make(options.device), options.rounds)
        yield f"{name:20}" + "".join(f"{row[c]:19.3f}" for c in columns)
    yield f"{options.rounds} rounds"
    first = rows["mid-size block"]
    return {
        "ours": first["ours"],
        "peer": first["peer"],
        "ratio": first["ours"] / first["peer"],
        "cases": rows,
    }


if __name__ == "__main__":
    main(measure, __doc__, rounds=25, add=add_device)
