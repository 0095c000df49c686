"""Optimizers whose update of an element depends on others get whole matrices, or are refused, whatever they are called."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.parallel.dtensor import full_tensor
from penstock.parallel.mesh import MeshShape
from penstock.runtime.optim.elementwise import MakeOptimizer, needs_whole
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.options import ParallelOptions
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.train.config.sections import ModelConfig
from penstock.train.model.llama import layers, next_token_loss
from tests.support.groups import outcome, run_cases
from tests.support.mixtures import loss_of, mixture

CONFIG = ModelConfig(vocabulary=32, width=16, layers=2, heads=4, kv_heads=2, hidden=32)


class Simple(torch.optim.Optimizer):
    """Subclasses say what a gradient makes of a parameter."""

    def __init__(self, params: Any, lr: float = 0.01, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.update(p, p.grad, group))

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class Signs(Simple):
    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad.sign() + 0.1 * p


class TrustRatio(Simple):
    """As LARS and LAMB."""

    def __init__(self, params: Any, lr: float = 0.01, trust: bool = True) -> None:
        super().__init__(params, lr, trust=trust)

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad / (grad.norm() + 1e-6) * p.norm() if group["trust"] else grad


class Clipped(Simple):
    """Does what depends on the whole in some steps only."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad / grad.square().mean().sqrt().clamp(min=50.0)


class Columns(Simple):
    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad - grad.mean(0)


class Matrices(Simple):
    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        rows, columns = p.shape
        return grad * rows / columns


class Decayed(Simple):
    """Decays matrices alone, which parts of them in one dimension no longer are."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad + 0.1 * p if p.dim() > 1 else grad


class Unusual(Simple):
    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad * group["scales"][p.shape]


class AdamW(torch.optim.AdamW):
    """A class of a program, with another's name."""


def by_function(groups: Any, **options: Any) -> torch.optim.Optimizer:
    return TrustRatio(groups, **options)


def adafactor_by_function(groups: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(groups, lr=lr)


@pytest.mark.parametrize(
    ("make", "options", "whole"),
    [
        (torch.optim.AdamW, {}, False),
        (torch.optim.Adafactor, {}, True),
        (partial(torch.optim.Muon, momentum=0.9), {}, True),
        (AdamW, {"lr": torch.tensor(0.0), "amsgrad": True}, False),
        (Signs, {}, False),
        (TrustRatio, {"lr": 0.0}, True),
        (TrustRatio, {"trust": False}, False),
        (partial(TrustRatio, trust=False), {}, False),
        (by_function, {}, True),
        (lambda groups: torch.optim.Adafactor(groups), {}, True),
        (lambda groups: torch.optim.Muon(groups), {}, True),
        (lambda groups: torch.optim.Adam(groups), {}, False),
        (lambda groups: torch.optim.Adam(groups[2:]), {}, True),  # cannot be tried
        (Clipped, {}, True),
        (Columns, {}, True),
        (Matrices, {}, True),
        (Decayed, {}, True),
        (Unusual, {}, True),
    ],
)
def test_a_trial_shows_whether_elements_are_updated_by_themselves(
    make: MakeOptimizer, options: dict[str, Any], whole: bool
):
    before = torch.get_rng_state()
    assert needs_whole(make, options, torch.device("cpu")) == whole
    assert torch.equal(torch.get_rng_state(), before)


Trained = dict[str, Tensor] | str


def trained(rank: int, mesh: MeshShape | None, experts: bool, options: dict[str, Any]) -> Trained:
    """Whole weights after updates that take the norm of each tensor; or what is said against them."""
    net, loss = (mixture(2), loss_of) if experts else (layers(CONFIG), next_token_loss)
    with Pipeline(
        net, loss, microbatches=4 // (mesh.dp if mesh else 1), mesh=mesh, ranks=None if mesh else 1, timeout=120,
        parallel=ParallelOptions(bucket_bytes=1000),
    ) as pipe:  # fmt: skip
        given = {"optimizer": TrustRatio, "lr": 0.01, **options}
        if (told := outcome(PipelineOptimizer, pipe, **given)) != "ok":
            return told
        optimizer = PipelineOptimizer(pipe, **given)
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            pipe.step(*torch.randint(0, 16, (2, 4, 8), generator=generator))
            optimizer.step()
        return {name: full_tensor(p.detach()).clone() for name, p in pipe.named_parameters()}


@pytest.mark.slow
def test_norms_of_tensors_are_those_of_whole_ones(processes: LocalProcesses):
    replicas, cut, divided = MeshShape(1, 2, 1), MeshShape(1, 1, 2), MeshShape(dp=2, ep=2)
    cases = [
        (replicas, False, {"zero": True}),
        (replicas, False, {"zero": True, "groups": [{"match": "norm", "trust": False}]}),
        (replicas, False, {"zero": True, "optimizer": adafactor_by_function}),
        (cut, False, {}),
        (cut, False, {"optimizer": adafactor_by_function}),
        (divided, True, {}),
        (divided, True, {"groups": [{"match": "experts", "trust": False}], "zero": True}),
        (divided, True, {"zero": True}),
    ]
    *done, refused = run_cases(processes, 2, trained, cases)
    for (_, experts, options), results in zip(cases, done, strict=False):
        wanted = trained(0, None, experts, options)
        for result in results:
            assert result.keys() == wanted.keys()
            for name, value in result.items():
                torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-6, msg=f"{options} {name}")
    assert all("is a stack of divided experts, whose optimizer needs whole matrices" in t for t in refused)
