"""A rank that hangs: told from one that waits or works, and shown by the stacks of its process."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
from collections.abc import Sequence
from time import monotonic

from penstock.runtime.health.rank_progress import ROW, STEP, WAITS, RankProgress, place_of
from penstock.runtime.workers.timeout import Timeout
from penstock.schedule.program import Program

HUNG = 124
"""Exit code of a process that a hang ends, as of ``timeout(1)``."""
RANK_THREAD = "penstock-rank-"
"""How the names of the ranks' threads begin."""
TICK = 0.25
"""Seconds between two looks."""
GRACE = 5.0
"""Seconds that the other ranks have to stop once one has failed; less if the limit is shorter."""
SHORT_GRACE = 1.0
"""The same after a wait that ran out: who kept it waiting had the whole limit already."""


class HangDetector:
    """Watches what ranks do, by their words, and tells which of them hang.

    A rank hangs if one op of it computes for longer than a wait may last: the others, who wait for it, give up then. A rank
    that waits does not hang; its wait has the same limit.

    Args:
        timeout: of a wait.
        words: of the ranks, by their number here.
        names: what to call them.
        program: of the step.
    """

    def __init__(
        self, timeout: Timeout, words: Sequence[RankProgress], names: Sequence[str], program: Program
    ) -> None:
        self.timeout = timeout
        self._words = words
        self._names = names
        self.program = program
        self._marks: list[tuple[int, int, int]] = [(0, 0, 0)] * len(words)
        self._since = [monotonic()] * len(words)

    def hung(self) -> list[int]:
        """Who hangs; to be asked every now and then, since that is how it sees what goes on."""
        now, timeout = monotonic(), self.timeout.seconds
        found = []
        for n, words in enumerate(self._words):
            mark = (words[STEP], words[ROW], words[WAITS])
            if mark != self._marks[n]:
                self._marks[n], self._since[n] = mark, now
            step, row, waits = mark
            # Who waits for this rank gives up after the limit; it says so first.
            if (
                step
                and row >= 0
                and not waits
                and now - self._since[n] > timeout + min(SHORT_GRACE, timeout / 4)
            ):
                found.append(n)
        return found

    def where(self, n: int) -> str:
        """What a rank does, and for how long it has."""
        words = self._words[n]
        text = f"{self._names[n]} is {place_of(self.program, words)}"
        same = (words[STEP], words[ROW], words[WAITS]) == self._marks[n]
        return f"{text}, for {monotonic() - self._since[n]:.1f} s now" if words[STEP] and same else text


def dump_stacks(why: str) -> None:
    """Write the stacks of all threads to stderr, below a line that says why and lines that name the threads."""
    names = "".join(f"  thread 0x{t.ident or 0:016x} is {t.name}\n" for t in threading.enumerate())
    with contextlib.suppress(OSError, ValueError):  # nobody can read it
        os.write(2, f"penstock: {why}; the stacks of this process (id {os.getpid()}):\n{names}".encode())
        faulthandler.dump_traceback(2, all_threads=True)
