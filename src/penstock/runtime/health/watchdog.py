"""The thread beside a process's rank that sees what the rank, inside an op or a wait, cannot."""

from __future__ import annotations

import os
import sys
import threading
import weakref

from penstock.runtime.health.hang import HUNG, TICK, Judge, dump_stacks
from penstock.runtime.health.peers import Roster
from penstock.runtime.health.progress import place_of


class Watch:
    """Learns at once that another process has ended, and ends this one if its rank hangs.

    A rank that hangs cannot raise anything, and its process would stay for good; so its stacks are shown, the others are
    told, and the process ends with the code `HUNG`.

    Args:
        roster: of all processes.
        judge: of this process's rank.
    """

    def __init__(self, roster: Roster, judge: Judge) -> None:
        self.judge = judge
        roster.place = lambda words: place_of(judge.program, words)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_look, args=(roster, judge, self._stop), name="penstock-watch", daemon=True
        )
        # The thread does not hold the watch, so one that nobody has any more ends it.
        weakref.finalize(self, self._stop.set).atexit = False
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()


def _look(roster: Roster, judge: Judge, stop: threading.Event) -> None:
    while not stop.is_set():
        roster.watch(TICK)
        if judge.hung():
            _end(roster, judge)


def _end(roster: Roster, judge: Judge) -> None:
    text = f"{judge.where(0)}, which is longer than the limit of {judge.limit.seconds:g} s"
    roster.say(text)
    dump_stacks(text)
    sys.stdout.flush()
    os._exit(HUNG)
