"""Lower bounds on the makespan of any schedule with given placement and costs.

Two bounds apply whatever the order of the ops. The critical path is the way of one microbatch through all stages and back.
The one-machine bound of a rank is head + work + tail of any subset of its ops: they cannot start before the first of them
can (the head: the path of its microbatch up to it), they run one after the other, and the shortest of the paths that follow
them comes after (the tail). The bound is the best over all subsets {ops with head >= h and tail >= q}. Ranks with copies of
the same stages may share their work in any way, so their average counts.

With one stage per rank, latency c and a full backward this is m(F+B) + (p-1)(F+B+2c); with a split one the larger of
m(F+B+W) + (p-1)(F+c) and (m+p-1)(F+B) + 2(p-1)c + W.

Three more bounds use that a rank holds at most k activations. Each begins with the head of a rank (its first forward cannot
start earlier) and ends with its tail (what must follow its last op).

- Little's law: every activation stays at least as long as its microbatch's way to the end and back. The sum of these times
  fits below a curve that rises by one activation a forward, stays at k, and falls by one each time that memory is freed.
- Chains: the forward k places later waits until an activation is freed.
- Gaps: until its first gradient is back a rank has at most k forwards to run, and after its last forward only what k
  activations have left.

Little's law also applies to bytes, without the ramps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from penstock.schedule.memory import Budget
from penstock.schedule.ops import Kind
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule
from penstock.simulate.costs import Costs, Table

Backward = Literal["full", "split", "none"]


@dataclass(frozen=True, eq=False)
class Bound:
    """Lower bounds on the makespan, in the costs' unit of time."""

    makespan: Any
    critical_path: Any  # time of one microbatch through all stages and back
    machine: Table  # one-machine bound of every rank, shape (ranks,)


def bound_of(schedule: Schedule, costs: Costs) -> Bound:
    """Return `lower_bound` for the placement, microbatches and kind of backward of a schedule."""
    kinds = set(np.unique(schedule.kind).tolist())
    backward: Backward = "split" if kinds & {Kind.I, Kind.W} else "full" if Kind.B in kinds else "none"
    return lower_bound(schedule.placement, schedule.microbatches, costs, backward)


def lower_bound(
    placement: Placement,
    microbatches: int,
    costs: Costs,
    backward: Backward = "full",
    ranks: Set[int] | None = None,
) -> Bound:
    """Bound the makespan of every schedule from below.

    Time for which messages block a rank is not counted. Fewer `ranks` whose one-machine bounds count (default all)
    give a weaker bound in less time.
    """
    costs.require_sums(placement.stages, placement.ranks, microbatches)
    paths = paths_of(placement, costs, backward)
    machine = np.zeros(placement.ranks, paths.head[Kind.F].dtype)
    for sharing, stages in _shared(placement):
        if ranks is None or not ranks.isdisjoint(sharing):
            machine[sharing] = _machine(paths, stages, len(sharing), microbatches, costs)
    path = paths.head[Kind.I][0] + paths.inputs[0] + paths.tail[Kind.I][0]
    return Bound(max(path, machine.max()), path, machine)


class Paths(NamedTuple):
    """Least time of each stage's ops, and the paths before (head) and after (tail) them by kind."""

    forward: Table
    inputs: Table
    weights: Table
    head: dict[Kind, Table]
    tail: dict[Kind, Table]


def paths_of(placement: Placement, costs: Costs, backward: Backward) -> Paths:
    forward, full, half, rest = (costs.seconds[:, kind] for kind in (Kind.F, Kind.B, Kind.I, Kind.W))
    hop = _hops(placement, costs)
    hop_back = hop
    if backward == "split":
        # A full backward counts as its halves back to back; whichever form is cheaper may be taken.
        inputs = np.minimum(full, half)
        weights = np.minimum(full, half + rest) - inputs
    elif backward == "full":
        inputs, weights = full, np.zeros_like(full)
    else:
        inputs, weights, hop_back = np.zeros_like(full), np.zeros_like(full), np.zeros_like(hop)
    kind = np.result_type(forward, inputs, weights, hop)
    last = placement.stages - 1
    head = {k: np.zeros(last + 1, kind) for k in (Kind.F, Kind.I, Kind.W)}
    tail = {k: np.zeros(last + 1, kind) for k in (Kind.F, Kind.I, Kind.W)}
    for s in range(last):
        head[Kind.F][s + 1] = head[Kind.F][s] + forward[s] + hop[s]
    head[Kind.I][last] = head[Kind.F][last] + forward[last]
    for s in reversed(range(last)):
        head[Kind.I][s] = head[Kind.I][s + 1] + inputs[s + 1] + hop_back[s]
    head[Kind.W] = head[Kind.I] + inputs
    tail[Kind.I][0] = weights[0]
    for s in range(1, last + 1):
        tail[Kind.I][s] = max(weights[s], hop_back[s - 1] + inputs[s - 1] + tail[Kind.I][s - 1])
    tail[Kind.F][last] = inputs[last] + tail[Kind.I][last]
    for s in reversed(range(last)):
        tail[Kind.F][s] = hop[s] + forward[s + 1] + tail[Kind.F][s + 1]
    return Paths(forward, inputs, weights, head, tail)


def _hops(placement: Placement, costs: Costs) -> Table:
    """Return the least time of a message from each stage to the next, shape (stages - 1,)."""
    transfer = costs.communication.transfer(placement.stages)
    node = costs.communication.node(placement.ranks)
    least = [
        min(0 if a == b else transfer[s, int(node[a] != node[b])] for a in senders for b in receivers)
        for s, (senders, receivers) in enumerate(
            zip(placement.holders[:-1], placement.holders[1:], strict=True)
        )
    ]
    return np.array(least, transfer.dtype)


def _shared(placement: Placement) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (ranks, stages) of ranks with copies of each other's stages; usually a rank is alone."""
    seen: set[int] = set()
    for rank in range(placement.ranks):
        if rank in seen:
            continue
        ranks, stages, todo = {rank}, set[int](), [rank]
        while todo:
            for stage in set(placement.stages_of[todo.pop()]) - stages:
                stages.add(stage)
                todo += set(placement.holders[stage]) - ranks
                ranks |= set(placement.holders[stage])
        seen |= ranks
        yield sorted(ranks), sorted(stages)


def _machine(paths: Paths, stages: list[int], copies: int, microbatches: int, costs: Costs) -> Any:
    """Return the one-machine bound of `copies` ranks that share the work of some stages."""
    forward = paths.forward[stages]
    if costs.pair is not None:
        # In a pair, a forward adds only the time that the pair takes beyond its backward.
        beside = costs.seconds[stages][:, [Kind.B, Kind.I]].max()
        forward = np.clip(costs.pair[stages] - beside, 0, forward)
    head, tail = (
        np.concatenate([side[k][stages] for k in (Kind.F, Kind.I, Kind.W)])
        for side in (paths.head, paths.tail)
    )
    work = microbatches * np.concatenate([forward, paths.inputs[stages], paths.weights[stages]])
    head, tail, work = head[work > 0], tail[work > 0], work[work > 0]
    # With heads sorted downwards, every prefix is a set {ops with head >= h}.
    order = np.argsort(-head, kind="stable")
    head, tail, work = head[order], tail[order], work[order]
    best = 0
    for least in np.unique(tail):
        among = tail >= least
        total = np.cumsum(work[among])
        # Of whole times, the rank with the largest share has at least the average, rounded up.
        each = -(-total // copies) if total.dtype.kind == "i" else total / copies
        best = max(best, (head[among] + each + least).max())
    return best


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
