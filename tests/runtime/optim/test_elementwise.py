"""Optimizers whose update of an element depends on others get whole matrices, or are refused, whatever they are called."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.parallel.dtensor import full_tensor
from penstock.parallel.mesh import MeshShape
from penstock.runtime.model.optimizer_trials import MakeOptimizer, looks_across, needs_whole
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


class Estimated(Simple):
    """As Prodigy: the distance that all parameters went makes the step, which begins very small."""

    def __init__(self, params: Any, lr: float = 0.01, first: float = 1e-6) -> None:
        super().__init__(params, lr, first=first)
        self.distance, self.moved = first, 0.0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        grads = [p.grad for p in group["params"] if p.grad is not None]
        self.moved += self.distance * sum(float(g.square().sum()) for g in grads)
        self.distance = max(self.distance, self.moved / (1 + sum(float(g.abs().sum()) for g in grads)))
        super().step()

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return self.distance * grad


class Together(Simple):
    """Takes the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        self.norm = sum(g.square().sum() for g in grads) ** 0.5
        super().step()

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad / (self.norm + 1e-3)


class Sharpness(Together):
    """As SAM: runs the model again."""

    @torch.no_grad()
    def step(self, closure: Any) -> None:  # type: ignore[override]
        super().step()
        closure()
        super().step()


class Noise(Simple):
    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad + torch.randn_like(p)


class Items(Simple):
    """Takes a number out of a norm, which of a DTensor is that of this process's part."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad / (grad.norm().item() + 1e-6)


class Steps(Simple):
    """Needs an argument that is none of its options."""

    def __init__(self, params: Any, steps: list[int]) -> None:
        super().__init__(params)
        steps[0] += 1


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


@pytest.mark.parametrize(
    ("make", "options", "across"),
    [
        (torch.optim.AdamW, {}, False),
        (torch.optim.Muon, {}, False),
        (torch.optim.LBFGS, {}, True),
        (AdamW, {"lr": torch.tensor(0.0), "amsgrad": True}, False),
        (TrustRatio, {}, False),
        (Columns, {}, False),
        (Together, {"lr": 0.0}, True),
        (partial(Together, lr=1.0), {}, True),
        (lambda groups: Together(groups), {}, True),
        (Estimated, {}, True),
        (Estimated, {"first": 1e-12}, True),
        (Sharpness, {}, True),
        (Noise, {}, False),
        (Steps, {}, False),
        (Unusual, {}, False),
    ],
)
def test_a_trial_shows_whether_tensors_are_updated_by_themselves(
    make: MakeOptimizer, options: dict[str, Any], across: bool
):
    before = torch.get_rng_state()
    assert looks_across(make, options, torch.device("cpu")) == across
    assert torch.equal(torch.get_rng_state(), before)


def in_threads(make: MakeOptimizer | None, ranks: int, **options: Any) -> dict[str, Tensor] | str:
    """Whole weights after an update by a PipelineOptimizer, or by one optimizer of all parameters; or what is said."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    with Pipeline(net, torch.nn.MSELoss(), microbatches=2, ranks=ranks, timeout=120) as pipe:
        if make is not None and (told := outcome(PipelineOptimizer, pipe, make, **options)) != "ok":
            return told
        optimizer = Together(pipe.parameters()) if make is None else PipelineOptimizer(pipe, make, **options)
        pipe.step(*torch.randn(2, 4, 4))
        optimizer.step()
        return {name: p.detach().clone() for name, p in pipe.named_parameters()}


def test_an_optimizer_that_looks_across_tensors_gets_all_of_them_or_is_refused():
    assert "Together's update of a parameter depends on the others" in in_threads(Together, 2)
    wanted = in_threads(None, 1)
    for got in (in_threads(None, 2), in_threads(Together, 1)):
        assert all(torch.equal(value, wanted[name]) for name, value in got.items())
    last = [{"names": ["3.weight", "3.bias"], "optimizer": Together}]
    in_one, in_two = (in_threads(torch.optim.SGD, ranks, groups=last, lr=0.01) for ranks in (1, 2))
    assert all(torch.equal(value, in_one[name]) for name, value in in_two.items())
    both = [{"match": "weight", "optimizer": Together}]
    assert "each of 2 ranks" in in_threads(torch.optim.SGD, 2, groups=both, lr=0.01)


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
        (cut, False, {"optimizer": Together}),
        (divided, True, {"optimizer": Together}),
        (divided, True, {"zero": True}),
        (replicas, False, {"zero": True, "optimizer": Together}),
        (MeshShape(2, 1, 1), False, {"optimizer": Together}),
    ]
    *done, refused, with_zero, staged = run_cases(processes, 2, trained, cases)
    for (_, experts, options), results in zip(cases, done, strict=False):
        wanted = trained(0, None, experts, options)
        for result in results:
            assert not isinstance(result, str), (options, result)
            assert result.keys() == wanted.keys()
            for name, value in result.items():
                torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-6, msg=f"{options} {name}")
    assert all("is a stack of divided experts, whose optimizer needs whole matrices" in t for t in refused)
    assert all("with ZeRO each replica has some only" in t for t in with_zero)
    assert all("each of 2 ranks has only its own" in t for t in staged)


def trained_plain(
    rank: int, mesh: MeshShape | None, kind: MakeOptimizer, dense: bool, compiled: bool = False
) -> Trained:
    """Whole weights after updates by an optimizer of ``pipe.parameters()``; or what is said against it."""
    net, loss = (layers(CONFIG), next_token_loss) if dense else (mixture(2), loss_of)
    with Pipeline(
        net, loss, microbatches=4 // (mesh.dp if mesh else 1), mesh=mesh, ranks=None if mesh else 1, timeout=120
    ) as pipe:  # fmt: skip
        optimizer = kind(pipe.parameters())
        update = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            pipe.step(*torch.randint(0, 16, (2, 4, 8), generator=generator))
            if (told := outcome(update)) != "ok":
                return told
            optimizer.zero_grad()
        return {name: full_tensor(p.detach()).clone() for name, p in pipe.named_parameters()}


@pytest.mark.slow
def test_plain_optimizers_of_a_process_s_parameters_are_as_of_the_whole_model_or_refused(
    processes: LocalProcesses,
):
    stages, cut, divided = MeshShape(2, 1, 1), MeshShape(1, 1, 2), MeshShape(dp=2, ep=2)
    right = [
        (stages, TrustRatio, True),
        (stages, torch.optim.Adafactor, True),
        (cut, TrustRatio, True),
        (cut, Columns, True),
        (divided, torch.optim.AdamW, False),
        (divided, TrustRatio, False),
    ]
    refused = {
        (stages, Together, True): "each of the 2 ranks has only its own",
        (stages, Estimated, True): "each of the 2 ranks has only its own",
        (cut, Items, True): "Items looks at more than each element",
        (cut, Items, True, True): "Items looks at more than each element",
        (divided, Items, False): "Items looks at more than each element",
        (divided, torch.optim.Adafactor, False): "Adafactor looks at more than each element",
        (divided, Estimated, False): "Estimated looks at more than each element",
    }
    cases = [*right, *refused]
    results = run_cases(processes, 2, trained_plain, cases)
    for case, by_rank in zip(cases, results, strict=True):
        if case in refused:
            assert all(isinstance(told, str) and refused[case] in told for told in by_rank), (case, by_rank)
            continue
        wanted = trained_plain(0, None, *case[1:])
        for result in by_rank:
            for name, value in result.items():
                torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-6, msg=f"{case} {name}")
