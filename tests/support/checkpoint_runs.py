"""Small runs for tests of checkpoints: the built-in model with dropout, at any layout."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.checkpoint.checkpoints import Checkpoints
from penstock.parallel.mesh import MeshShape
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.pipeline import Pipeline
from penstock.stage.layers import Layer
from penstock.train.config.sections import ModelConfig
from penstock.train.model.llama import layers, next_token_loss

CONFIG = ModelConfig(vocabulary=32, width=16, layers=8, heads=4, kv_heads=2, hidden=32)
MICROBATCHES, ROWS, SEQUENCE = 4, 8, 8


def tokens(step: int) -> tuple[Tensor, Tensor]:
    """The batch of a step; each sample begins with its own number, modulo the vocabulary."""
    generator = torch.Generator().manual_seed(step)
    found = torch.randint(0, 32, (ROWS, SEQUENCE + 1), generator=generator)
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


def model(dropout: float = 0.0) -> list[Layer]:
    """8 blocks; with dropout after the 4th."""
    found = list(layers(CONFIG))
    if dropout:
        found.insert(5, Layer("drop", lambda: nn.Dropout(dropout)))
    return found


def pipeline(
    mesh: MeshShape | None = None, *, ranks: int | None = None, dropout: float = 0.0, **options: Any
):
    """Make a pipeline of the model over the mesh's processes, or of threads."""
    replicas = 1 if mesh is None else mesh.dp
    return Pipeline(
        model(dropout), next_token_loss, microbatches=MICROBATCHES // replicas, ranks=ranks, mesh=mesh, timeout=300,
        **options,
    )  # fmt: skip


def adamw(pipe: Pipeline, zero: Any = False) -> PipelineOptimizer:
    """Two groups, a schedule of the learning rate, clipping."""
    return PipelineOptimizer(
        pipe, torch.optim.AdamW, groups=[{"match": "norm", "weight_decay": 0.0}], clip=1.0,
        lr_factor=lambda step: 1.0 / (1 + step), lr=0.01, zero=zero,
    )  # fmt: skip


def steps(pipe: Pipeline, optimizer: PipelineOptimizer, count: int) -> list[float]:
    """Train some steps from the pipeline's current one; return their losses."""
    losses = []
    for _ in range(count):
        losses.append(float(pipe.step(*tokens(pipe.steps)).loss))
        optimizer.step()
    return losses


def state_of(pipe: Pipeline, optimizer: PipelineOptimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return copies of both states, with full tensors for sharded ones."""
    from penstock.parallel.dtensor import full_tensor

    state = optimizer.state_dict()
    state["state"] = {
        name: {key: full_tensor(v) if isinstance(v, Tensor) else v for key, v in entries.items()}
        for name, entries in state["state"].items()
    }
    return copy.deepcopy((dict(pipe.state_dict()), state))


def trained(
    rank: int,
    folder: Path,
    mesh: MeshShape | None,
    before: int,
    after: int,
    *,
    saves: bool = True,
    zero: Any = False,
    **options: Any,
) -> tuple[list[float], tuple[dict[str, Any], dict[str, Any]], tuple[dict[str, Any], dict[str, Any]]]:
    """Continue from the newest checkpoint of a folder, if there is one; save after so many steps, then take some more.

    Returns:
        Losses, the states as loaded, the states at the end.
    """
    torch.set_num_threads(1)
    with pipeline(mesh, **options) as pipe:
        optimizer = adamw(pipe, zero)
        with Checkpoints(folder, pipe, optimizer) as checkpoints:
            checkpoints.load_newest()
            loaded = state_of(pipe, optimizer)
            losses = steps(pipe, optimizer, before)
            if saves:
                checkpoints.save({"seen": pipe.steps})
            losses += steps(pipe, optimizer, after)
        return losses, loaded, state_of(pipe, optimizer)


def equal(one: Any, other: Any) -> bool:
    """Return whether two states are equal bit for bit."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and one.keys() == other.keys()
            and all(equal(v, other[k]) for k, v in one.items())
        )
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return one == other
