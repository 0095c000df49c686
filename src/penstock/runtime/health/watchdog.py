"""The thread beside a process's rank that sees what the rank, inside an op or a wait, cannot."""

from __future__ import annotations

import os
import sys
import threading
import weakref

from penstock.runtime.health.hang import HUNG, TICK, HangDetector, dump_stacks
from penstock.runtime.health.peers import PeerRegistry
from penstock.runtime.health.rank_progress import place_of


class Watchdog:
    """Learns at once that another process has ended, and ends this one if its rank hangs.

    A rank that hangs cannot raise anything, and its process would stay for good; so its stacks are shown, the others are
    told, and the process ends with the code `HUNG`.

    Args:
        peer_registry: of all processes.
        detector: of this process's rank.
    """

    def __init__(self, peer_registry: PeerRegistry, detector: HangDetector) -> None:
        self.detector = detector
        peer_registry.place = lambda words: place_of(detector.program, words)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_look, args=(peer_registry, detector, self._stop), name="penstock-watch", daemon=True
        )
        # The thread does not hold the watch, so one that nobody has any more ends it.
        weakref.finalize(self, self._stop.set).atexit = False
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()


def _look(peer_registry: PeerRegistry, detector: HangDetector, stop: threading.Event) -> None:
    while not stop.is_set():
        peer_registry.watch(TICK)
        if detector.hung():
            _end(peer_registry, detector)


def _end(peer_registry: PeerRegistry, detector: HangDetector) -> None:
    text = f"{detector.where(0)}, which is longer than the limit of {detector.timeout.seconds:g} s"
    peer_registry.say(text)
    dump_stacks(text)
    sys.stdout.flush()
    os._exit(HUNG)
