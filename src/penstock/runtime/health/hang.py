"""Timeouts of waits, and detection of ranks that hang.

A rank that hangs neither waits nor computes: one of its ops runs for longer than the timeout. The watchdog ends its process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from time import monotonic

from penstock.base.errors import ConfigError
from penstock.runtime.health.peers import PeerRegistry
from penstock.runtime.health.rank_progress import ROW, STEP, WAITS, RankProgress, describe_progress
from penstock.schedule.program import Program

FIRST_TIMEOUT = 600.0
"""Seconds; the first steps compile, import and allocate, and ranks take different times for that."""


YEAR = 365 * 24 * 3600
"""Seconds; the longest timeout. Clocks and locks count in 64 bits, and sums of timeouts must not overflow."""


def require_timeout(timeout: object, name: str = "timeout") -> float:
    """Return a timeout; raise ConfigError unless it is a positive number of seconds, at most a year."""
    if isinstance(timeout, int | float) and 0 < timeout <= YEAR:
        return float(timeout)
    raise ConfigError(
        f"{name} must be a positive number of seconds, at most {YEAR} (a year), got {timeout!r}"
    )


class Timeout:
    """The timeout that every wait reads when it begins.

    Args:
        first: seconds that a wait may last until the first training step ends, and during the first evaluation (default:
            `timeout`).
    """

    def __init__(self, timeout: float, first: float | None = None) -> None:
        self.timeout = timeout
        self.first = timeout if first is None else first
        self.seconds = self.first
        self._done: set[bool] = set()

    @property
    def delta(self) -> timedelta:
        """`seconds` as a timedelta, for torch."""
        return timedelta(seconds=self.seconds)

    @property
    def longest(self) -> float:
        """The longer timeout in seconds, for slow work between steps, such as writing files."""
        return max(self.timeout, self.first)

    @contextlib.contextmanager
    def step(self, trains: bool) -> Iterator[None]:
        """Return a context for one step, with the `first` timeout until a step of its kind has succeeded."""
        self.seconds = self.timeout if trains in self._done else self.first
        try:
            yield
            self._done.add(trains)
        finally:
            self.seconds = self.timeout


HUNG = 124
"""Exit code of a process that ends because its rank hangs, as of ``timeout(1)``."""
AT_WORK: set[threading.Thread] = set()
"""The ranks' threads of this process that are at a job now; one that hangs stays in here."""
POLL_INTERVAL = 0.25
"""Seconds between two checks of a wait."""
GRACE = 5.0
"""Seconds that the other ranks have to stop once one has failed; less if the timeout is shorter."""
SHORT_GRACE = 1.0
"""The same after a wait that timed out, since the awaited rank has already had the whole timeout."""


class HangDetector:
    """Detector of hanging ranks of this process, by their progress.

    A rank hangs if one of its ops runs for longer than the timeout, at which the ranks that wait for it give up. A rank that
    waits does not hang; its wait has the same timeout.
    """

    def __init__(
        self, timeout: Timeout, progress: Sequence[RankProgress], names: Sequence[str], program: Program
    ) -> None:
        self.timeout = timeout
        self._progress = progress
        self._names = names
        self.program = program
        self._marks: list[tuple[int, int, int]] = [(0, 0, 0)] * len(progress)
        self._since = [monotonic()] * len(progress)

    def hung(self) -> list[int]:
        """Return the ranks that hang; call it repeatedly, since it compares each rank with the last call."""
        now, timeout = monotonic(), self.timeout.seconds
        # A rank that waits for this one gives up after the timeout; its report must come first.
        allowed = timeout + min(SHORT_GRACE, timeout / 4)
        busy: dict[int, float] = {}
        for n, mark in enumerate(map(_mark, self._progress)):
            if mark != self._marks[n]:
                self._marks[n], self._since[n] = mark, now
            step, row, waits = mark
            if step and row >= 0 and not waits:
                busy[n] = now - self._since[n]
        # Ranks that hang since the same moment are seen at different checks, and are told together.
        hangs = any(seconds > allowed for seconds in busy.values())
        return [n for n, seconds in busy.items() if hangs and seconds > timeout]

    def describe(self, n: int) -> str:
        """Describe where a rank is, and for how long."""
        progress = self._progress[n]
        text = f"{self._names[n]} is {describe_progress(self.program, progress)}"
        unchanged = _mark(progress) == self._marks[n]
        return (
            f"{text}, for {monotonic() - self._since[n]:.1f} s now" if progress[STEP] and unchanged else text
        )


def _mark(progress: RankProgress) -> tuple[int, int, int]:
    return progress[STEP], progress[ROW], progress[WAITS]


def dump_stacks(why: str) -> None:
    """Write the stacks of all threads to stderr, below a line that says why and lines that name the threads."""
    names = "".join(f"  thread 0x{t.ident or 0:016x} is {t.name}\n" for t in threading.enumerate())
    with contextlib.suppress(OSError, ValueError):  # stderr is closed, or its reader has ended
        os.write(2, f"penstock: {why}; the stacks of this process (id {os.getpid()}):\n{names}".encode())
        faulthandler.dump_traceback(2, all_threads=True)


class Watchdog:
    """A thread that notices at once when another process ends, and ends this process if its rank hangs.

    It sees what the rank cannot see inside an op or a wait. A rank that hangs cannot raise an error, and its process would
    never end. So the watchdog writes the stacks, tells the other processes, and ends this one with the exit code `HUNG`.
    """

    def __init__(self, peer_registry: PeerRegistry, detector: HangDetector) -> None:
        self.detector = detector
        peer_registry.describe = lambda progress: describe_progress(detector.program, progress)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_watch, args=(peer_registry, detector, self._stop), name="penstock-watch", daemon=True
        )
        self._thread.start()
        # The thread has no reference to this object, so a watchdog that is dropped ends its thread; at exit, too.
        self._finalizer = weakref.finalize(self, _end_thread, self._stop, self._thread)

    def close(self) -> None:
        """End the thread."""
        self._finalizer()


def _end_thread(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    if thread is not threading.current_thread():  # the garbage collection may run in any thread
        thread.join()


def _watch(peer_registry: PeerRegistry, detector: HangDetector, stop: threading.Event) -> None:
    while not stop.is_set():
        peer_registry.watch(POLL_INTERVAL)
        if detector.hung():
            _end(peer_registry, detector)


def _end(peer_registry: PeerRegistry, detector: HangDetector) -> None:
    text = f"{detector.describe(0)}, which is longer than the timeout of {detector.timeout.seconds:g} s"
    peer_registry.report_error(text)
    dump_stacks(text)
    sys.stdout.flush()
    # sys.exit would end this thread alone, and the rank that hangs would keep the process.
    os._exit(HUNG)
