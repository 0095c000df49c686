"""A small model, and loops of it that are right or have a mistake, all recorded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

import penstock

MICROBATCHES, STEPS = 4, 2


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.act, self.down = nn.GELU(), nn.Linear(2 * width, width)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.down(self.act(self.up(self.norm(value))))


class Model(nn.Module):
    def __init__(self, blocks: int = 4, tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(blocks))
        self.head = nn.Linear(16, 32, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        value = self.table(ids)
        for block in self.blocks:
            value = block(value)
        return self.head(value)


def make(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options)


def loss_of(output: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), ids.flatten())


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, 32, (8, 12), generator=torch.Generator().manual_seed(step))


def accumulate(model: nn.Module, ids: torch.Tensor, step: int) -> None:
    for part in ids.chunk(MICROBATCHES):
        (loss_of(model(part), part) / MICROBATCHES).backward()


def plain(
    folder: Path | None,
    run: Callable[[nn.Module, torch.Tensor, int], None] = accumulate,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> nn.Module:
    """Train without a pipeline; `run` makes the gradients of a step."""
    model = make(**options).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with nullcontext() if folder is None else penstock.record(folder, model, steps=STEPS):
        for step in range(STEPS + 1):
            optimizer.zero_grad()
            run(model, batch(step), step)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return model


def piped(folder: Path | None, model: nn.Module, **options: Any) -> nn.Module:
    """Train through a pipeline, in threads or in the processes that there are."""
    given = {"ranks": 2, "microbatches": MICROBATCHES, **options}
    zero = given.pop("zero", False)
    with penstock.Pipeline(model, loss_of, **given) as pipe:
        optimizer = penstock.PipelineOptimizer(pipe, torch.optim.AdamW, lr=1e-2, clip=1.0, zero=zero)
        with nullcontext() if folder is None else penstock.record(folder, pipe, steps=STEPS):
            for step in range(STEPS + 1):
                optimizer.zero_grad()
                pipe.step(batch(step), batch(step))
                optimizer.step()
    return model


def in_process(rank: int, folder: str, options: dict[str, Any]) -> None:
    """Train as one of several processes."""
    torch.set_num_threads(1)
    piped(Path(folder), make(), **options)
