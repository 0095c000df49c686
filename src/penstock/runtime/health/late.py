"""Ranks still at work when a failed or interrupted step returns to the caller, whose gradients they may change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.errors import PenstockError
from penstock.runtime.executor import Executor
from penstock.runtime.health.rank_progress import END, ROW, WAITS, rows_of
from penstock.schedule.ops import Kind


class LateRanks:
    """The ranks that were at work when the last training step failed, and the op each was in."""

    def __init__(self) -> None:
        self._late: list[tuple[Executor, int]] = []

    def note(self, executors: Sequence[Executor], ranks: Iterable[int]) -> None:
        """Remember the ops that ranks are in, before the caller can zero their gradients."""
        self._late += [(executors[n], executors[n].progress[ROW]) for n in ranks]

    def require_no_gradients(self) -> None:
        """Refuse one step if a late rank has run a backward since; call it once all of them have ended.

        Raises:
            PenstockError: if a late rank has added to gradients.
        """
        late, self._late = self._late, []
        if ranks := sorted({executor.rank for executor, row in late if _changed_gradients(executor, row)}):
            raise PenstockError(
                f"rank {', '.join(map(str, ranks))} was still in the backward when an earlier step had failed or was "
                "interrupted, and added to gradients after that; it has ended now. Call zero_grad() and repeat the step"
            )


def _changed_gradients(executor: Executor, row: int) -> bool:
    """Return whether a rank has added to gradients since the op at `row`."""
    progress, program = executor.progress, executor.program
    last = progress[ROW]
    if last == END:
        if executor.shared is not None:
            return True  # the step's end sums gradients over ranks
        stop = program.schedule.rows(executor.rank).stop
    else:
        stop = (
            last if progress[WAITS] else rows_of(program, last).stop
        )  # a rank that waits has not begun its op
    kinds = program.schedule.kind[row:stop] if row != END else ()
    return any(kind not in (Kind.F, Kind.R) for kind in kinds)
