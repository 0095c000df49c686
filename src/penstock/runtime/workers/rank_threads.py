"""The threads that are the ranks of a one-process pipeline: started once, given one job each a step."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from time import monotonic

import torch

from penstock.errors import HangError, PeerError, WaitTimeoutError
from penstock.runtime.health.hang import GRACE, RANK_THREAD, SHORT_GRACE, TICK, HangDetector, dump_stacks
from penstock.runtime.workers.caller import Job, with_settings
from penstock.runtime.workers.streams import Streams
from penstock.runtime.workers.timeout import Timeout


class _Ends:
    """How the jobs of one run end: `told` with what they raised, and `ranks`, which an interrupt cannot lose."""

    def __init__(self) -> None:
        self.told: queue.SimpleQueue[tuple[int, BaseException | None]] = queue.SimpleQueue()
        self.ranks: set[int] = set()


_Inbox = queue.SimpleQueue[tuple[Job, _Ends] | None]


class RankThreads:
    """One thread a rank.

    Args:
        ranks: how many.
        timeout: how long a rank may keep the others waiting.
        streams: on which the ranks compute; None on the CPU.
    """

    def __init__(self, ranks: int, timeout: Timeout, streams: Streams | None = None) -> None:
        self.timeout = timeout
        self._streams = streams
        self._jobs: list[_Inbox] = [queue.SimpleQueue() for _ in range(ranks)]
        self._ends = _Ends()
        self._running: set[int] = set()
        self._hung: set[int] = set()
        # Ranks compute side by side, so each gets its share of the cores; torch keeps this per thread.
        share = max(1, torch.get_num_threads() // ranks)
        self._threads = [
            threading.Thread(
                target=_serve,
                args=(r, share, self._jobs[r]),
                name=f"{RANK_THREAD}{r}",
                daemon=True,
            )
            for r in range(ranks)
        ]
        # The threads do not hold this object, so one that is dropped ends them, closed or not.
        weakref.finalize(self, _dismiss, self._jobs).atexit = False
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
            jobs: by rank.
            stop: called with the reason if the jobs are to end before they are done; must make every one end that waits.
            detector: tells who hangs; without one a job hangs that takes longer than a first step may wait.

        Raises:
            BaseException: what the rank that failed first raised (another rank's word of it comes second). Ranks that are
                still at work a few seconds later are named in a note, and waited for before the next jobs. What interrupts
                the caller (KeyboardInterrupt) stops the ranks and is raised once they have ended, in the same way; a
                second interrupt ends that wait.
            HangError: a rank hangs, as `HangDetector` says it, or did not stop when a wait for it had run out.
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
        """Wait for ranks that are still at work on jobs that failed.

        Raises:
            HangError: they do not end.
        """
        until = monotonic() + (0.0 if self._hung else self.timeout.seconds)
        self._running = self.at_work
        while self._running:
            if not self._collect(max(0.0, until - monotonic())):
                self._hung |= self._running
                raise HangError(
                    f"{_named(self._running)} still at work on an earlier step; build a new pipeline"
                )
        self._hung.clear()

    def _run(self, jobs: Sequence[Job], stop: Callable[[str], None], detector: HangDetector | None) -> None:
        failures: list[BaseException] = []
        began = failed = monotonic()
        try:
            self._hand_out(with_settings(jobs))
        except BaseException as error:
            self._interrupted(error, stop, detector)
            raise
        while self._running:
            try:
                found = self._collect(TICK)
                hung = set() if found else self._who_hangs(detector, began)
            except BaseException as error:
                self._interrupted(error, stop, detector)
                raise
            if found and found[0] is not None:
                failed = failed if failures else monotonic()
                failures.append(found[0])
            if not found:
                if failures:
                    self._give_up(failures, monotonic() - failed, hung, detector)
                elif hung:
                    self._end(hung, stop, detector)
        if failures:
            raise _first(failures)

    def _hand_out(self, jobs: Sequence[Job]) -> None:
        self._ends = ends = _Ends()
        for rank, (inbox, job) in enumerate(zip(self._jobs, jobs, strict=True)):
            self._running.add(rank)
            inbox.put((job, ends))

    def _interrupted(
        self, error: BaseException, stop: Callable[[str], None], detector: HangDetector | None
    ) -> None:
        """Stop the ranks and wait until they have ended: they add to gradients as long as they compute."""
        stop("the step was interrupted")
        until = monotonic() + min(self.timeout.seconds, GRACE)
        while self.at_work and monotonic() < until:
            self._collect(TICK)
        self._running = self.at_work
        if self._running:
            error.add_note(
                f"{self._doing(self._running, detector)}; it did not stop within {min(self.timeout.seconds, GRACE):g} s "
                "of the interrupt, and may still add to gradients"
            )

    def _collect(self, seconds: float) -> tuple[BaseException | None] | None:
        """The end of a job, with what it raised; None if none ends in time."""
        try:
            rank, error = self._ends.told.get(timeout=seconds)
        except queue.Empty:
            return None
        self._running.discard(rank)
        return (error,)

    def _who_hangs(self, detector: HangDetector | None, began: float) -> set[int]:
        if detector is not None:
            return self._running.intersection(detector.hung())
        return set(self._running) if monotonic() - began > self.timeout.first else set()

    def _give_up(
        self, failures: Sequence[BaseException], since: float, hung: set[int], detector: HangDetector | None
    ) -> None:
        """Once some have failed: leave those behind that do not stop."""
        first = _first(failures)
        waited = isinstance(first, WaitTimeoutError)
        if since < min(self.timeout.seconds, SHORT_GRACE if waited else GRACE):
            return
        doing = self._doing(self._running, detector)
        if waited or hung:
            self._hung = set(self._running)
            dump_stacks(doing)
            raise HangError(
                f"{doing}; it did not stop within {since:.1f} s of the failure: {first}. The stacks of all threads are on "
                "stderr; only the end of the process ends this thread"
            ) from first
        first.add_note(f"{doing}; it was left behind after {since:.1f} s")
        raise first

    def _end(self, hung: set[int], stop: Callable[[str], None], detector: HangDetector | None) -> None:
        """End the jobs of all but those that hang."""
        doing = self._doing(hung, detector)
        dump_stacks(doing)
        stop(f"{doing}, which is longer than {self.timeout.seconds:g} s")
        until = monotonic() + min(self.timeout.seconds, SHORT_GRACE)
        while self._running - hung and monotonic() < until:
            self._collect(TICK)
        self._hung = set(self._running)
        raise HangError(
            f"{doing}, which is longer than the limit of {self.timeout.seconds:g} s. All stacks are on stderr; "
            "only the end of the process ends this thread"
        )

    def _doing(self, ranks: set[int], detector: HangDetector | None) -> str:
        if detector is None:
            return f"{_named(ranks)} still at work"
        return "; ".join(detector.where(n) for n in sorted(ranks))

    def close(self) -> None:
        """End the threads, but for those that hang; may be called twice."""
        _dismiss(self._jobs)
        until = monotonic() + self.timeout.seconds
        for rank, thread in enumerate(self._threads):
            if rank in self._hung:
                continue
            thread.join(
                min(GRACE, self.timeout.seconds) if rank in self._running else max(0.0, until - monotonic())
            )
        self._threads = []


def _serve(
    rank: int,
    share: int,
    jobs: _Inbox,
) -> None:
    """What a rank's thread does until it is dismissed."""
    torch.set_num_threads(share)
    # Autocast casts a weight once and keeps the cast until a thread leaves its outermost autocast, which drops the
    # casts of all threads: whether a weight used twice is cast once or twice, and so its gradient's bits, would be
    # left to chance. No rank's thread ever leaves the outermost one; `run` drops the casts when all are idle.
    torch.autocast_increment_nesting()
    while (given := jobs.get()) is not None:
        (job, ends), given = given, None
        error: BaseException | None = None
        try:
            job()
        except BaseException as caught:  # handed to the caller of run
            error = caught
        del job
        ends.ranks.add(rank)
        ends.told.put((rank, error))
        del error, ends


def _dismiss(jobs: Sequence[_Inbox]) -> None:
    """Let the threads end once they have done what they were given; waits for nothing."""
    for inbox in jobs:
        inbox.put(None)


def _first(failures: Sequence[BaseException]) -> BaseException:
    """The failure that the others follow from."""
    return next((e for e in failures if not isinstance(e, PeerError)), failures[0])


def _named(ranks: set[int]) -> str:
    numbers = ", ".join(map(str, sorted(ranks)))
    return f"the thread of rank {numbers} is" if len(ranks) == 1 else f"the threads of ranks {numbers} are"
