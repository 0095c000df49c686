"""Comparison of pipelined training with plain PyTorch on the user's own model, number by number.

The same few steps are trained three ways: unsplit with plain gradient accumulation, through a pipeline of threads, and
through a pipeline of gloo processes. The report has the largest differences of losses, weights and gradients; 0 means
equal bit for bit. With ``ep``, there are ``ep`` such pipelines side by side, which divide the experts of their layers;
with ``cp``, each of them is ``cp`` pipelines that divide the tokens of their samples.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.base.current_folder import current_folder_last
from penstock.base.errors import ConfigError, PenstockError
from penstock.parallel.dtensor import full_tensor
from penstock.parallel.mesh import MeshShape
from penstock.runtime.batch.loss_weights import loss_weights
from penstock.runtime.model.given_model import given_model
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.validation import resolve_schedule
from penstock.runtime.workers.pool import LocalProcesses, require_processes
from penstock.schedule.families import FAMILIES, require_family
from penstock.schedule.text import is_csv
from penstock.stage.compute.runner import LossFunction
from penstock.stage.microbatches import split_batch
from penstock.stage.module import StageModule
from penstock.stage.named import Context, within
from penstock.stage.same_values import same_values

__all__ = ["VerifyTarget"]

LEARNING_RATE, MAX_NORM = 1e-2, 1.0
SLACK = 4.0


@dataclass(frozen=True)
class VerifyTarget:
    """A model to verify, with its loss and data.

    Attributes:
        model: anything that `Pipeline` takes; it must be the same each time it is made.
        loss_fn: ``loss_fn(output, target)``, the mean over its microbatch; None for the loss that the model computes.
        batch: ``batch(step, microbatches)`` → (x, y), the same each time, of a size divisible by the microbatches.
    """

    model: object
    loss_fn: LossFunction | None
    batch: Callable[[int, int], tuple[object, object]]


@dataclass(frozen=True, kw_only=True)
class _Case:
    target: str
    schedule: str
    ranks: int
    virtual_stages: int
    microbatches: int
    steps: int
    ep: int
    cp: int

    @property
    def processes(self) -> int:
        return self.ranks * self.ep * self.cp


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Largest absolute differences from plain PyTorch over all steps, microbatches and parameters."""

    # Layout of the run; transport is "threads" or "processes".
    schedule: str
    transport: str
    ranks: int
    microbatches: int
    # Largest differences; weights and gradients after the last step.
    loss: float
    weights: float
    gradients: float
    # Bounds on these three: 0 for schedules that sum a stage's gradients in the order of the microbatches.
    # Schedules with two copies of a stage, and replicas, differ in the order of summation alone, and may be
    # `SLACK` times as far from plain PyTorch as that is from the same training in float64, or as a last bit of a loss.
    allowed: tuple[float, float, float]
    # Replicas that divide the experts, each with these ranks and microbatches.
    ep: int
    # Pipelines that divide the samples of each.
    cp: int

    @property
    def good(self) -> bool:
        """True if all differences are within their bounds."""
        differences = (self.loss, self.weights, self.gradients)
        return all(d <= bound for d, bound in zip(differences, self.allowed, strict=True))


@dataclass(frozen=True)
class _Outcome:
    losses: list[Tensor]
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]


def load_target(name: str) -> VerifyTarget:
    """Return the result of ``module:function``."""
    module, _, function = name.partition(":")
    try:
        with current_folder_last():
            make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"cannot find {name!r} ({error}); give MODULE:FUNCTION, a function without arguments that "
            "returns a penstock.verify.VerifyTarget"
        ) from error
    target = make()
    if not isinstance(target, VerifyTarget):
        raise ConfigError(f"{name} returned a {type(target).__name__}, not a penstock.verify.VerifyTarget")
    return target


def verify(
    target: str,
    schedules: Sequence[tuple[str, int]],
    ranks: Sequence[int],
    microbatches: Sequence[int],
    *,
    transports: Sequence[str] = ("threads", "processes"),
    steps: int = 3,
    ep: int = 1,
    cp: int = 1,
) -> Iterator[Difference]:
    """Train a model with each schedule, number of ranks and number of microbatches, and compare.

    Args:
        target: ``module:function`` that returns a `VerifyTarget`.
        schedules: pairs of a family, MODULE:FUNCTION or CSV path, and a number of virtual stages.
        ranks, microbatches: numbers of ranks and of microbatches to combine.
        transports: "threads", "processes" or both (default both).
        steps: number of optimizer steps, with AdamW and clipping (default 3).
        ep: number of replicas that divide the experts, in processes only (default 1). Each has so many microbatches.
        cp: number of processes that divide the tokens of each sample (default 1).
    """
    for name, size, what in (("ep", ep, "experts"), ("cp", cp, "samples")):
        if size > 1 and "threads" in transports:
            raise ConfigError(
                f"{name} = {size} divides {what} over processes, which threads are not; take the transport processes"
            )
    for name, virtual in schedules:
        for p, m in product(ranks, microbatches) if not is_csv(name) else ():
            require_family(name).require_counts(p, m, virtual)
    if "processes" in transports:
        require_processes(max(ranks) * ep * cp)
    return _rows(target, schedules, ranks, microbatches, transports, steps=steps, ep=ep, cp=cp)


def _rows(
    target: str,
    schedules: Sequence[tuple[str, int]],
    ranks: Sequence[int],
    microbatches: Sequence[int],
    transports: Sequence[str],
    *,
    steps: int,
    ep: int,
    cp: int,
) -> Iterator[Difference]:
    # The number of threads changes the order of sums, and so the last bits.
    torch.set_num_threads(1)
    plain = {m: _plain(load_target(target), m * ep, steps) for m in microbatches}
    in_float64 = cache(lambda m: _plain(load_target(target), m * ep, steps, torch.float64))
    with LocalProcesses(max(ranks) * ep * cp) as pool:
        for (name, virtual), p, m in product(schedules, ranks, microbatches):
            allowed = (0.0, 0.0, 0.0)
            if ep * cp > 1 or not _in_order(name, p, m, virtual):
                loss, weights, gradients = _differences(in_float64(m), plain[m])
                # A few losses may round to the same numbers from float64, by chance.
                last_bit = max(abs(float(x)) for x in plain[m].losses) * torch.finfo(torch.float32).eps
                allowed = (SLACK * max(loss, last_bit), SLACK * weights, SLACK * gradients)
            for transport in transports:
                case = _Case(
                    target=target,
                    schedule=name,
                    ranks=p,
                    virtual_stages=virtual,
                    microbatches=m,
                    steps=steps,
                    ep=ep,
                    cp=cp,
                )
                in_processes = transport == "processes"
                outcomes = (
                    pool.run(case.processes, _pipelined, case) if in_processes else [_pipelined(0, case)]
                )
                loss, weights, gradients = _differences(plain[m], _joined(name, plain[m], outcomes))
                yield Difference(
                    schedule=name,
                    transport=transport,
                    ranks=p,
                    microbatches=m,
                    loss=loss,
                    weights=weights,
                    gradients=gradients,
                    allowed=allowed,
                    ep=ep,
                    cp=cp,
                )


def _in_order(name: str, ranks: int, microbatches: int, virtual: int) -> bool:
    """Return whether a schedule sums every stage's gradients in the order of the microbatches, on one rank."""
    if name in FAMILIES:
        return FAMILIES[name].in_order
    return resolve_schedule(name, ranks, microbatches, virtual, None).in_order


def _plain(target: VerifyTarget, microbatches: int, steps: int, dtype: torch.dtype | None = None) -> _Outcome:
    given = given_model(target.model, target.loss_fn)
    model = StageModule(given.layers).to(dtype)
    parameters = [p for _, p in model.whole_model_parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        x, y = target.batch(step, microbatches)
        (inputs_of, _), (labels_of, rows) = (
            split_batch(_as(v, dtype), microbatches, "a batch") for v in (x, y)
        )
        weights = loss_weights(labels_of, rows, given.reduction)
        for inputs, labels, weight in zip(inputs_of, labels_of, weights, strict=True):
            with within(Context({}, {}, model.gives)) as context, _GroupsInFloat64():
                output = model.run(inputs, context, 0, len(model.layers))
            returned = given.loss_fn(output, labels)
            terms = [returned] if isinstance(returned, Tensor) else [*returned.values()]
            loss = reduce(torch.add, [*terms, *context.losses.values()])
            weight.apply(loss).backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()
    return _outcome(losses, model.whole_model_parameters())


class _GroupsInFloat64(TorchFunctionMode):
    """Mode that multiplies matrices of float64 group by group: torch's product of groups, by experts, has no float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch._grouped_mm or args[0].dtype != torch.float64:
            return func(*args, **(kwargs or {}))
        rows, matrices = args
        parts = rows.tensor_split(kwargs["offs"][:-1].long().cpu())
        return torch.cat([part @ matrix for part, matrix in zip(parts, matrices, strict=True)])


def _as(value: object, dtype: torch.dtype | None) -> object:
    """Convert a batch to another dtype if it is of floating-point numbers."""
    if dtype is None or not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.to(dtype)


def _pipelined(rank: int, case: _Case) -> _Outcome:
    target = load_target(case.target)
    with Pipeline(
        target.model,
        target.loss_fn,
        microbatches=case.microbatches,
        schedule=case.schedule,
        ranks=case.ranks,
        mesh=MeshShape(case.ranks, case.ep, ep=case.ep, cp=case.cp) if case.processes > case.ranks else None,
        virtual_stages=case.virtual_stages,
    ) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=LEARNING_RATE)
        losses: list[Tensor] = []
        for step in range(case.steps):
            optimizer.zero_grad()
            result = pipe.step(*target.batch(step, case.microbatches * case.ep))
            assert result.losses is not None
            losses.extend(result.losses)
            pipe.clip_grad_norm_(MAX_NORM)
            optimizer.step()
        return _outcome(losses, pipe.named_parameters())


def _outcome(losses: list[Tensor], parameters: Iterator[tuple[str, nn.Parameter]]) -> _Outcome:
    weights, gradients = {}, {}
    for name, parameter in parameters:
        weights[name] = full_tensor(parameter.detach())
        if parameter.grad is not None:
            gradients[name] = full_tensor(parameter.grad)
    return _Outcome(losses, weights, gradients)


def _joined(schedule: str, plain: _Outcome, outcomes: Sequence[_Outcome]) -> _Outcome:
    """Join the outcomes of all ranks; check that they are the whole model, with equal losses and equal copies."""
    weights: dict[str, Tensor] = {}
    gradients: dict[str, Tensor] = {}
    for outcome in outcomes:
        for name, weight in outcome.weights.items():
            if not same_values(weights.setdefault(name, weight), weight, True):
                raise PenstockError(f"{schedule}: the ranks of one run have different copies of {name}")
        gradients |= outcome.gradients
    if weights.keys() != plain.weights.keys() or gradients.keys() != plain.gradients.keys():
        missing = sorted(
            (plain.weights.keys() ^ weights.keys()) | (plain.gradients.keys() ^ gradients.keys())
        )
        raise ConfigError(
            f"{schedule}: parameters that only one of pipeline and plain PyTorch has: {', '.join(missing)}"
        )
    losses = outcomes[0].losses
    for outcome in outcomes[1:]:
        if any(not torch.equal(a, b) for a, b in zip(outcome.losses, losses, strict=True)):
            raise PenstockError(f"{schedule}: the ranks of one run report different losses")
    return _Outcome(losses, weights, gradients)


def _differences(reference: _Outcome, other: _Outcome) -> tuple[float, float, float]:
    """Return the largest absolute differences of losses, weights and gradients."""
    return (
        max(_difference(a, b) for a, b in zip(reference.losses, other.losses, strict=True)),
        max(_difference(w, other.weights[n]) for n, w in reference.weights.items()),
        max((_difference(g, other.gradients[n]) for n, g in reference.gradients.items()), default=0.0),
    )


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest absolute difference; infinity if either has a NaN."""
    if torch.equal(ours, theirs):
        return 0.0
    difference = (ours.double() - theirs.double()).abs().max().item()
    return float("inf") if difference != difference else difference
