"""Busy and idle time of the ranks, with the causes of idle time.

Simulated and measured traces are treated alike, from the events alone. A rank is busy while it computes or runs the
optimizer. All other time between the step's first start and its last end has one cause:

    warm_up        waits up to the rank's first backward: the pipeline fills
    cool_down      waits after the rank's last forward, and the time after its last op: the pipeline drains
    activation     waits in the steady state until another stage has computed the activation
    gradient       waits in the steady state until another stage has computed the gradient
    communication  the input has been computed, and a message, a gather of weights or a reduction is in progress
    overhead       the input is there and no message is due (never in a simulation)
    imbalance      work that the busiest rank has beyond this one's, which no order can fill; subtracted from the other
                   causes, waits of the steady state first

The causes of a rank add up to makespan minus busy: exactly for integer times, to rounding for seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.trace.events import COLLECTIVES, Activity, Trace

_WAITS = ("warm_up", "cool_down", "activation", "gradient")
CAUSES = (*_WAITS, "communication", "overhead", "imbalance")
# Order matters: imbalance is taken first from the waits that it causes, last from what it hardly explains.
_YIELDS_TO_IMBALANCE = ("activation", "gradient", "cool_down", "warm_up", "communication", "overhead")
_BUSY = (Activity.F, Activity.B, Activity.I, Activity.W, Activity.R, Activity.OPTIMIZER)
_NOT_MESSAGES = (*_BUSY, *COLLECTIVES)
Times = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Bubbles:
    """Busy and idle time of every rank, in the trace's unit of time."""

    makespan: Any  # last end minus first start, over all ranks
    busy: Times  # computing time, shape (ranks,)
    idle: Mapping[str, Times]  # cause (each of `CAUSES`) → idle time, shape (ranks,)

    @property
    def causes(self) -> list[str]:
        """Causes with more time on some rank than rounding explains."""
        return [cause for cause, time in self.idle.items() if (time > 1e-9 * self.makespan).any()]


def makespan(trace: Trace) -> Any:
    """Return last end minus first start, without messages; 0 for a trace without events."""
    real = trace.only(_NOT_MESSAGES)
    return real.end.max() - real.start.min() if len(real) else 0


def longest(trace: Trace) -> Any:
    """Return the largest time from a rank's first start to its last end, the cost of the zero-bubble paper (2401.10241)."""
    real = trace.only(_NOT_MESSAGES)
    spans = [real.end[rows].max() - real.start[rows].min() for rows in _occupied(real).values()]
    return max(spans, default=0)


def busy(trace: Trace) -> Times:
    """Return the computing time of every rank, shape (ranks,); overlapping ops count once."""
    work = trace.only(_BUSY)
    total = np.zeros(trace.ranks, (trace.end[:0] - trace.start[:0]).dtype)
    for rank, rows in _occupied(work).items():
        start, end = work.start[rows], np.maximum.accumulate(work.end[rows])
        total[rank] = (end - np.maximum(start, np.concatenate([start[:1], end[:-1]]))).clip(0).sum()
    return total


def bubble_fraction(trace: Trace) -> float:
    """Return the idle share of ranks × makespan, between 0 and 1; 0 for a trace without events.

    Ranks without any event are not counted, so that a process with a part of the ranks gets the share of its part.
    """
    total = float(makespan(trace)) * len(_occupied(trace))
    return 1.0 - float(busy(trace).sum()) / total if total > 0 else 0.0


def bubbles(trace: Trace) -> Bubbles:
    """Split every rank's idle time by cause."""
    real = trace.only(_NOT_MESSAGES)
    if not len(real):
        zero = _zero(trace)
        return Bubbles(0, zero, {cause: zero.copy() for cause in CAUSES})
    begin, finish = real.start.min(), real.end.max()
    idle = _idle(trace, begin, finish)
    spent = (finish - begin) - sum(idle.values())
    for cause, moved in _imbalance(idle).items():
        idle[cause] = idle[cause] - moved
        idle["imbalance"] = idle["imbalance"] + moved
    return Bubbles(finish - begin, spent, idle)


class IdleSpans(NamedTuple):
    """Idle spans of ranks, as columns of equal length."""

    rank: npt.NDArray[np.int32]
    # Times in the trace's unit.
    start: Times
    end: Times
    cause: npt.NDArray[np.int8]  # index in `CAUSES`


def idle_spans(trace: Trace) -> IdleSpans:
    """Return the idle spans of every rank: in each gap first the wait for input to be computed, then the rest.

    The spans of a rank and cause add up to the time that `bubbles` gives. Imbalance has no place in time of its own, so it
    takes the last part of every span of the causes that it is subtracted from, all of one cause in the same proportion.
    """
    real = trace.only(_NOT_MESSAGES)
    none = real.start[:0]
    spans = [IdleSpans(np.zeros(0, np.int32), none, none, np.zeros(0, np.int8))]
    if not len(real):
        return spans[0]
    begin, finish = real.start.min(), real.end.max()
    idle = _idle(trace, begin, finish)
    moved = _imbalance(idle)
    imbalance = CAUSES.index("imbalance")
    for rank, gaps in enumerate(_gaps_of_ranks(trace, begin, finish)):
        shares = np.array([_share(moved, idle, cause, rank) for cause in CAUSES])
        until, finished = gaps.start + gaps.waited, gaps.start + gaps.length
        rest = np.where(gaps.communicates, CAUSES.index("communication"), CAUSES.index("overhead"))
        for start, end, cause in ((gaps.start, until, gaps.cause), (until, finished, rest)):
            share = shares[cause]
            # Whole spans keep their times exactly.
            middle = np.where(share == 0, end, np.where(share == 1, start, end - share * (end - start)))
            parts = ((start, middle, cause), (middle, end, np.full(len(start), imbalance)))
            for first, last, reason in parts:
                positive = last > first
                ranks = np.full(int(positive.sum()), rank, np.int32)
                spans.append(
                    IdleSpans(ranks, first[positive], last[positive], reason[positive].astype(np.int8))
                )
    return IdleSpans(*(np.concatenate(columns) for columns in zip(*spans, strict=True)))


def _zero(trace: Trace) -> Times:
    return np.zeros(trace.ranks, (trace.end[:0] - trace.start[:0]).dtype)


def _share(part: Mapping[str, Times], total: Mapping[str, Times], cause: str, rank: int) -> float:
    return float(part[cause][rank] / total[cause][rank]) if cause in part and total[cause][rank] > 0 else 0.0


def _idle(trace: Trace, begin: Any, finish: Any) -> dict[str, Times]:
    """Return every rank's idle time by cause, before imbalance is subtracted."""
    zero = _zero(trace)
    idle = {cause: zero.copy() for cause in CAUSES}
    for rank, gaps in enumerate(_gaps_of_ranks(trace, begin, finish)):
        for number, cause in enumerate(_WAITS):
            idle[cause][rank] = gaps.waited[gaps.cause == number].sum()
        rest = gaps.length - gaps.waited
        idle["communication"][rank] = rest[gaps.communicates].sum()
        idle["overhead"][rank] = rest[~gaps.communicates].sum()
    return idle


def _imbalance(idle: Mapping[str, Times]) -> dict[str, Times]:
    """Return by cause how much of a rank's idle time is imbalance: what the busiest rank computes more than this one."""
    total = sum(idle.values())
    # The busiest rank idles least; the time by which a rank idles longer is work that it does not have.
    owed = total - np.min(total)
    moved = {}
    for cause in _YIELDS_TO_IMBALANCE:
        moved[cause] = np.minimum(idle[cause], owed)
        owed = owed - moved[cause]
    return moved


class _Outputs(NamedTuple):
    """Ends of all forwards and backwards, and their ranks.

    Flat tables by stage · microbatches + microbatch, with the step's end and -1 for ops that the trace lacks.
    """

    stages: int
    microbatches: int
    forward: Times
    backward: Times
    rank: npt.NDArray[np.int32]

    def cells(self, work: Trace) -> npt.NDArray[np.int64]:
        """Return the index of every event in the tables."""
        return work.stage.astype(np.int64) * self.microbatches + work.microbatch


def _outputs(work: Trace, finish: Any) -> _Outputs:
    stages, microbatches = int(work.stage.max(initial=-1)) + 1, int(work.microbatch.max(initial=-1)) + 1
    size = stages * microbatches
    forward, backward = np.full(size, finish, work.end.dtype), np.full(size, finish, work.end.dtype)
    outputs = _Outputs(stages, microbatches, forward, backward, np.full(size, -1, np.int32))
    for rank, rows in _occupied(work).items():
        local = work.select(rows)
        cell = outputs.cells(local)
        for table, mask in (
            (outputs.forward, local.kind == Activity.F),
            (outputs.backward, _is_backward(local.kind)),
        ):
            where = cell[mask]
            table[where] = local.end[mask]
            outputs.rank[where] = rank
    return outputs


class _Gaps(NamedTuple):
    """Spans in which a rank does not compute; columns of equal length.

    `waited` is the length of the first part, until the input of the next op had been computed, and `cause` the index in
    _WAITS of that part. `communicates` is True if a message or a collective can explain the rest.
    """

    start: Times
    length: Times
    waited: Times
    cause: npt.NDArray[np.int8]
    communicates: npt.NDArray[np.bool_]


def _gaps_of_ranks(trace: Trace, begin: Any, finish: Any) -> Iterator[_Gaps]:
    """Yield the gaps of every rank, one rank at a time to bound the working memory."""
    work, collectives = trace.only(_BUSY), trace.only(COLLECTIVES)
    outputs = _outputs(work, finish)
    for rank, (rows, own) in enumerate(zip(work.rank_slices(), collectives.rank_slices(), strict=True)):
        local = work.select(rows)
        gaps = _gaps(local, rank, outputs, begin, finish)
        reduced = _reduced(collectives.select(own), gaps)
        # No op's input ends the wait of a gap at the end, but the reductions do.
        ends = np.append(local.kind == Activity.OPTIMIZER, True)
        yield gaps._replace(
            waited=np.where(ends, np.minimum(gaps.waited, gaps.length - reduced), gaps.waited),
            communicates=gaps.communicates | (reduced > 0),
        )


def _gaps(work: Trace, rank: int, outputs: _Outputs, begin: Any, finish: Any) -> _Gaps:
    """Return the gaps of one rank with events `work`: one before every event, and one after the last."""
    ends = np.maximum.accumulate(np.concatenate([[begin], work.end]).astype(work.end.dtype))
    length = np.maximum(np.append(work.start, finish) - ends, 0)
    ready, gradient, message = _needs(work, rank, outputs, begin, finish)
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
    work: Trace, rank: int, outputs: _Outputs, begin: Any, finish: Any
) -> tuple[Times, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return when the input of every event had been computed, whether it is a gradient, and whether a message is due.

    A message is due if the event receives from another rank, or the op before it sends to one. Events without input get
    `begin`; the optimizer, which waits for everything, gets `finish`.
    """
    ready = np.full(len(work), begin, work.end.dtype)
    ready[work.kind == Activity.OPTIMIZER] = finish
    receives = np.zeros(len(work), np.bool_)
    sends = np.zeros(len(work), np.bool_)
    backward = _is_backward(work.kind)
    cell = outputs.cells(work)
    for mask, end, step in ((work.kind == Activity.F, outputs.forward, -1), (backward, outputs.backward, 1)):
        producer, consumer = work.stage + step, work.stage - step
        rows = np.flatnonzero(mask & (producer >= 0) & (producer < outputs.stages))
        source = cell[rows] + step * outputs.microbatches
        ready[rows] = end[source]
        receives[rows] = outputs.rank[source] != rank
        rows = np.flatnonzero(mask & (consumer >= 0) & (consumer < outputs.stages))
        sends[rows] = outputs.rank[cell[rows] - step * outputs.microbatches] != rank
    first = np.flatnonzero(work.paired)
    backward[first] = ready[first + 1] > ready[first]
    ready[first] = np.maximum(ready[first], ready[first + 1])
    receives[first] |= receives[first + 1]
    sends[first + 1] |= sends[first]
    receives[1:] |= sends[:-1]
    return ready, backward, receives


def _reduced(collectives: Trace, gaps: _Gaps) -> Times:
    """Return the time of every gap that the rank spends gathering weights or reducing gradients."""
    if not len(collectives):
        return np.zeros_like(gaps.length)
    end = np.maximum.accumulate(collectives.end)
    start = np.maximum(collectives.start, np.concatenate([collectives.start[:1], end[:-1]]))
    spent = np.maximum(end - start, 0)
    edges = np.stack([start, start + spent], axis=1).ravel()
    done = np.stack([np.cumsum(spent) - spent, np.cumsum(spent)], axis=1).ravel()
    reduced = np.interp(gaps.start + gaps.length, edges, done) - np.interp(gaps.start, edges, done)
    return np.asarray(reduced, gaps.length.dtype)


def _is_backward(kind: npt.NDArray[np.int8]) -> npt.NDArray[np.bool_]:
    return np.asarray((kind == Activity.B) | (kind == Activity.I))


def _occupied(trace: Trace) -> dict[int, slice]:
    """Return rank → its rows, for the ranks that have any."""
    return {rank: rows for rank, rows in enumerate(trace.rank_slices()) if rows.stop > rows.start}
