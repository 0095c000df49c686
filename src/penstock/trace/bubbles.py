"""Where the time of the ranks went: busy, or idle for a reason.

Works on simulated and on measured traces alike, from the events alone. A rank is busy while it computes (or runs the
optimizer). Every moment between the step's first start and its last end in which it is not has one cause:

    warm_up        waits up to the rank's first backward: the pipeline fills
    cool_down      waits after the rank's last forward, and the time after its last op: the pipeline drains
    activation     waits in the steady state until another stage has computed the activation
    gradient       the same, the gradient
    communication  what is needed has been computed, and is on its way, being sent, or being reduced
    overhead       everything was there and no message was due (never in a simulation)
    imbalance      what the busiest rank works more than this one, which no order can fill; taken off the waits, those
                   of the steady state first

The causes of a rank add up to makespan minus busy: exactly for integer times, to rounding for seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.trace.events import Activity, Trace

CAUSES = ("warm_up", "cool_down", "activation", "gradient", "communication", "overhead", "imbalance")
_YIELDS_TO_IMBALANCE = ("activation", "gradient", "cool_down", "warm_up", "communication", "overhead")
_BUSY = (Activity.F, Activity.B, Activity.I, Activity.W, Activity.R, Activity.OPTIMIZER)
_MESSAGES = (Activity.SEND, Activity.RECV)
Times = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Bubbles:
    """The time of every rank; all in the trace's unit of time.

    Attributes:
        makespan: the last end minus the first start, over all ranks.
        busy: shape (ranks,).
        idle: every one of `CAUSES` → shape (ranks,).
    """

    makespan: Any
    busy: Times
    idle: Mapping[str, Times]


def makespan(trace: Trace) -> Any:
    """The last end minus the first start, messages aside; 0 for a trace without events."""
    real = _select(trace, _not_message(trace))
    return real.end.max() - real.start.min() if len(real) else 0


def longest(trace: Trace) -> Any:
    """The largest time from a rank's first start to its last end: the zero-bubble paper's cost (2401.10241)."""
    real = _select(trace, _not_message(trace))
    spans = [real.end[rows].max() - real.start[rows].min() for rows in _occupied(real).values()]
    return max(spans, default=0)


def busy(trace: Trace) -> Times:
    """How long every rank computes, shape (ranks,)."""
    work = _select(trace, _is_work(trace))
    spent = work.end - work.start
    spent[1:][work.paired[:-1]] = 0
    return _sum_by(work.rank, spent, trace.ranks)


def bubble_fraction(trace: Trace) -> float:
    """The idle share of ranks × makespan, between 0 and 1; 0 for a trace without events."""
    whole = float(makespan(trace)) * trace.ranks
    return 1.0 - float(busy(trace).sum()) / whole if whole > 0 else 0.0


def bubbles(trace: Trace) -> Bubbles:
    """Split every rank's idle time by cause."""
    real = _select(trace, _not_message(trace))
    zero = np.zeros(trace.ranks, (trace.end[:0] - trace.start[:0]).dtype)
    idle = {cause: zero.copy() for cause in CAUSES}
    if not len(real):
        return Bubbles(0, zero, idle)
    begin, finish = real.start.min(), real.end.max()
    gaps = _gaps(_select(trace, _is_work(trace)), begin, finish)
    reducing = _reducing(trace, gaps)
    waited = np.minimum(gaps.waited, gaps.length - reducing)
    message = gaps.message | (reducing > 0)
    for number, cause in enumerate(CAUSES[:4]):
        of_cause = gaps.cause == number
        idle[cause] += _sum_by(gaps.rank[of_cause], waited[of_cause], trace.ranks)
    for cause, mask in (("communication", message), ("overhead", ~message)):
        idle[cause] += _sum_by(gaps.rank[mask], (gaps.length - waited)[mask], trace.ranks)
    spent = (finish - begin) - sum(idle.values())
    _charge_imbalance(idle, spent.max() - spent)
    return Bubbles(finish - begin, spent, idle)


class _Gaps(NamedTuple):
    """Every stretch in which a rank does not compute; columns of equal length.

    `waited` is its first part, until what the next op needs had been computed, and `cause` the place in CAUSES that
    this part belongs to. `message` says whether the rest can be a message's doing.
    """

    rank: npt.NDArray[np.int32]
    start: Times
    length: Times
    waited: Times
    cause: npt.NDArray[np.int8]
    message: npt.NDArray[np.bool_]


def _gaps(work: Trace, begin: Any, finish: Any) -> _Gaps:
    free, tail = _frontiers(work, begin)
    length = np.maximum(work.start - free, 0)
    ready, gradient, message = _needs(work, begin, finish)
    cause = np.where(gradient, CAUSES.index("gradient"), CAUSES.index("activation")).astype(np.int8)
    for rows in _occupied(work).values():
        kind = work.kind[rows]
        backward = np.flatnonzero((kind == Activity.B) | (kind == Activity.I))
        forward = np.flatnonzero(kind == Activity.F)
        if len(forward):
            cause[rows][forward[-1] + 1 :] = CAUSES.index("cool_down")
        cause[rows][: backward[0] + 1 if len(backward) else 1] = CAUSES.index("warm_up")
    everyone = np.arange(work.ranks, dtype=np.int32)
    return _Gaps(
        np.concatenate([work.rank, everyone]),
        np.concatenate([free, tail]),
        np.concatenate([length, finish - tail]),
        np.concatenate([np.clip(ready - free, 0, length), finish - tail]),
        np.concatenate([cause, np.full(work.ranks, CAUSES.index("cool_down"), np.int8)]),
        np.concatenate([message, np.zeros(work.ranks, np.bool_)]),
    )


def _frontiers(work: Trace, begin: Any) -> tuple[Times, Times]:
    """Until when the rank of every event was busy before it, and every rank at all."""
    free = np.empty_like(work.start)
    tail = np.full(work.ranks, begin, free.dtype)
    for rank, rows in _occupied(work).items():
        ends = np.maximum.accumulate(work.end[rows])
        free[rows.start] = begin
        free[rows.start + 1 : rows.stop] = ends[:-1]
        tail[rank] = ends[-1]
    return free, tail


def _needs(
    work: Trace, begin: Any, finish: Any
) -> tuple[Times, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """For every event: when what it takes had been computed, whether that is a gradient, and whether a message
    is due around it (it takes from another rank, or the op before it gives to one).

    `begin` if it takes nothing; `finish` if the trace does not know the giver, and for the optimizer, which waits
    for everything.
    """
    ready = np.full(len(work), begin, work.end.dtype)
    ready[work.kind == Activity.OPTIMIZER] = finish
    takes = np.zeros(len(work), np.bool_)
    gives = np.zeros(len(work), np.bool_)
    backward = (work.kind == Activity.B) | (work.kind == Activity.I)
    ops = work.stage >= 0
    shape = (work.stage.max(initial=0) + 1, work.microbatch.max(initial=0) + 1)
    for mask, step in ((ops & (work.kind == Activity.F), -1), (ops & backward, 1)):
        rows = np.flatnonzero(mask)
        stage, microbatch = work.stage[rows], work.microbatch[rows]
        end = np.full(shape, finish, work.end.dtype)
        where = np.full(shape, -1, np.int32)
        end[stage, microbatch], where[stage, microbatch] = work.end[rows], work.rank[rows]
        giver, taker = stage + step, stage - step
        real = (giver >= 0) & (giver < shape[0])
        ready[rows[real]] = end[giver[real], microbatch[real]]
        takes[rows[real]] = where[giver[real], microbatch[real]] != work.rank[rows[real]]
        real = (taker >= 0) & (taker < shape[0])
        gives[rows[real]] = where[taker[real], microbatch[real]] != work.rank[rows[real]]
    first = np.flatnonzero(work.paired)
    backward[first] = ready[first + 1] > ready[first]
    ready[first] = np.maximum(ready[first], ready[first + 1])
    takes[first] |= takes[first + 1]
    gives[first + 1] |= gives[first]
    message = takes
    message[1:] |= gives[:-1] & (work.rank[1:] == work.rank[:-1])
    return ready, backward, message


def _reducing(trace: Trace, gaps: _Gaps) -> Times:
    """How much of every gap the rank spends reducing gradients."""
    spent = np.zeros_like(gaps.length)
    reductions = _select(trace, trace.kind == Activity.REDUCE)
    for rank, rows in _occupied(reductions).items():
        start, end = reductions.start[rows], np.maximum.accumulate(reductions.end[rows])
        start = np.maximum(start, np.concatenate([start[:1], end[:-1]]))
        edges = np.stack([start, np.maximum(start, end)], axis=1).ravel()
        done = np.repeat(np.cumsum(np.maximum(end - start, 0)), 2)
        done[0::2] -= np.maximum(end - start, 0)
        mine = np.flatnonzero(gaps.rank == rank)
        until = np.interp(gaps.start[mine] + gaps.length[mine], edges, done)
        spent[mine] = until - np.interp(gaps.start[mine], edges, done)
    return spent


def _charge_imbalance(idle: dict[str, Times], owed: Times) -> None:
    """Move `owed`, a time a rank, from the other causes to imbalance."""
    for cause in _YIELDS_TO_IMBALANCE:
        moved = np.minimum(idle[cause], owed)
        idle[cause] = idle[cause] - moved
        idle["imbalance"] = idle["imbalance"] + moved
        owed = owed - moved


def _is_work(trace: Trace) -> npt.NDArray[np.bool_]:
    return np.isin(trace.kind, _BUSY)


def _not_message(trace: Trace) -> npt.NDArray[np.bool_]:
    return np.isin(trace.kind, _MESSAGES, invert=True)


def _select(trace: Trace, mask: npt.NDArray[np.bool_]) -> Trace:
    return trace if mask.all() else trace.select(mask)


def _occupied(trace: Trace) -> dict[int, slice]:
    """Rank → its rows, for the ranks that have any."""
    return {rank: rows for rank, rows in enumerate(trace.rank_slices()) if rows.stop > rows.start}


def _sum_by(rank: npt.NDArray[np.int32], time: Times, ranks: int) -> Times:
    """Sums of `time` per rank, in its own type (bincount would turn integers into floats)."""
    total = np.zeros(ranks, time.dtype)
    np.add.at(total, rank, time)
    return total
