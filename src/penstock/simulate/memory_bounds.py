"""Lower bounds on the makespan of any schedule that keeps within a limit of memory.

Three bounds use that a rank holds at most k activations. Each begins with the head of a rank (its first forward cannot start
earlier) and ends with its tail (what must follow its last op).

- Little's law: every activation stays at least as long as its microbatch's way to the end and back. The sum of these times
  fits below a curve that rises by one activation a forward, stays at k, and falls by one each time that memory is freed.
- Chains: the forward k places later waits until an activation is freed.
- Gaps: until its first gradient is back a rank has at most k forwards to run, and after its last forward only what k
  activations have left.

Little's law also applies to bytes, without the ramps. The bounds of `penstock.simulate.bounds` hold as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.schedule.memory import Budget
from penstock.schedule.ops import Kind
from penstock.schedule.placement import Placement
from penstock.simulate.bounds import Backward, Paths, lower_bound, paths_of
from penstock.simulate.costs import Costs, Table


def bound_in_memory(
    placement: Placement,
    microbatches: int,
    costs: Costs,
    backward: Backward = "full",
    budget: Budget | None = None,
) -> Any:
    """Return a makespan that no schedule with a placement, costs and memory can beat.

    Time for which messages block a rank is not counted.
    """
    best = lower_bound(placement, microbatches, costs, backward).makespan
    # Fused pairs may overlap their halves; the bounds below count them apart.
    if budget is not None and costs.pair is None:
        paths = paths_of(placement, costs, backward)
        for rank, limit in enumerate(budget.limits(placement.ranks).tolist()):
            stages = list(placement.stages_of[rank])
            best = max(best, _of_rank(_Rank(placement, paths, budget, stages), microbatches, limit))
    whole = (
        costs.seconds.dtype.kind in "iu" and costs.communication.transfer(placement.stages).dtype.kind in "iu"
    )
    # Rounding of the divisions must not raise a whole bound to the next number.
    return int(np.ceil(best - 1e-9 * best)) if whole else float(best)


class _Rank:
    """Figures of a rank's stages."""

    def __init__(self, placement: Placement, paths: Paths, budget: Budget, stages: Sequence[int]) -> None:
        at = np.array(stages)
        # Number of a microbatch's activations on the rank: one of two if the rank is in two opposite pipes.
        self.visits = 1 if placement.has_copies else len(at)
        # Bytes or activations of each stage.
        self.saved = np.broadcast_to(np.asarray(budget.saved, np.int64), (placement.stages,))[at]
        # Seconds of a forward, of the op that frees, and of all that follows a forward, by stage.
        self.forward = paths.forward[at]
        late = budget.freed_at == "W"
        self.release = np.where(late & (paths.weights > 0), paths.weights, paths.inputs)[at]
        self.rest = (paths.inputs + paths.weights)[at]
        gradient = paths.head[Kind.I] - paths.head[Kind.F] + paths.inputs
        # Least time from the start of a forward until its memory is freed, by stage.
        self.stay: Table = (gradient + (paths.weights if late else 0))[at]
        # An activation stays until all of its backward is done.
        self.rest_is_held = late or not (paths.weights > 0).any()
        self.head = paths.head[Kind.F][at].min()  # earliest start of a forward on the rank
        # Earliest time after the head at which a gradient is there.
        self.back = (paths.head[Kind.I][at].min()) - self.head
        # Time that follows the last op of the rank at least.
        self.tail = np.where(paths.weights > 0, 0, paths.tail[Kind.I])[at].min()


def _of_rank(rank: _Rank, microbatches: int, limit: int) -> Any:
    """Return the best of the three bounds for one rank."""
    ends = rank.head + rank.tail
    stay = (rank.stay * rank.saved).min() if rank.visits == 1 else (rank.stay * rank.saved).sum()
    best = ends + microbatches * stay / max(1, limit)
    if len(set(rank.saved.tolist())) > 1 or rank.saved[0] == 0:
        return best
    held, count = limit // int(rank.saved[0]), rank.visits * microbatches
    if not 0 < held < count:
        return best
    forward, release, least = rank.forward.min(), rank.release.min(), rank.stay.min()
    # What the curve lacks below the limit: a staircase up by forwards, and one down by releases.
    ramps = (forward + release) * held * (held - 1) / 2
    stay = least if rank.visits == 1 else rank.stay.sum()
    little = (microbatches * stay + ramps) / held
    turns, left = divmod(count - 1, held)
    chain = (turns + 1) * least + left * forward
    work = rank.forward + rank.rest
    work = microbatches * (work.min() if rank.visits == 1 else work.sum())
    before = rank.back - held * rank.forward.max()
    # Freed at B, an activation may leave its weight half for later.
    after = (rank.stay - rank.forward).min() - held * rank.rest.max() if rank.rest_is_held else 0
    return max(best, ends + max(little, chain, work + max(0, before) + max(0, after)))
