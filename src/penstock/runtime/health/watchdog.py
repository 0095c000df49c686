"""A thread beside the rank of a process, which sees what the rank cannot see inside an op or a wait."""

from __future__ import annotations

import os
import sys
import threading
import weakref

from penstock.runtime.health.hang import HUNG, POLL_INTERVAL, HangDetector, dump_stacks
from penstock.runtime.health.peers import PeerRegistry
from penstock.runtime.health.rank_progress import describe_progress


class Watchdog:
    """A thread that notices at once when another process ends, and ends this process if its rank hangs.

    A rank that hangs cannot raise an error, and its process would never end. So the watchdog writes the stacks, tells the
    other processes, and ends this one with the exit code `HUNG`.
    """

    def __init__(self, peer_registry: PeerRegistry, detector: HangDetector) -> None:
        self.detector = detector
        peer_registry.describe = lambda progress: describe_progress(detector.program, progress)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_watch, args=(peer_registry, detector, self._stop), name="penstock-watch", daemon=True
        )
        # The thread has no reference to this object, so a watchdog that is dropped ends its thread.
        weakref.finalize(self, self._stop.set).atexit = False
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()


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
    os._exit(HUNG)
