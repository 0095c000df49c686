"""Steps that flow into each other: no rank waits for the others at the end of a step.

At the end of its part of a step a rank reports its losses, whether its numbers are finite, and the norms of its gradients.
It does not wait for the reports of the others. If it knows of no problem, it updates its weights, and
begins the forwards of the next step. Before the first backward of that step it has the reports of all ranks, since that
backward needs forwards of all ranks. If the update was right, the step continues. If it was not, because the gradients had
to be clipped or a number on another rank is not finite, the update is undone and made again as it should be or left out,
and the forwards are done again. All ranks decide from the same reports, so they decide the same. This is the
post-validation of the zero-bubble paper (2401.10241, section 4), with the reports sent from each rank to all instead of
along the pipeline, so that it fits any order in which the ranks end.
"""

from __future__ import annotations

import atexit
import sys
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Protocol

from torch import Tensor

from penstock.errors import PeerError, PenstockError, describe_error, first_line
from penstock.runtime.batch.result import Ends, StepResult, step_result
from penstock.runtime.batch.work import Work
from penstock.runtime.consensus import Losses
from penstock.runtime.flow.flowing_step import FlowingStep
from penstock.runtime.flow.lazy_result import FlowingResult
from penstock.runtime.flow.reports import RankReport, ReportExchange, Verdict, judge
from penstock.runtime.optim.grad_norm import LocalNorms
from penstock.runtime.transport.channel import Failure
from penstock.runtime.transport.processes import ProcessChannel
from penstock.runtime.workers.world import World

_PATIENCE = 10.0
"""Seconds that a rank that was interrupted, ends, or refused a step waits for the reports of all ranks."""


class UpdateUndoneError(Exception):
    """The last update was undone, and forwards that used it have to run again."""


class Update(Protocol):
    """The update of the weights of one rank."""

    def norms(self) -> LocalNorms | None:
        """Return the norms of the present gradients; None if they are not needed."""

    def join(self, parts: list[LocalNorms]) -> Tensor:
        """Return the norm over all ranks."""

    def suspects(self, report: RankReport) -> bool:
        """Return whether this rank's report alone already says that the gradients cannot be used as they are."""

    def changes(self, verdict: Verdict) -> bool:
        """Return whether a verdict requires an update that differs from one with the unchanged gradients."""

    def make(self, verdict: Verdict) -> None:
        """Make the update that the verdict asks for."""

    def make_ahead(self) -> None:
        """Make the update with the gradients as they are, so that it can be undone."""

    def confirm(self, verdict: Verdict) -> None:
        """Keep the update made ahead if it is right; otherwise undo it, and make the one that the verdict asks for."""

    def undo(self) -> None:
        """Undo the update made ahead."""


class StepFlow:
    """The flow of one process's training steps.

    Args:
        channel: this rank's end of the edges between ranks.
        exchange: exchange of the reports.
        update: update of this rank's weights.
        rank: number of this rank.
        last_stage: number of the last stage.

    Attributes:
        ahead: number of updates made before the reports of all ranks had arrived.
        undone: number of these that were undone, and their forwards done again.
        refusal: error by which all ranks refused the last step, so that no update can follow; None if there is none.
    """

    def __init__(
        self, channel: ProcessChannel, exchange: ReportExchange, update: Update, rank: int, last_stage: int
    ) -> None:
        self.update = update
        self._channel = channel
        self._exchange = exchange
        self._rank, self._last_stage = rank, last_stage
        self._last: FlowingStep | None = None
        self._first = True
        self._undone = False  # whether ranks that ran ahead of the last settled step had to begin again
        self._failed = ""
        self._apart = False  # whether other ranks may have an update that was undone here
        self._unread: dict[int, PenstockError] = {}  # errors of skipped steps that were not read, by step
        self.ahead = self.undone = 0
        self.refusal: PenstockError | None = None
        channel.steps_flow = True

    def require_unfailed(self) -> None:
        """Raise PenstockError if a step has failed: ranks that were a step apart cannot meet again."""
        if self._failed:
            raise PenstockError(
                "a step failed while steps flowed into each other, and the ranks may be a step apart; the weights are those "
                "after the last step that all ranks completed, so save them or load a checkpoint, and build a new "
                f"pipeline. The failure: {self._failed}"
            )

    @property
    def unsettled(self) -> FlowingStep | None:
        """The last step, if its verdict is not known; otherwise None."""
        last = self._last
        return last if last is not None and last.verdict is None else None

    def begin(self) -> int:
        """Begin a step, and return the number of the attempt: 1 if no rank can use forwards that ran ahead.

        Raises:
            PenstockError: if the last step failed, or no update followed it.
        """
        self.require_unfailed()
        last = self._last
        if last is not None and not last.updated:
            verdict = self.settle()
            if not verdict.skips:
                raise PenstockError(
                    "with flow=True, call the optimizer's step after every pipe.step; to accumulate gradients use flow=False"
                )
            self.make_update()
        elif last is not None and last.verdict is None and last.reported:
            self.settle()
        return int(self._undone and self.unsettled is None)

    @contextmanager
    def running_ahead(self) -> Iterator[None]:
        """Return a context for forwards whose weights may still change; they end early if another rank begins again.

        Raises:
            UpdateUndoneError: if these forwards have to run again.
        """
        if self.unsettled is None:
            yield
            return
        self._channel.on_restart = self.validate
        try:
            yield
        finally:
            self._channel.on_restart = _nothing

    def validate(self) -> None:
        """Wait for the verdict on the last step, before this one changes anything.

        Raises:
            UpdateUndoneError: if the forwards of this step have to run again.
            PenstockError: if a rank failed.
        """
        if self.unsettled is not None:
            self.settle()
            if self._undone:
                raise UpdateUndoneError

    def end(self, number: int, report: RankReport) -> FlowingStep:
        """End this rank's part of a step: send its report."""
        self._last = FlowingStep(number, report, self._exchange.begin(report))
        if self._first:  # it measures and compiles, and its timeout is longer
            self.settle()
            self._first = False
        return self._last

    def settle(self, patience: float | None = None) -> Verdict:
        """Wait for the verdict on the last step, if it is not known, and make its update right.

        An interrupt ends the wait and changes nothing.

        Args:
            patience: seconds to wait (default: the timeout).

        Raises:
            PenstockError: if a rank failed, or the step cannot count on any; the update has been undone.
        """
        last = self._last
        assert last is not None, "there was a step"
        if last.verdict is not None:
            return last.verdict
        try:
            reports = last.reports(patience)
        except Exception as error:
            self._abandon(last, error, apart=True)
            raise
        verdict = judge(reports, self.update.join, self._last_stage, last.number)
        if verdict.error is not None and not verdict.skips:
            self.refusal = None if isinstance(verdict.error, PeerError) else verdict.error
            self._abandon(last, verdict.error, apart=False)
            raise verdict.error
        last.decide(verdict)
        if verdict.error is not None:
            self._unread[last.number] = verdict.error
        self._undone = self.update.changes(verdict)
        if last.ahead:
            self.undone += self._undone
            self._apart = True
            self.update.confirm(verdict)
            self._apart = False
        return verdict

    def _abandon(self, last: FlowingStep, error: BaseException, apart: bool) -> None:
        self._apart = apart or last.ahead
        if last.ahead:
            self.update.undo()
        self._apart = apart
        known = error if isinstance(error, PenstockError) else PenstockError(describe_error(error))
        last.decide(Verdict(last.report.losses, known, None))
        self._failed = self._failed or first_line(error)

    def read(self, step: FlowingStep) -> Verdict:
        """Wait for the verdict on a step for the user, who knows of its error then."""
        verdict = step.verdict or self.settle()
        self._unread.pop(step.number, None)
        return verdict

    def make_update(self) -> FlowingStep:
        """Update the weights after a step, ahead of its verdict if nothing speaks against it.

        Raises:
            PenstockError: if there was no step since the last update.
        """
        last = self._last
        if last is None or last.updated:
            raise PenstockError("with flow=True, call the optimizer's step once after every pipe.step")
        cautious = self._undone or self.update.suspects(last.report)
        if last.verdict is None and not last.reported and not cautious:
            self.update.make_ahead()
            last.updated = last.ahead = True
            self.ahead += 1
            return last
        self.update.make(self.settle())
        last.updated = True
        return last

    def result(self, works: Sequence[Work], microbatches: int, ends: Ends) -> StepResult:
        """Return the result of the step that has just ended here; reading it waits until the step has ended on all ranks.

        Args:
            works: work of this process's ranks.
            microbatches: number of microbatches in the global batch.
            ends: ranks that hold the ends of the pipeline.
        """
        last = self._last
        assert last is not None, "a step has ended"
        done = [work.without_batch() for work in works]  # a result that is read late must not keep the batch

        def wait() -> StepResult:
            verdict = self.read(last)
            if verdict.error is not None:
                raise verdict.error
            done[0].losses = verdict.losses
            return step_result(done, microbatches, ends)

        return FlowingResult(wait)

    def wait(self) -> None:
        """Wait until the last step has ended on all ranks and its update is right.

        Raises:
            PenstockError: as `settle`, and if the ranks' weights may not be those after one and the same step.
        """
        if self.unsettled is not None:
            self.settle()
        if self._apart:
            raise PenstockError(
                f"rank {self._rank} could not learn whether all ranks completed the last step, so the ranks' weights may be "
                f"a step apart; load a checkpoint, and build a new pipeline. The failure: {self._failed}"
            )

    def fail(self, number: int, trains: bool, error: BaseException, failure: Failure | None) -> None:
        """Tell all ranks that a step failed here, and settle the one before it.

        Args:
            number: number of the step.
            trains: True for a training step, False for an evaluation, which ends on all ranks at once.
            error: error that stopped it.
            failure: notice that the other ranks may have; of an earlier step if this one did not begin.
        """
        if not trains:
            self._channel.forgive(number)
            return
        last = self._last
        if failure is None or failure.step != number:
            failure = Failure(self._rank, number, describe_error(error))
        reports: Future[list[RankReport]] | None = None
        if last is None or last.number < number:
            reports = self._exchange.begin(RankReport(Losses(), failure=failure))
        if last is not None and last.verdict is None:
            self._settle_failed(last, error)
        if reports is None or not failure.refused or not self._all_refuse(number, reports):
            self._failed = self._failed or first_line(error)

    def _settle_failed(self, last: FlowingStep, error: BaseException) -> None:
        """Settle the step before one that failed, so that all ranks have the same weights."""
        try:
            self.settle(_PATIENCE if isinstance(error, KeyboardInterrupt) else None)
        except Exception:  # the first error is the one to raise
            return
        except BaseException as again:
            if last.verdict is None:
                self._abandon(last, again, apart=True)
            raise

    def can_refuse(self) -> bool:
        """Return whether the next step can be refused alone: the one before has ended on all ranks, with its update."""
        with suppress(Exception):
            self.begin()
            self.wait()
            return True
        return False

    def _all_refuse(self, number: int, reports: Future[list[RankReport]]) -> bool:
        """Wait until all ranks have refused a step; return False if any of them failed in another way."""
        try:
            refused = all(
                each.failure is not None and each.failure.refused for each in reports.result(_PATIENCE)
            )
        except Exception:
            return False
        if not refused or self._failed:
            return False
        self._channel.forgive(number)
        self._last, self._undone = None, False
        return True

    def finish(self) -> None:
        """Wait for the last step, and warn of steps that were left out and whose results were not read."""
        if self.unsettled is not None:
            self.settle()
        if self._unread and not self._failed:
            warnings.warn(self._describe_unread(), RuntimeWarning, stacklevel=2)
            self._unread.clear()

    def _describe_unread(self) -> str:
        steps = ", ".join(map(str, self._unread))
        last = list(self._unread.values())[-1]
        return (
            f"rank {self._rank}: the updates of {len(self._unread)} steps ({steps}) were left out, and their results were "
            f"not read: {last}"
        )

    def end_at_exit(self) -> None:
        """Wait for the last step of a pipeline that is still open when the process ends; write to stderr if it counts for
        nothing."""
        try:
            if self.unsettled is not None and not self._failed:
                self.settle(_PATIENCE)
        except Exception as error:
            print(f"penstock: rank {self._rank}: the last step failed: {first_line(error)}", file=sys.stderr)
        if self._unread and not self._failed:
            print(f"penstock: {self._describe_unread()}. Close the pipeline before the end", file=sys.stderr)

    def close(self) -> None:
        """End the exchange."""
        atexit.unregister(self.end_at_exit)
        self._exchange.close()
        self._channel.steps_flow = False


def open_flow(world: World, update: Update, last_stage: int) -> StepFlow:
    """Return the flow of a connected process's steps; every process calls it.

    Args:
        world: the pipeline's processes.
        update: update of this rank's weights.
        last_stage: number of the last stage.
    """
    assert world.channel is not None, "connected"
    flow = StepFlow(world.channel, ReportExchange(world.reports()), update, world.rank, last_stage)
    atexit.register(flow.end_at_exit)
    return flow


def _nothing() -> None:
    """Do nothing when another rank begins its step again."""
