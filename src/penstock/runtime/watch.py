"""The thread beside a process's rank that sees what the rank, inside an op or a wait, cannot."""

from __future__ import annotations

import os
import sys
import threading

from penstock.runtime.hang import HUNG, TICK, Judge, dump_stacks
from penstock.runtime.status import place_of
from penstock.runtime.transport.roster import Roster


class Watch:
    """Learns at once that another process has ended, and ends this one if its rank hangs.

    A rank that hangs cannot raise anything, and its process would stay for good; so its stacks are shown, the others are
    told, and the process ends with the code `HUNG`.

    Args:
        roster: of all processes.
        judge: of this process's rank.
    """

    def __init__(self, roster: Roster, judge: Judge) -> None:
        self._roster = roster
        self.judge = judge
        roster.place = lambda words: place_of(judge.program, words)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="penstock-watch", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._stop.is_set():
            self._roster.watch(TICK)
            if self.judge.hung():
                self._end()

    def _end(self) -> None:
        text = f"{self.judge.where(0)}, which is longer than the limit of {self.judge.limit.seconds:g} s"
        self._roster.say(text)
        dump_stacks(text)
        sys.stdout.flush()
        os._exit(HUNG)

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()
