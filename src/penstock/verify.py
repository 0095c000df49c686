"""Proof on the user's own model: pipelined training against plain PyTorch, number by number.

The same few steps are trained three ways: unsplit with plain gradient accumulation, through a pipeline of threads, and
through a pipeline of gloo processes. What differs at most in losses, weights and gradients is reported; 0 means bit
for bit.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, PenstockError
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses, require_processes
from penstock.schedule.families import FAMILIES
from penstock.schedule.size import require_size
from penstock.stage.compute.runner import LossFunction
from penstock.stage.layers import as_layers
from penstock.stage.module import StageModule
from penstock.stage.values import split_batch

LEARNING_RATE, MAX_NORM = 1e-2, 1.0
SLACK = 4.0


@dataclass(frozen=True)
class VerifyTarget:
    """What is verified.

    Attributes:
        model: anything `Pipeline` takes; must come out the same each time it is made.
        loss_fn: ``loss_fn(output, target)``, the mean over its microbatch.
        batch: ``batch(step, microbatches)`` → (x, y), the same each time, of a size the microbatches divide.
    """

    model: object
    loss_fn: LossFunction
    batch: Callable[[int, int], tuple[object, object]]


@dataclass(frozen=True)
class Difference:
    """The largest absolute differences from plain PyTorch over all steps, microbatches and parameters.

    Attributes:
        schedule, transport, ranks, microbatches: what was run; transport is "threads" or "processes".
        loss, weights, gradients: largest differences; weights and gradients after the last step.
        allowed: what each of the three may be: 0 for schedules that sum a stage's gradients in the order of the
            microbatches. The others (two copies of a stage) only differ in the order of summation, and may be
            `SLACK` times as far from plain PyTorch as that is from the same training in float64.
    """

    schedule: str
    transport: str
    ranks: int
    microbatches: int
    loss: float
    weights: float
    gradients: float
    allowed: tuple[float, float, float]

    @property
    def good(self) -> bool:
        found = (self.loss, self.weights, self.gradients)
        return all(f <= a for f, a in zip(found, self.allowed, strict=True))


@dataclass(frozen=True)
class _Outcome:
    losses: list[Tensor]
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]


def load_subject(name: str) -> VerifyTarget:
    """Make the subject that ``module:function`` returns.

    Raises:
        ConfigError: there is no such function, or it returns something else.
    """
    module, _, function = name.partition(":")
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"cannot find {name!r} ({error}); give MODULE:FUNCTION, a function without arguments that "
            "returns a penstock.verify.Subject"
        ) from error
    subject = make()
    if not isinstance(subject, VerifyTarget):
        raise ConfigError(f"{name} returned a {type(subject).__name__}, not a penstock.verify.Subject")
    return subject


def verify(
    subject: str,
    schedules: Sequence[tuple[str, int]],
    ranks: Sequence[int],
    microbatches: Sequence[int],
    *,
    transports: Sequence[str] = ("threads", "processes"),
    steps: int = 3,
) -> Iterator[Difference]:
    """Train `subject` with every schedule, number of ranks and of microbatches, and compare.

    Args:
        subject: ``module:function``, see `load_subject`.
        schedules: (family or CSV path, virtual stages).
        ranks, microbatches: the counts to try.
        transports: "threads", "processes", or both.
        steps: optimizer steps, with AdamW and clipping.

    Raises:
        ConfigError: counts whose schedules or processes this machine cannot hold.
    """
    for name, virtual in schedules:
        for p, m in product(ranks, microbatches) if name in FAMILIES else ():
            require_size(name, p, m, virtual)
    if "processes" in transports:
        require_processes(max(ranks))
    return _rows(subject, schedules, ranks, microbatches, transports, steps)


def _rows(
    subject: str,
    schedules: Sequence[tuple[str, int]],
    ranks: Sequence[int],
    microbatches: Sequence[int],
    transports: Sequence[str],
    steps: int,
) -> Iterator[Difference]:
    torch.set_num_threads(1)
    plain = {m: _plain(load_subject(subject), m, steps) for m in microbatches}
    exact: dict[int, _Outcome] = {}
    with LocalProcesses(max(ranks)) as pool:
        for name, virtual in schedules:
            for p in ranks:
                for m in microbatches:
                    allowed = (0.0, 0.0, 0.0)
                    if name in FAMILIES and not FAMILIES[name].in_order:
                        if m not in exact:
                            exact[m] = _plain(load_subject(subject), m, steps, torch.float64)
                        apart = _differences(exact[m], plain[m])
                        allowed = (SLACK * apart[0], SLACK * apart[1], SLACK * apart[2])
                    for transport in transports:
                        job = (subject, name, p, virtual, m, steps)
                        parts = (
                            pool.run(p, _pipelined, *job)
                            if transport == "processes"
                            else [_pipelined(0, *job)]
                        )
                        yield Difference(
                            name,
                            transport,
                            p,
                            m,
                            *_differences(plain[m], _joined(name, plain[m], parts)),
                            allowed,
                        )


def _plain(
    subject: VerifyTarget, microbatches: int, steps: int, dtype: torch.dtype | None = None
) -> _Outcome:
    model = StageModule(as_layers(subject.model)).to(dtype)
    parameters = [p for _, p in model.whole_model_parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        x, y = subject.batch(step, microbatches)
        for part, target in zip(
            *(split_batch(_as(v, dtype), microbatches, "a batch")[0] for v in (x, y)), strict=True
        ):
            found = subject.loss_fn(model(part), target)
            loss = found if isinstance(found, Tensor) else torch.stack(list(found.values())).sum()
            (loss / microbatches).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()
    return _outcome(losses, model.whole_model_parameters())


def _as(value: object, dtype: torch.dtype | None) -> object:
    """A batch with its floating-point tensors in another dtype."""
    if dtype is None or not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.to(dtype)


def _pipelined(
    rank: int, subject_name: str, schedule: str, ranks: int, virtual: int, microbatches: int, steps: int
) -> _Outcome:
    subject = load_subject(subject_name)
    with Pipeline(
        subject.model,
        subject.loss_fn,
        microbatches=microbatches,
        schedule=schedule,
        ranks=ranks,
        virtual_stages=virtual,
    ) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=LEARNING_RATE)
        losses: list[Tensor] = []
        for step in range(steps):
            optimizer.zero_grad()
            result = pipe.step(*subject.batch(step, microbatches))
            assert result.losses is not None
            losses.extend(result.losses)
            pipe.clip_grad_norm_(MAX_NORM)
            optimizer.step()
        return _outcome(losses, pipe.named_parameters())


def _outcome(losses: list[Tensor], parameters: Iterator[tuple[str, nn.Parameter]]) -> _Outcome:
    weights, gradients = {}, {}
    for name, parameter in parameters:
        weights[name] = parameter.detach()
        if parameter.grad is not None:
            gradients[name] = parameter.grad
    return _Outcome(losses, weights, gradients)


def _joined(schedule: str, plain: _Outcome, parts: Sequence[_Outcome]) -> _Outcome:
    """What the ranks hold between them, checked to be the whole model, with the losses equal on all."""
    weights = {name: w for part in parts for name, w in part.weights.items()}
    gradients = {name: g for part in parts for name, g in part.gradients.items()}
    if weights.keys() != plain.weights.keys() or gradients.keys() != plain.gradients.keys():
        missing = sorted(
            (plain.weights.keys() ^ weights.keys()) | (plain.gradients.keys() ^ gradients.keys())
        )
        raise ConfigError(
            f"{schedule}: parameters that one side has and the other has not: {', '.join(missing)}"
        )
    for part in parts[1:]:
        if any(not torch.equal(a, b) for a, b in zip(part.losses, parts[0].losses, strict=True)):
            raise PenstockError(f"{schedule}: the ranks of one run report different losses")
    return _Outcome(parts[0].losses, weights, gradients)


def _differences(reference: _Outcome, other: _Outcome) -> tuple[float, float, float]:
    """The largest absolute differences of losses, weights and gradients."""
    return (
        max(_apart(a, b) for a, b in zip(reference.losses, other.losses, strict=True)),
        max(_apart(w, other.weights[n]) for n, w in reference.weights.items()),
        max((_apart(g, other.gradients[n]) for n, g in reference.gradients.items()), default=0.0),
    )


def _apart(ours: Tensor, theirs: Tensor) -> float:
    """The largest absolute difference; infinite where either is not a number."""
    if torch.equal(ours, theirs):
        return 0.0
    apart = (ours.double() - theirs.double()).abs().max().item()
    return float("inf") if apart != apart else apart
