"""Ranks that are still at work when a failed or interrupted step returns to the caller, whose gradients they may change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.errors import PenstockError
from penstock.runtime.executor import Executor
from penstock.runtime.health.rank_progress import END, ROW, WAITS, rows_of
from penstock.schedule.ops import Kind


class LateRanks:
    """The ranks that were at work when the last training step failed, and the op each was in."""

    def __init__(self) -> None:
        self._found: list[tuple[Executor, int]] = []

    def note(self, executors: Sequence[Executor], ranks: Iterable[int]) -> None:
        """Remember where ranks are, before the caller can zero their gradients."""
        self._found += [(executors[n], executors[n].words[ROW]) for n in ranks]

    def require_no_gradients(self) -> None:
        """Refuse one step if any of them ran a backward since; call it once they have ended.

        Raises:
            PenstockError: some did.
        """
        found, self._found = self._found, []
        if ranks := sorted({executor.rank for executor, row in found if _added(executor, row)}):
            raise PenstockError(
                f"rank {', '.join(map(str, ranks))} was still in the backward when an earlier step had failed or was "
                "interrupted, and added to gradients after that; it has ended now. Call zero_grad() and repeat the step"
            )


def _added(executor: Executor, row: int) -> bool:
    """Whether a rank added to gradients from the op of a row on; one that waits has not begun its op."""
    words, program = executor.words, executor.program
    last = words[ROW]
    if last == END:
        if executor.shared is not None or executor.replicas is not None:
            return True  # they add up what ranks and replicas have
        stop = program.schedule.rows(executor.rank).stop
    else:
        stop = last if words[WAITS] else rows_of(program, last).stop
    kinds = program.schedule.kind[row:stop] if row != END else ()
    return any(kind not in (Kind.F, Kind.R) for kind in kinds)
