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

_WAITS = ("warm_up", "cool_down", "activation", "gradient")
CAUSES = (*_WAITS, "communication", "overhead", "imbalance")
_YIELDS_TO_IMBALANCE = ("activation", "gradient", "cool_down", "warm_up", "communication", "overhead")
_BUSY = (Activity.F, Activity.B, Activity.I, Activity.W, Activity.R, Activity.OPTIMIZER)
_NOT_MESSAGES = (*_BUSY, Activity.REDUCE)
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

    @property
    def causes(self) -> list[str]:
        """Those that any rank has, beyond what is rounding."""
        return [cause for cause, time in self.idle.items() if (time > 1e-9 * self.makespan).any()]


def makespan(trace: Trace) -> Any:
    """The last end minus the first start, messages aside; 0 for a trace without events."""
    real = trace.only(_NOT_MESSAGES)
    return real.end.max() - real.start.min() if len(real) else 0


def longest(trace: Trace) -> Any:
    """The largest time from a rank's first start to its last end: the zero-bubble paper's cost (2401.10241)."""
    real = trace.only(_NOT_MESSAGES)
    spans = [real.end[rows].max() - real.start[rows].min() for rows in _occupied(real).values()]
    return max(spans, default=0)


def busy(trace: Trace) -> Times:
    """How long every rank computes, shape (ranks,); ops at the same time count once."""
    work = trace.only(_BUSY)
    total = np.zeros(trace.ranks, (trace.end[:0] - trace.start[:0]).dtype)
    for rank, rows in _occupied(work).items():
        start, end = work.start[rows], np.maximum.accumulate(work.end[rows])
        total[rank] = (end - np.maximum(start, np.concatenate([start[:1], end[:-1]]))).clip(0).sum()
    return total


def bubble_fraction(trace: Trace) -> float:
    """The idle share of ranks × makespan, between 0 and 1; 0 for a trace without events.

    Ranks without any event are not counted: a process that saw only its own ranks says how idle these were.
    """
    whole = float(makespan(trace)) * len(_occupied(trace))
    return 1.0 - float(busy(trace).sum()) / whole if whole > 0 else 0.0


def bubbles(trace: Trace) -> Bubbles:
    """Split every rank's idle time by cause."""
    real = trace.only(_NOT_MESSAGES)
    zero = np.zeros(trace.ranks, (trace.end[:0] - trace.start[:0]).dtype)
    idle = {cause: zero.copy() for cause in CAUSES}
    if not len(real):
        return Bubbles(0, zero, idle)
    begin, finish = real.start.min(), real.end.max()
    work, reductions = trace.only(_BUSY), trace.only([Activity.REDUCE])
    givers = _givers(work, finish)
    # Rank by rank, so that what is worked with stays small whatever the trace.
    for rank, (rows, reducing) in enumerate(zip(work.rank_slices(), reductions.rank_slices(), strict=True)):
        gaps = _gaps(work.select(rows), rank, givers, begin, finish)
        reduced = _reduced(reductions.select(reducing), gaps)
        waited = np.minimum(gaps.waited, gaps.length - reduced)
        message = gaps.message | (reduced > 0)
        for number, cause in enumerate(_WAITS):
            idle[cause][rank] = waited[gaps.cause == number].sum()
        rest = gaps.length - waited
        idle["communication"][rank] = rest[message].sum()
        idle["overhead"][rank] = rest[~message].sum()
    spent = (finish - begin) - sum(idle.values())
    _charge_imbalance(idle, spent.max() - spent)
    return Bubbles(finish - begin, spent, idle)


class IdleSpans(NamedTuple):
    """The stretches in which ranks are idle, as columns of equal length.

    Attributes:
        rank: int32.
        start, end: in the trace's unit of time.
        cause: int8, the place in `CAUSES`; never imbalance, which has no place in time.
    """

    rank: npt.NDArray[np.int32]
    start: Times
    end: Times
    cause: npt.NDArray[np.int8]


def idle_spans(trace: Trace) -> IdleSpans:
    """When every rank was idle, and why: in each gap first the wait for what was not computed yet, then the rest."""
    real = trace.only(_NOT_MESSAGES)
    none = real.start[:0]
    found = [IdleSpans(np.zeros(0, np.int32), none, none, np.zeros(0, np.int8))]
    if not len(real):
        return found[0]
    begin, finish = real.start.min(), real.end.max()
    work, reductions = trace.only(_BUSY), trace.only([Activity.REDUCE])
    givers = _givers(work, finish)
    for rank, (rows, reducing) in enumerate(zip(work.rank_slices(), reductions.rank_slices(), strict=True)):
        gaps = _gaps(work.select(rows), rank, givers, begin, finish)
        reduced = _reduced(reductions.select(reducing), gaps)
        until = gaps.start + np.minimum(gaps.waited, gaps.length - reduced)
        rest = np.where(gaps.message | (reduced > 0), CAUSES.index("communication"), CAUSES.index("overhead"))
        for start, end, cause in ((gaps.start, until, gaps.cause), (until, gaps.start + gaps.length, rest)):
            there = end > start
            ranks = np.full(int(there.sum()), rank, np.int32)
            found.append(IdleSpans(ranks, start[there], end[there], cause[there].astype(np.int8)))
    return IdleSpans(*(np.concatenate(columns) for columns in zip(*found, strict=True)))


class _Givers(NamedTuple):
    """Who computed what: when it was there, for forwards and backwards, and on which rank.

    Flat tables by stage · microbatches + microbatch; the step's end, and -1, where the trace does not say.
    """

    stages: int
    microbatches: int
    forward: Times
    backward: Times
    rank: npt.NDArray[np.int32]

    def cells(self, work: Trace) -> npt.NDArray[np.int64]:
        """The place of every event in the tables."""
        return work.stage.astype(np.int64) * self.microbatches + work.microbatch


def _givers(work: Trace, finish: Any) -> _Givers:
    stages, microbatches = int(work.stage.max(initial=-1)) + 1, int(work.microbatch.max(initial=-1)) + 1
    size = stages * microbatches
    forward, backward = np.full(size, finish, work.end.dtype), np.full(size, finish, work.end.dtype)
    givers = _Givers(stages, microbatches, forward, backward, np.full(size, -1, np.int32))
    for rank, rows in _occupied(work).items():
        mine = work.select(rows)
        cell = givers.cells(mine)
        for table, mask in (
            (givers.forward, mine.kind == Activity.F),
            (givers.backward, _is_backward(mine.kind)),
        ):
            where = cell[mask]
            table[where] = mine.end[mask]
            givers.rank[where] = rank
    return givers


class _Gaps(NamedTuple):
    """Every stretch in which a rank does not compute; columns of equal length.

    `waited` is its first part, until what the next op needs had been computed, and `cause` the place in _WAITS that this
    part belongs to. `message` says whether the rest can be a message's doing.
    """

    start: Times
    length: Times
    waited: Times
    cause: npt.NDArray[np.int8]
    message: npt.NDArray[np.bool_]


def _gaps(work: Trace, rank: int, givers: _Givers, begin: Any, finish: Any) -> _Gaps:
    """The gaps of one rank, whose events `work` has: one before every event, and one after the last."""
    ends = np.maximum.accumulate(np.concatenate([[begin], work.end]).astype(work.end.dtype))
    length = np.maximum(np.append(work.start, finish) - ends, 0)
    ready, gradient, message = _needs(work, rank, givers, begin, finish)
    cause = np.where(gradient, _WAITS.index("gradient"), _WAITS.index("activation")).astype(np.int8)
    forward, backward = np.flatnonzero(work.kind == Activity.F), np.flatnonzero(_is_backward(work.kind))
    if len(forward):
        cause[forward[-1] + 1 :] = _WAITS.index("cool_down")
    cause[: backward[0] + 1 if len(backward) else 1] = _WAITS.index("warm_up")
    return _Gaps(
        ends,
        length,
        np.append(np.clip(ready - ends[:-1], 0, length[:-1]), length[-1]),
        np.append(cause, np.int8(_WAITS.index("cool_down"))),
        np.append(message, False),
    )


def _needs(
    work: Trace, rank: int, givers: _Givers, begin: Any, finish: Any
) -> tuple[Times, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """For every event of a rank: when what it takes had been computed, whether that is a gradient, and whether a
    message is due around it (it takes from another rank, or the op before it gives to one).

    `begin` if it takes nothing; `finish` for the optimizer, which waits for everything.
    """
    ready = np.full(len(work), begin, work.end.dtype)
    ready[work.kind == Activity.OPTIMIZER] = finish
    takes = np.zeros(len(work), np.bool_)
    gives = np.zeros(len(work), np.bool_)
    backward = _is_backward(work.kind)
    cell = givers.cells(work)
    for mask, end, step in ((work.kind == Activity.F, givers.forward, -1), (backward, givers.backward, 1)):
        giver, taker = work.stage + step, work.stage - step
        rows = np.flatnonzero(mask & (giver >= 0) & (giver < givers.stages))
        given = cell[rows] + step * givers.microbatches
        ready[rows] = end[given]
        takes[rows] = givers.rank[given] != rank
        rows = np.flatnonzero(mask & (taker >= 0) & (taker < givers.stages))
        gives[rows] = givers.rank[cell[rows] - step * givers.microbatches] != rank
    first = np.flatnonzero(work.paired)
    backward[first] = ready[first + 1] > ready[first]
    ready[first] = np.maximum(ready[first], ready[first + 1])
    takes[first] |= takes[first + 1]
    gives[first + 1] |= gives[first]
    takes[1:] |= gives[:-1]
    return ready, backward, takes


def _reduced(reductions: Trace, gaps: _Gaps) -> Times:
    """How much of every gap the rank spends reducing gradients."""
    if not len(reductions):
        return np.zeros_like(gaps.length)
    end = np.maximum.accumulate(reductions.end)
    start = np.maximum(reductions.start, np.concatenate([reductions.start[:1], end[:-1]]))
    spent = np.maximum(end - start, 0)
    edges = np.stack([start, start + spent], axis=1).ravel()
    done = np.stack([np.cumsum(spent) - spent, np.cumsum(spent)], axis=1).ravel()
    reduced = np.interp(gaps.start + gaps.length, edges, done) - np.interp(gaps.start, edges, done)
    return np.asarray(reduced, gaps.length.dtype)


def _charge_imbalance(idle: dict[str, Times], owed: Times) -> None:
    """Move `owed`, a time a rank, from the other causes to imbalance."""
    for cause in _YIELDS_TO_IMBALANCE:
        moved = np.minimum(idle[cause], owed)
        idle[cause] = idle[cause] - moved
        idle["imbalance"] = idle["imbalance"] + moved
        owed = owed - moved


def _is_backward(kind: npt.NDArray[np.int8]) -> npt.NDArray[np.bool_]:
    return np.asarray((kind == Activity.B) | (kind == Activity.I))


def _occupied(trace: Trace) -> dict[int, slice]:
    """Rank → its rows, for the ranks that have any."""
    return {rank: rows for rank, rows in enumerate(trace.rank_slices()) if rows.stop > rows.start}
