"""The factor by which a program scales gradients between two steps, which all ranks must have in common."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import islice

import torch
from torch import Tensor, nn

from penstock.parallel.dtensor import is_dtensor, local
from penstock.parallel.participant import Outcome, Participant, Step
from penstock.runtime.consensus import marks_of

_WATCHED, _NUMBERS = 2, 16
"""Gradients that are watched, and numbers of each."""

_LARGEST = 2**20
"""Numbers of the largest gradient that may be kept alive until the next step."""

_DISTINCT = 4
"""Magnitudes that a common factor is read from: of fewer, gradients clipped by value may look scaled."""

_SPREAD = 1.02
"""Largest ratio between factors that count as one, since gradients may be bfloat16."""

_FIRST, _EVERY = 20, 100
"""Steps in which gradients on a device are watched, since reading them waits for it: the first, then every n-th."""


class GradientScale(Participant):
    """The factor by which a program scaled this rank's gradients since the last step, which all ranks must have in common.

    ``torch.nn.utils.clip_grad_norm_`` takes the norm of the parameters that it is given. In processes these are the ones of
    the process's own stages, so every rank would scale its gradients by another factor. `Pipeline.clip_grad_norm_` takes
    the norm over all ranks.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        real = (p for p in parameters if p.is_floating_point())
        sizes = {p: local(p).numel() for p in real}
        self._parameters = sorted(
            (p for p, n in sizes.items() if _DISTINCT <= n <= _LARGEST), key=sizes.__getitem__
        )
        self._seen: list[tuple[Tensor, int | None, list[float]]] = []

    def begin(self, step: Step) -> None:
        """Mark the factor since the last step, before anything adds to the gradients, which would look like a change."""
        if step.trains:
            step.flags |= marks_of(None, self.factor())

    def end(self, step: Step, outcome: Outcome) -> None:
        if step.trains and outcome.refusal is None:
            self.remember(step.trained)

    def remember(self, number: int) -> None:
        """Note some gradients at the end of a training step, by the number of steps before it."""
        with_grad = (
            p.grad for p in self._parameters if p.grad is not None and p.grad.layout is torch.strided
        )
        grads = list(islice(with_grad, _WATCHED))
        waits = any(grad.device.type != "cpu" for grad in grads)
        if waits and number >= _FIRST and number % _EVERY:
            grads = []
        self._seen = [(grad, _version(grad), _numbers(grad)) for grad in grads]

    def factor(self) -> float | None:
        """Return the factor, 1.0 if nothing was scaled; None if it cannot be told. Gradients are let go."""
        seen, self._seen = self._seen, []
        if all(version is not None and _version(grad) == version for grad, version, _ in seen):
            return 1.0 if seen else None
        return _common_factor(
            [pair for grad, _, before in seen for pair in zip(before, _numbers(grad), strict=False)]
        )


def _version(grad: Tensor) -> int | None:
    """Return the count of a gradient's writes; None for a DTensor, which does not count those into its shard."""
    return None if is_dtensor(grad) else grad._version


def _numbers(grad: Tensor) -> list[float]:
    numbers: list[float] = local(grad.detach()).reshape(-1)[:_NUMBERS].double().tolist()
    return numbers


def _common_factor(pairs: list[tuple[float, float]]) -> float | None:
    """Return the one factor between the numbers of all pairs; None if there is none, or too few numbers tell it."""
    usable = [(a, b) for a, b in pairs if a and math.isfinite(a) and math.isfinite(b)]
    if len({abs(a) for a, _ in usable}) < _DISTINCT:
        return None
    ratios = [b / a for a, b in usable]
    return ratios[0] if min(ratios) > 0 and max(ratios) <= min(ratios) * _SPREAD else None
