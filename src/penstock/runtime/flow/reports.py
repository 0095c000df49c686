"""Reports of all ranks at the end of a step, exchanged while the ranks are already in the next one."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from torch import Tensor

from penstock.encoding import sendable
from penstock.errors import NonFiniteError, PeerError, PenstockError, StageError
from penstock.runtime.consensus import Losses, Refusal, compare_marks, explain, require_graph
from penstock.runtime.optim.grad_norm import LocalNorms
from penstock.runtime.transport.channel import Failure

_GRACE = 5.0
"""Seconds that the thread has to give up an exchange."""
_Inbox = queue.SimpleQueue["tuple[RankReport, Future[list[RankReport]]] | None"]


@sendable
class RankReport(NamedTuple):
    """One rank's report at the end of a step.

    Attributes:
        losses: losses of this rank.
        refusal: first number of this rank that is not finite; None if there is none.
        flags: flags of this rank, with the marks of its batch; see `penstock.runtime.consensus`.
        norms: norms of this rank's gradients; None if they are not needed.
        failure: the failure of this rank, or the one that stopped it; None if its step is done.
    """

    losses: Losses
    refusal: Refusal | None = None
    flags: int = 0
    norms: LocalNorms | None = None
    failure: Failure | None = None


class Verdict(NamedTuple):
    """Outcome of a step, which follows from the reports of all ranks and is the same on each.

    Attributes:
        losses: losses of all ranks.
        error: error of the step; None if its gradients count.
        norm: norm of all gradients, 0-d tensor; None if no rank measured it.
    """

    losses: Losses
    error: PenstockError | None
    norm: Tensor | None

    @property
    def skips(self) -> bool:
        """True if numbers are not finite, so that all ranks leave the update out and train on."""
        return isinstance(self.error, NonFiniteError)


def judge(
    reports: Sequence[RankReport],
    join: Callable[[list[LocalNorms]], Tensor],
    last_stage: int,
    step: int,
) -> Verdict:
    """Return the verdict on a step.

    Args:
        reports: reports of all ranks, by rank.
        join: function that joins the ranks' norms.
        last_stage: number of the last stage.
        step: number of the step.
    """
    losses, flags = Losses(), 0
    for report in reports:
        losses.update(report.losses)
        flags |= report.flags
    norms = [report.norms for report in reports if report.norms is not None]
    norm = join(norms) if norms else None
    failure = next((report.failure for report in reports if report.failure is not None), None)
    if failure is not None:
        return Verdict(losses, PeerError(failure.message, failure), norm)
    refusals = [report.refusal for report in reports if report.refusal is not None]
    refusal, flags = compare_marks(flags, min([*losses.uneven, *refusals], default=None))
    if refusal is not None:
        return Verdict(losses, explain(refusal, losses, last_stage, step), norm)
    try:
        require_graph(flags, step)
    except StageError as error:
        return Verdict(losses, error, norm)
    if norm is not None and not bool(norm.isfinite()):
        return Verdict(losses, norm_error(float(norm), step), norm)
    return Verdict(losses, None, norm)


def norm_error(norm: float, step: int) -> NonFiniteError:
    """Return the error of a norm that is infinite or NaN."""
    return NonFiniteError(
        f"step {step}: the norm of all gradients is {norm}, so no weight was changed; a lower learning rate or a longer "
        "warm-up usually helps",
        what="the norm of all gradients",
    )


class ReportExchange:
    """A thread that exchanges the reports of one step after another, beside the rank's own work.

    Args:
        exchange: function of a value and of a function; returns the values of all ranks, by rank, over connections of its
            own, and gives up once the function returns True.
    """

    def __init__(self, exchange: Callable[[Any, Callable[[], bool]], list[Any]]) -> None:
        self._inbox: _Inbox = queue.SimpleQueue()
        stop = threading.Event()
        thread = threading.Thread(
            target=_exchange_all, args=(self._inbox, stop, exchange), name="penstock-reports", daemon=True
        )
        thread.start()
        # The thread has no reference to this object, so dropping it ends the thread. It must have ended when the process
        # does, since a thread that waits in gloo then would abort it.
        self._end = weakref.finalize(self, _end, self._inbox, stop, thread)

    def begin(self, report: RankReport) -> Future[list[RankReport]]:
        """Send this rank's report of the next step; the result is every rank's, by rank."""
        reports: Future[list[RankReport]] = Future()
        self._inbox.put((report, reports))
        return reports

    def close(self) -> None:
        """End the thread; an exchange that other ranks have not entered is given up."""
        self._end()


def _end(inbox: _Inbox, stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    inbox.put(None)
    if thread is not threading.current_thread():
        thread.join(_GRACE)


def _exchange_all(
    inbox: _Inbox, stop: threading.Event, exchange: Callable[[Any, Callable[[], bool]], list[Any]]
) -> None:
    failed: BaseException | None = None
    while (entry := inbox.get()) is not None:
        report, reports = entry
        try:
            if failed is not None:
                raise failed
            reports.set_result(exchange(report, stop.is_set))
        except BaseException as error:  # raised again in the rank's thread, when it needs the result
            failed = error
            reports.set_exception(error)
