"""A trace as what the report page draws: columns that its script reads as typed arrays, and the curves beside them."""

from __future__ import annotations

import sys
from base64 import b64encode
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.errors import PenstockError
from penstock.show.advice import Advice, advise, where_it_went
from penstock.show.colours import BUSY, CAUSES, KINDS
from penstock.show.planned import PlannedStep, plan
from penstock.trace.bubbles import CAUSES as ALL_CAUSES
from penstock.trace.bubbles import Bubbles, bubbles, idle_spans
from penstock.trace.events import Activity, Trace
from penstock.trace.memory_curve import memory_curve, peaks

MOST_CURVES = 12
MESSAGES = (Activity.SEND, Activity.RECV, Activity.REDUCE)


class Unit(NamedTuple):
    """What times are shown in: the name, and how many of it the trace's unit has."""

    name: str
    each: float


class PageStep(NamedTuple):
    """All that the page says of one trace.

    Attributes:
        label: what it is called in the selector.
        trace: as given.
        split: where its ranks' time went.
        plan: the same step from its own usual costs; None if that cannot be said, and `unplanned` says why.
        advice: None without a plan.
        where: where the time went, a sentence.
    """

    label: str
    trace: Trace
    split: Bubbles
    plan: PlannedStep | None
    unplanned: str
    advice: Advice | None
    where: str


def look_at(label: str, trace: Trace) -> PageStep:
    """Find out what there is to say of a trace."""
    found, unplanned = None, ""
    try:
        found = plan(trace)
    except PenstockError as error:
        unplanned = str(error)
    advice = None if found is None else advise(trace, found)
    return PageStep(label, trace, bubbles(trace), found, unplanned, advice, where_it_went(trace))


def unit_of(traces: list[Trace]) -> Unit:
    """The unit in which the longest of the traces is between 1 and 1000, for seconds; simulated ticks stay as they are."""
    if not any(trace.info.get("source") == "measured" for trace in traces):
        return Unit("", 1.0)
    longest = max((float(trace.end.max(initial=0)) for trace in traces), default=0.0)
    for name, each in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if longest * each >= 1.0:
            return Unit(name, each)
    return Unit("ns", 1e9)


def step_data(step: PageStep, unit: Unit) -> dict[str, Any]:
    """One step as JSON can hold it; every column is base64 of its little-endian bytes, with its type."""
    trace = step.trace
    planned = None if step.plan is None or trace.info.get("source") == "simulated" else step.plan.trace
    return {
        "label": step.label,
        "ranks": trace.ranks,
        "blocks": _blocks(trace, unit),
        "planned": None if planned is None else _blocks(planned, unit),
        "gaps": _gaps(trace, unit),
        "bars": _bars(step.split, unit),
        "memory": _memory(trace, planned, unit),
    }


def _blocks(trace: Trace, unit: Unit) -> dict[str, Any]:
    begin, end = _times(trace, unit)
    second = np.concatenate([[False], trace.paired[:-1]]) if len(trace) else np.zeros(0, np.bool_)
    return {
        "start": _column(begin, "<f8"),
        "end": _column(end, "<f8"),
        "rank": _column(trace.rank, "<i4"),
        "stage": _column(trace.stage, "<i4"),
        "microbatch": _column(trace.microbatch, "<i4"),
        "kind": _column(trace.kind, "u1"),
        "shade": _column(odd_chunk(trace), "u1"),
        "half": _column(trace.paired + 2 * second, "u1"),
        "held": None if trace.held is None else _column(trace.held, "<f8"),
        "several": bool(trace.ranks and _most_stages(trace) > 1),
        "strip": bool(np.isin(trace.kind, MESSAGES).any()),
    }


def _times(trace: Trace, unit: Unit) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    origin = _origin(trace)
    return (trace.start - origin) * unit.each, (trace.end - origin) * unit.each


def _origin(trace: Trace) -> float:
    return float(trace.start.min()) if len(trace) else 0.0


def odd_chunk(trace: Trace) -> npt.NDArray[np.bool_]:
    """Whether an event is of the second, fourth, ... of its rank's stages: drawn in the lighter shade."""
    odd = np.zeros(len(trace), np.bool_)
    for rows in trace.rank_slices():
        stages = np.unique(trace.stage[rows][trace.stage[rows] >= 0])
        if len(stages) > 1:
            odd[rows] = (np.searchsorted(stages, trace.stage[rows]) % 2 == 1) & (trace.stage[rows] >= 0)
    return odd


def _most_stages(trace: Trace) -> int:
    return max(len(np.unique(trace.stage[rows][trace.stage[rows] >= 0])) for rows in trace.rank_slices())


def _gaps(trace: Trace, unit: Unit) -> dict[str, Any]:
    spans, origin = idle_spans(trace), _origin(trace)
    return {
        "start": _column((spans.start - origin) * unit.each, "<f8"),
        "end": _column((spans.end - origin) * unit.each, "<f8"),
        "rank": _column(spans.rank, "<i4"),
        # As in the bars, where computing comes first.
        "what": _column(spans.cause + 1, "u1"),
    }


def _bars(split: Bubbles, unit: Unit) -> dict[str, Any]:
    """Stacked bars, a rank after the other: from where to where, whose, and what for (0 is busy)."""
    parts = np.stack([split.busy, *(split.idle[cause] for cause in ALL_CAUSES)], axis=1).astype(np.float64)
    right = np.cumsum(parts, axis=1)
    rank, what = np.nonzero(parts > 0)
    whole = float(split.makespan) or 1.0
    return {
        "left": ((right - parts)[rank, what] * unit.each).tolist(),
        "right": (right[rank, what] * unit.each).tolist(),
        "rank": rank.tolist(),
        "share": (parts[rank, what] / whole).tolist(),
        "what": what.tolist(),
    }


def _memory(trace: Trace, planned: Trace | None, unit: Unit) -> dict[str, Any] | None:
    """Steps of every rank's memory, and the limit."""
    if trace.held is None:
        return None
    ranks = drawn_ranks(trace)
    return {
        "unit": str(trace.info.get("held", "bytes")),
        "ranks": ranks,
        "measured": _curves(trace, ranks, unit),
        "planned": [] if planned is None else _curves(planned, ranks, unit),
        "limit": finite(trace.info.get("limit")),
    }


def drawn_ranks(trace: Trace) -> list[int]:
    """The ranks whose memory is drawn: all, or of many the one that ever holds most and others spread evenly."""
    if trace.ranks <= MOST_CURVES:
        return list(range(trace.ranks))
    spread = np.linspace(0, trace.ranks - 1, MOST_CURVES - 1).round().astype(int).tolist()
    return sorted({int(peaks(trace).argmax()), *spread})


def _curves(trace: Trace, ranks: list[int], unit: Unit) -> list[dict[str, Any]]:
    origin = _origin(trace)
    finish = float(trace.end.max(initial=0)) - origin
    found = []
    for rank in ranks:
        curve = memory_curve(trace, rank)
        # Two points a change, or a line would lead from one to the next.
        time = np.repeat(np.concatenate([[0.0], curve.time - origin, [finish]]), 2)[1:-1] * unit.each
        held = np.repeat(np.concatenate([[0], curve.held]), 2)
        found.append({"x": _column(time, "<f8"), "y": _column(held, "<f8")})
    return found


def _column(values: npt.NDArray[Any], kind: str) -> dict[str, str]:
    return {"type": kind[-2:], "data": b64encode(np.ascontiguousarray(values, kind).tobytes()).decode()}


def finite(value: object) -> float | None:
    """Return a value read from a file if it is a finite number, else None."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return value if abs(value) <= sys.float_info.max else None


def amount(trace: Trace, held: int) -> str:
    """What a rank holds, with its unit."""
    if trace.info.get("held", "bytes") != "bytes":
        return f"{held} activations"
    size = float(held)
    for name in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {name}"
        size /= 1024
    return f"{size:.4g} TiB"


def palette() -> dict[str, Any]:
    """Every colour, name and letter the script needs."""
    return {
        "kinds": [
            {"full": c.full, "light": c.light, "meaning": c.meaning, "letter": c.letter}
            for c in KINDS.values()
        ],
        "what": [
            {"colour": BUSY, "meaning": "computing"},
            *({"colour": CAUSES[c][0], "meaning": CAUSES[c][1]} for c in ALL_CAUSES),
        ],
    }
