"""The threads that are the ranks of a one-process pipeline: started once, given one job each a step."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from penstock.errors import PeerError, WaitTimeoutError
from penstock.runtime.streams import Streams

Job = Callable[[], Any]


class Crew:
    """One thread a rank.

    Args:
        ranks: how many.
        timeout: once one rank has failed, how long the others have to stop, in seconds.
        streams: on which the ranks compute; None on the CPU.
    """

    def __init__(self, ranks: int, timeout: float, streams: Streams | None = None) -> None:
        self.timeout = timeout
        self._streams = streams
        self._jobs: list[queue.SimpleQueue[Job | None]] = [queue.SimpleQueue() for _ in range(ranks)]
        self._done: queue.SimpleQueue[tuple[int, BaseException | None]] = queue.SimpleQueue()
        # Ranks compute side by side, so each gets its share of the cores; torch keeps this per thread.
        share = max(1, torch.get_num_threads() // ranks)
        self._threads = [
            threading.Thread(target=self._serve, args=(r, share), name=f"penstock-rank-{r}", daemon=True)
            for r in range(ranks)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, jobs: Sequence[Job], stop: Callable[[], None]) -> None:
        """Run one job a rank and wait for all.

        Args:
            jobs: by rank.
            stop: called if the caller is interrupted while it waits; must make every job end.

        Raises:
            BaseException: what the rank that failed first raised (another rank's word of it comes second).
            WaitTimeoutError: a rank failed and another would not stop.
        """
        if self._streams is None:
            self._run(jobs, stop)
            return
        with self._streams.step():
            self._run([self._streams.on_rank(rank, job) for rank, job in enumerate(jobs)], stop)

    def _run(self, jobs: Sequence[Job], stop: Callable[[], None]) -> None:
        for inbox, job in zip(self._jobs, _with_settings(jobs), strict=True):
            inbox.put(job)
        running = set(range(len(jobs)))
        failures: list[BaseException] = []
        while running:
            try:
                rank, error = self._done.get(timeout=self.timeout if failures else None)
            except queue.Empty:
                raise WaitTimeoutError(
                    f"rank(s) {sorted(running)} did not stop within {self.timeout:g} s of the failure: {failures[0]}"
                ) from failures[0]
            except BaseException:
                stop()
                raise
            running.discard(rank)
            if error is not None:
                failures.append(error)
        if failures:
            raise next((e for e in failures if not isinstance(e, PeerError)), failures[0])

    def close(self) -> None:
        """End the threads; may be called twice."""
        for inbox in self._jobs:
            inbox.put(None)
        for thread in self._threads:
            thread.join(self.timeout)
        self._threads = []

    def _serve(self, rank: int, share: int) -> None:
        torch.set_num_threads(share)
        while (job := self._jobs[rank].get()) is not None:
            error: BaseException | None = None
            try:
                job()
            except BaseException as caught:  # handed to the caller of run
                error = caught
            del job
            self._done.put((rank, error))
            del error


def _with_settings(jobs: Sequence[Job]) -> list[Job]:
    """Give each job the caller's autocast state, which torch keeps per thread."""
    states = [
        (kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
    ]
    if not states:
        return list(jobs)

    @contextlib.contextmanager
    def settings() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind, dtype in states:
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            yield

    def wrap(job: Job) -> Job:
        def run() -> None:
            with settings():
                job()

        return run

    return [wrap(job) for job in jobs]
