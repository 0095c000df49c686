"""The update of one rank's weights where steps flow into each other; see `penstock.runtime.flow.step_flow`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from penstock.errors import ConfigError, PenstockError
from penstock.runtime.flow.group_options import GroupOptions, Later
from penstock.runtime.flow.outside_changes import OutsideChanges
from penstock.runtime.flow.reports import RankReport, Verdict
from penstock.runtime.optim.grad_norm import GlobalNorm, LocalNorms, is_clipped, scale_gradients
from penstock.runtime.optim.main_weights import MainWeights
from penstock.runtime.optim.update_copy import UpdateCopy


class Counters(Protocol):
    """Number of updates that were applied and skipped."""

    steps: int
    skipped: int


class FlowingUpdate:
    """Updates of one rank's weights, made ahead of what the other ranks find in their gradients, and undone if need be.

    Args:
        optimizer: the rank's optimizer.
        main: main weights that it updates in place of parameters.
        scheduler: scheduler of its learning rates; None if there is none. It steps when an update is certain.
        clip: largest norm of the gradients; None if it is not needed.
        norm: norm of the pipeline's gradients.
        parameters: parameters of the rank.
        counters: numbers of updates, which count when an update is certain.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        main: MainWeights,
        scheduler: LRScheduler | None,
        clip: float | None,
        norm: GlobalNorm,
        parameters: Sequence[nn.Parameter],
        counters: Counters,
    ) -> None:
        self._optimizer, self._main, self._scheduler = optimizer, main, scheduler
        self._clip, self._norm = clip, norm
        self._parameters, self._counters = parameters, counters
        self._copy = UpdateCopy(optimizer)
        self._options = GroupOptions(optimizer)
        self._outside = OutsideChanges(optimizer)
        self._changes_options = False  # whether the optimizer's own step does
        self._grads: list[Tensor | None] = []
        self._reported: list[tuple[int, int]] = []
        norm.agree()

    def norms(self) -> LocalNorms | None:
        local = None if self._clip is None else self._norm.local()
        self._reported = self._versions()
        return local

    def join(self, parts: list[LocalNorms]) -> Tensor:
        return self._norm.join(parts)

    def suspects(self, report: RankReport) -> bool:
        # What the user sets could not be told from what the step sets, if both change an option.
        if report.refusal is not None or report.failure is not None or self._changes_options:
            return True
        norms = report.norms
        return (
            norms is not None and self._clip is not None and is_clipped(self._clip, self._norm.join([norms]))
        )

    def changes(self, verdict: Verdict) -> bool:
        if verdict.error is not None:
            return True
        return self._clip is not None and verdict.norm is not None and is_clipped(self._clip, verdict.norm)

    def make(self, verdict: Verdict) -> None:
        if verdict.error is None:
            self._require_reported()
        self._make(verdict)

    def _make(self, verdict: Verdict) -> None:
        if verdict.error is not None:
            self._counters.skipped += 1
        else:
            if self._clip is not None:
                assert verdict.norm is not None, "it was measured"
                scale_gradients(self._parameters, self._clip, verdict.norm)
            self._main.lend_gradients()
            self._apply()
            self._count()
        self._drop_gradients()

    def make_ahead(self) -> None:
        self._require_reported()
        self._main.lend_gradients()
        self._copy.take()
        self._grads = [p.grad for p in self._parameters]
        try:
            self._apply()
        except BaseException:
            self._restore(self._options.take_back(repeats=True))
            raise
        self._drop_gradients()

    def confirm(self, verdict: Verdict) -> None:
        changes = self.changes(verdict)
        later = self._options.take_back(repeats=changes)
        if changes:
            grads = self._grads
            self._restore([])
            self._give(grads)
            self._make(verdict)
        else:
            self._grads = []
            self._count()
        self._options.give_back(later)

    def undo(self) -> None:
        self._restore(self._options.take_back(repeats=True))

    def _restore(self, later: Later) -> None:
        self._grads = []
        self._copy.restore()
        self._main.round_into_parameters()
        self._options.give_back(later)

    def _apply(self) -> None:
        before = self._versions()
        self._options.take()
        try:
            self._outside.check(self._optimizer.step)
        finally:
            self._changes_options |= self._options.step_ended()
        if before != self._versions():
            raise ConfigError(
                f"{type(self._optimizer).__name__} changes the gradients in its step, so that an update could not be "
                "repeated; use flow=False"
            )
        self._main.round_into_parameters()

    def _count(self) -> None:
        self._counters.steps += 1
        if self._scheduler is not None:
            self._scheduler.step()

    def _versions(self) -> list[tuple[int, int]]:
        """Return what tells whether gradients have been changed since."""
        grads = [p.grad for p in self._parameters]
        return [(0, 0) if grad is None else (id(grad), grad._version) for grad in grads]

    def _require_reported(self) -> None:
        if self._versions() != self._reported:
            raise PenstockError(
                "gradients were changed between pipe.step and the optimizer's step; with flow=True their norm has been "
                "sent to the other ranks by then, so use flow=False"
            )

    def _give(self, grads: Sequence[Tensor | None]) -> None:
        for parameter, grad in zip(self._parameters, grads, strict=True):
            parameter.grad = grad

    def _drop_gradients(self) -> None:
        self._give([None] * len(self._parameters))
