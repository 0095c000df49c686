"""The threads that are the ranks of a one-process pipeline: started once, with one job each a step."""

from __future__ import annotations

import contextvars
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from time import monotonic
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from penstock.base.errors import ConfigError, HangError, PeerError, WaitTimeoutError
from penstock.runtime.health.hang import (
    AT_WORK,
    GRACE,
    POLL_INTERVAL,
    SHORT_GRACE,
    HangDetector,
    Timeout,
    dump_stacks,
)
from penstock.runtime.transport.streams import Streams

Job = Callable[[], Any]


def with_settings(jobs: Sequence[Job]) -> list[Job]:
    """Run each job with the caller's context variables, and its autocast, which torch keeps per thread."""
    _require_no_modes()
    autocasts = [
        (kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
    ]

    def run(job: Job) -> None:
        with ExitStack() as stack:
            for kind, dtype in autocasts:
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            job()

    # One context a job, since two threads cannot be in the same context at once.
    return [partial(contextvars.copy_context().run, run, job) for job in jobs]


def _require_no_modes() -> None:
    functions: list[Any] = _get_current_function_mode_stack()
    modes = [*functions, *_get_current_dispatch_mode_stack()]
    # A default device matters only to layers that make tensors; those that need it raise their own error.
    names = [type(mode).__name__ for mode in modes if not isinstance(mode, DeviceContext)]
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:  # no public reader
        names.append("torch.autograd.graph.saved_tensors_hooks")
    if names:
        raise ConfigError(
            f"{', '.join(names)} is set around a step whose ranks are separate threads, which it would not reach; set it "
            "within the layers, or run one process per rank (torchrun)"
        )


class _JobEnds:
    """Reports of the ranks as the jobs of one run end.

    Attributes:
        ranks: ranks whose jobs have ended, kept apart because an interrupt can lose a report taken from the queue.
    """

    def __init__(self) -> None:
        self.reports: queue.SimpleQueue[tuple[int, BaseException | None]] = queue.SimpleQueue()
        self.ranks: set[int] = set()


_Inbox = queue.SimpleQueue[tuple[Job, _JobEnds] | None]


class RankThreads:
    """One thread per rank."""

    def __init__(
        self, ranks: int, timeout: Timeout, streams: Streams | None = None, threads: int = 1
    ) -> None:
        self.timeout = timeout
        self._streams = streams
        self._inboxes: list[_Inbox] = [queue.SimpleQueue() for _ in range(ranks)]
        self._ends = _JobEnds()
        self._running: set[int] = set()
        self._hung: set[int] = set()
        self._threads = [
            threading.Thread(target=_serve, args=(r, threads, inbox), name=f"penstock-rank-{r}", daemon=True)
            for r, inbox in enumerate(self._inboxes)
        ]
        # The threads have no reference to this object, so dropping it ends them even if it was not closed.
        weakref.finalize(self, _dismiss, self._inboxes).atexit = False
        for thread in self._threads:
            thread.start()

    @property
    def at_work(self) -> set[int]:
        """The ranks still at work on jobs that failed or were interrupted."""
        return self._running - self._ends.ranks

    def run(
        self, jobs: Sequence[Job], stop: Callable[[str], None], detector: HangDetector | None = None
    ) -> None:
        """Run one job a rank and wait for all.

        Args:
            stop: function called with the reason if the jobs must end early; it must end every wait of theirs.

        Raises:
            BaseException: the error of the rank that failed first; errors that only report another rank's come second. Ranks
                still at work a few seconds later are named in a note, and waited for before the next jobs. An interrupt of
                the caller (KeyboardInterrupt) stops the ranks and is raised once they have ended, in the same way; a
                second interrupt ends that wait.
        """
        self.wait_stopped()
        torch.clear_autocast_cache()  # see _serve
        try:
            if self._streams is None:
                self._run(jobs, stop, detector)
                return
            with self._streams.step():
                self._run([self._streams.on_rank(rank, job) for rank, job in enumerate(jobs)], stop, detector)
        finally:
            torch.clear_autocast_cache()

    def wait_stopped(self) -> None:
        """Wait for ranks that are still at work on jobs that failed."""
        deadline = monotonic() + (0.0 if self._hung else self.timeout.seconds)
        self._running = self.at_work
        while self._running:
            if not self._collect(max(0.0, deadline - monotonic())):
                self._hung |= self._running
                raise HangError(
                    f"{_named(self._running)} still at work on an earlier step; build a new pipeline"
                )
        self._hung.clear()

    def _run(self, jobs: Sequence[Job], stop: Callable[[str], None], detector: HangDetector | None) -> None:
        errors: list[BaseException] = []
        began = failed = monotonic()
        try:
            self._hand_out(with_settings(jobs))
        except BaseException as error:
            self._interrupt(error, stop, detector)
            raise
        while self._running:
            try:
                end = self._collect(POLL_INTERVAL)
                hung = set() if end else self._find_hung(detector, began)
            except BaseException as error:
                self._interrupt(error, stop, detector)
                raise
            if end and end[0] is not None:
                failed = failed if errors else monotonic()
                errors.append(end[0])
            if not end:
                if errors:
                    self._give_up(errors, monotonic() - failed, hung, detector)
                elif hung:
                    self._end_hung(hung, stop, detector)
        if errors:
            raise _first(errors)

    def _hand_out(self, jobs: Sequence[Job]) -> None:
        self._ends = ends = _JobEnds()
        for rank, (inbox, job) in enumerate(zip(self._inboxes, jobs, strict=True)):
            self._running.add(rank)
            inbox.put((job, ends))

    def _interrupt(
        self, error: BaseException, stop: Callable[[str], None], detector: HangDetector | None
    ) -> None:
        """Stop the ranks and wait until they have ended, since they add to gradients as long as they compute."""
        stop("the step was interrupted")
        grace = min(self.timeout.seconds, GRACE)
        deadline = monotonic() + grace
        while self.at_work and monotonic() < deadline:
            self._collect(POLL_INTERVAL)
        self._running = self.at_work
        if self._running:
            error.add_note(
                f"{self._describe(self._running, detector)}; it did not stop within {grace:g} s of the interrupt, and may "
                "still add to gradients"
            )

    def _collect(self, seconds: float) -> tuple[BaseException | None] | None:
        """Wait for the end of a job, and return its error in a tuple; None if no job ends in time."""
        try:
            rank, error = self._ends.reports.get(timeout=seconds)
        except queue.Empty:
            return None
        self._running.discard(rank)
        return (error,)

    def _find_hung(self, detector: HangDetector | None, began: float) -> set[int]:
        if detector is not None:
            return self._running.intersection(detector.hung())
        return set(self._running) if monotonic() - began > self.timeout.first else set()

    def _give_up(
        self, errors: Sequence[BaseException], since: float, hung: set[int], detector: HangDetector | None
    ) -> None:
        """Raise the first error, without waiting for ranks still at work; do nothing before the grace period is over."""
        first = _first(errors)
        timed_out = isinstance(first, WaitTimeoutError)
        if since < min(self.timeout.seconds, SHORT_GRACE if timed_out else GRACE):
            return
        description = self._describe(self._running, detector)
        if timed_out or hung:
            self._hung = set(self._running)
            dump_stacks(description)
            raise HangError(
                f"{description}; it did not stop within {since:.1f} s of the failure: {first}. The stacks of all threads "
                "are on stderr; only ending the process ends this thread"
            ) from first
        first.add_note(f"{description}; it was left behind after {since:.1f} s")
        raise first

    def _end_hung(self, hung: set[int], stop: Callable[[str], None], detector: HangDetector | None) -> None:
        """Stop the ranks that do not hang, and raise HangError."""
        description = self._describe(hung, detector)
        dump_stacks(description)
        stop(f"{description}, which is longer than {self.timeout.seconds:g} s")
        deadline = monotonic() + min(self.timeout.seconds, SHORT_GRACE)
        while self._running - hung and monotonic() < deadline:
            self._collect(POLL_INTERVAL)
        self._hung = set(self._running)
        raise HangError(
            f"{description}, which is longer than the timeout of {self.timeout.seconds:g} s. All stacks are on stderr; "
            "only ending the process ends this thread"
        )

    def _describe(self, ranks: set[int], detector: HangDetector | None) -> str:
        if detector is None:
            return f"{_named(ranks)} still at work"
        return "; ".join(detector.describe(n) for n in sorted(ranks))

    def close(self) -> None:
        """End the threads, except those that hang; may be called twice."""
        _dismiss(self._inboxes)
        deadline = monotonic() + self.timeout.seconds
        for rank, thread in enumerate(self._threads):
            if rank in self._hung:
                continue
            late = rank in self._running
            thread.join(min(GRACE, self.timeout.seconds) if late else max(0.0, deadline - monotonic()))
        self._threads = []


def _serve(rank: int, threads: int, inbox: _Inbox) -> None:
    """Run the jobs of a rank's inbox until it is dismissed."""
    torch.set_num_threads(threads)
    # Autocast casts a weight once and keeps the cast until a thread leaves its outermost autocast, which drops the
    # casts of all threads. A weight used twice would be cast once or twice by chance, which changes the bits of its
    # gradient. No rank's thread ever leaves the outermost autocast; `run` drops the casts when all are idle.
    torch.autocast_increment_nesting()
    while (entry := inbox.get()) is not None:
        (job, ends), entry = entry, None
        error: BaseException | None = None
        AT_WORK.add(this := threading.current_thread())
        try:
            job()
        except BaseException as caught:  # raised again by `run`, in the caller's thread
            error = caught
        AT_WORK.discard(this)
        del job
        ends.ranks.add(rank)
        ends.reports.put((rank, error))
        del error, ends


def _dismiss(inboxes: Sequence[_Inbox]) -> None:
    """Let the threads end after the jobs they have, without waiting for them."""
    for inbox in inboxes:
        inbox.put(None)


def _first(errors: Sequence[BaseException]) -> BaseException:
    """Return the first error that does not report the failure of another rank."""
    return next((e for e in errors if not isinstance(e, PeerError)), errors[0])


def _named(ranks: set[int]) -> str:
    numbers = ", ".join(map(str, sorted(ranks)))
    return f"the thread of rank {numbers} is" if len(ranks) == 1 else f"the threads of ranks {numbers} are"
