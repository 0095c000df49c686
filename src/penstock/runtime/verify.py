"""Proof on the user's own model: pipelined training against plain PyTorch, number by number.

The same few steps are trained three ways: unsplit with plain gradient accumulation, through a pipeline of threads, and
through a pipeline of gloo processes. What differs at most in losses, weights and gradients is reported; 0 means bit
for bit.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.runtime.local import LocalProcesses
from penstock.runtime.pipeline import Pipeline
from penstock.stage.layers import as_layers
from penstock.stage.stage import LossFunction, StageModule
from penstock.stage.values import slices

LEARNING_RATE, MAX_NORM = 1e-2, 1.0


@dataclass(frozen=True)
class Subject:
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
    """

    schedule: str
    transport: str
    ranks: int
    microbatches: int
    loss: float
    weights: float
    gradients: float

    @property
    def zero(self) -> bool:
        return self.loss == self.weights == self.gradients == 0.0


@dataclass(frozen=True)
class _Outcome:
    losses: list[Tensor]
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]


def load_subject(name: str) -> Subject:
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
            "returns a penstock.runtime.verify.Subject"
        ) from error
    subject = make()
    if not isinstance(subject, Subject):
        raise ConfigError(
            f"{name} returned a {type(subject).__name__}, not a penstock.runtime.verify.Subject"
        )
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
    """
    torch.set_num_threads(1)
    plain = {m: _plain(load_subject(subject), m, steps) for m in microbatches}
    with LocalProcesses(max(ranks)) as pool:
        for name, virtual in schedules:
            for p in ranks:
                for m in microbatches:
                    for transport in transports:
                        job = (subject, name, p, virtual, m, steps)
                        parts = (
                            pool.run(p, _pipelined, *job)
                            if transport == "processes"
                            else [_pipelined(0, *job)]
                        )
                        yield _compare(name, transport, p, m, plain[m], parts)


def _plain(subject: Subject, microbatches: int, steps: int) -> _Outcome:
    layers = as_layers(subject.model)
    model = StageModule(layers)
    parameters = [p for _, p in model.whole_model_parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        x, y = subject.batch(step, microbatches)
        for part, target in _pieces(x, y, microbatches):
            loss = subject.loss_fn(model(part), target)
            (loss / microbatches).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()
    return _outcome(losses, model.whole_model_parameters())


def _pieces(x: object, y: object, microbatches: int) -> Iterator[tuple[Any, Any]]:
    yield from zip(slices(x, microbatches, "x"), slices(y, microbatches, "y"), strict=True)


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


def _compare(
    schedule: str, transport: str, ranks: int, microbatches: int, plain: _Outcome, parts: Sequence[_Outcome]
) -> Difference:
    weights = {name: w for part in parts for name, w in part.weights.items()}
    gradients = {name: g for part in parts for name, g in part.gradients.items()}
    if weights.keys() != plain.weights.keys() or gradients.keys() != plain.gradients.keys():
        missing = sorted(
            (plain.weights.keys() ^ weights.keys()) | (plain.gradients.keys() ^ gradients.keys())
        )
        raise ConfigError(
            f"{schedule}: parameters that one side has and the other has not: {', '.join(missing)}"
        )
    return Difference(
        schedule,
        transport,
        ranks,
        microbatches,
        max(_apart(a, b) for part in parts for a, b in zip(part.losses, plain.losses, strict=True)),
        max(_apart(weights[n], w) for n, w in plain.weights.items()),
        max(_apart(gradients[n], g) for n, g in plain.gradients.items()),
    )


def _apart(ours: Tensor, theirs: Tensor) -> float:
    """The largest absolute difference; infinite where either is not a number."""
    if torch.equal(ours, theirs):
        return 0.0
    apart = (ours.double() - theirs.double()).abs().max().item()
    return float("inf") if apart != apart else apart
