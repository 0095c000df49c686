"""The model and the batches of a case, the same each time they are made.

They are on the device that ZOO_DEVICE names, the CPU by default. On CUDA, give CUBLAS_WORKSPACE_CONFIG=:4096:8, too.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import penstock
from penstock.stage.rng.isolated_rng import isolated_rng, seed_of
from tests.zoo.case import Case
from tests.zoo.habits import HABITS, LOSSES
from tests.zoo.kind import WIDTH

DEVICE = torch.device(os.environ.get("ZOO_DEVICE", "cpu"))
if DEVICE.type == "cuda":
    torch.use_deterministic_algorithms(True, warn_only=True)


def drawing(seed: int, step: int, number: int, name: str) -> AbstractContextManager[object]:
    """Random numbers of a layer: on the CPU as plain torch draws them after a seed; a GPU's dropout draws others."""
    if DEVICE.type != "cpu":
        return isolated_rng(seed, step, number, name)
    torch.default_generator.manual_seed(seed_of(seed, step, number, name))  # torch.manual_seed takes 1 ms
    return nullcontext()


@contextmanager
def seeded(*parts: object) -> Iterator[random.Random]:
    """torch's default generator, seeded for a while, and a generator of Python's."""
    chance = random.Random(" ".join(map(str, parts)))
    with torch.random.fork_rng(()):
        torch.default_generator.manual_seed(chance.getrandbits(32))
        yield chance


class Between(nn.Module):
    """Stands where a model has fewer layers than stages."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


def make_layers(case: Case) -> list[nn.Module]:
    """The model's layers; a kind's weights do not depend on the other kinds."""
    placed: list[tuple[float, list[nn.Module]]] = []
    for n, entry in enumerate(case.entries):
        with seeded(case.seed, entry.name) as chance:
            made = entry.build()
            run = made if isinstance(made, list) else [made]
            if entry.spans:
                later = sorted(chance.uniform(n, len(case.kinds)) for _ in run[1:])
                placed += [(place, [layer]) for place, layer in zip(later, run[1:], strict=True)]
                run = run[:1]
            placed.append((n, run))
    blocks = [
        layer
        for _, run in placed
        for layer in run
        if case.own is None or any(True for _ in layer.parameters())
    ]
    for n in range(case.stages - len(blocks)):
        with seeded(case.seed, "between", n) as chance:
            placed.append((chance.uniform(-1, len(case.kinds)), [Between()]))
    return [layer.to(DEVICE) for _, run in sorted(placed, key=lambda pair: pair[0]) for layer in run]


def loss_of(case: Case, model: nn.Module | None) -> Callable[[Any, Tensor], Any] | None:
    """The loss function that a user gives; None if the model's own forward has it."""
    if case.own is None or case.own.loss == "given" or model is None:
        return LOSSES[case.loss].call
    return model.loss if case.own.loss == "method" else None


def layer_names(case: Case, count: int) -> list[str]:
    return [f"part.{n}" if case.form == "named" else str(n) for n in range(count)]


def own_model(case: Case, layers: list[nn.Module]) -> nn.Module | None:
    """The layers in a model with a forward of its own, if the case has one."""
    if case.own is None:
        return None
    with seeded(case.seed, "own", case.forward):
        return case.own.build(layers).to(DEVICE)


def as_model(case: Case, layers: list[nn.Module]) -> object:
    """The layers as a user gives them, without a forward of their own."""
    if case.form == "sequential":
        return nn.Sequential(*layers)
    if case.form == "named":
        return list(zip(layer_names(case, len(layers)), layers, strict=True))
    if case.form == "builders":
        return [lambda layer=layer: layer for layer in layers]
    return layers


class Batch(NamedTuple):
    """A step's batch: as it is given to a pipeline, and by microbatch."""

    x: object
    y: object
    parts: list[tuple[Tensor, Tensor]]
    inputs: dict[str, object]
    inputs_of_parts: list[dict[str, Tensor]]


def make_batch(case: Case, step: int) -> Batch:
    """The batch of a step; of all replicas."""
    count = case.microbatches * case.dp
    sizes = [case.rows] * count
    if case.uneven == "odd":
        sizes = [case.rows - (n >= (count + 1) // 2) for n in range(count)]
    elif case.uneven in ("microbatches", "empty"):
        sizes = [case.rows + n % 3 for n in range(count)]
    if case.uneven == "empty":
        sizes[1] = 0
    with seeded(case.seed, "batch", step):
        x, y = torch.randn(sum(sizes), WIDTH), torch.randn(sum(sizes), WIDTH)
    x, y = HABITS[case.habit].batch(step, x.to(DEVICE), y.to(DEVICE))
    xs, ys = x.split(sizes), y.split(sizes)
    parts = [(a.clone(), b.clone()) for a, b in zip(xs, ys, strict=True)]
    inputs: dict[str, object] = dict(case.own.inputs(x)) if case.own is not None else {}
    cut = {name: torch.as_tensor(value).split(sizes) for name, value in inputs.items()}
    of_parts = [{name: values[n].clone() for name, values in cut.items()} for n in range(count)]
    if case.uneven in ("microbatches", "empty"):
        return Batch(
            penstock.Microbatches([a.clone() for a in xs]),
            penstock.Microbatches([b.clone() for b in ys]),
            parts,
            {name: penstock.Microbatches([v.clone() for v in values]) for name, values in cut.items()},
            of_parts,
        )
    return Batch(x, y, parts, inputs, of_parts)


def counts(target: Tensor) -> Tensor:
    """How much a microbatch counts, for the reduction "count"."""
    return (target[:, 0] > -0.5).sum()


def shares(case: Case, parts: list[tuple[Tensor, Tensor]]) -> list[tuple[float, int]]:
    """For each microbatch, what its loss is multiplied with and divided by."""
    rows = [len(y) for _, y in parts]
    if case.reduction == "sum":
        return [(1.0, 1)] * len(rows)
    if case.reduction == "mean" and len(set(rows)) == 1:
        return [(1.0, len(rows))] * len(rows)
    weights = rows if case.reduction == "mean" else [int(counts(y)) for _, y in parts]
    return [(n / sum(weights), 1) for n in weights]


def make_optimizer(case: Case) -> tuple[type[torch.optim.Optimizer], dict[str, float]]:
    """A class of torch.optim and its options."""
    return {
        "sgd": (torch.optim.SGD, {"lr": 0.05}),
        "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
        "adam": (torch.optim.Adam, {"lr": 0.01}),
        "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
        "adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    }[case.optimizer]
