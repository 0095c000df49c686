"""Steps as JSON for the report page's script: columns to read as typed arrays, bars, and curves of memory."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.show.analysis import StepAnalysis
from penstock.show.blocks import lighter, second_of_pair, several_stages
from penstock.show.palette import BUSY, CAUSES, KINDS
from penstock.show.units import Unit, finite
from penstock.trace.bubbles import Bubbles, idle_spans
from penstock.trace.events import Activity, Trace
from penstock.trace.memory_curve import memory_curve

MAX_CURVES = 12
MESSAGES = (Activity.SEND, Activity.RECV, Activity.REDUCE)


def step_data(step: StepAnalysis, unit: Unit) -> dict[str, Any]:
    """Return one step as JSON can hold it; every column is base64 of its little-endian bytes, with its type."""
    trace = step.trace
    planned = step.plan.trace if step.plan is not None and step.measured else None
    return {
        "label": step.label,
        "ranks": trace.ranks,
        "blocks": _blocks(trace, unit),
        "planned": None if planned is None else _blocks(planned, unit),
        "gaps": _gaps(trace, unit),
        "bars": _bars(step.bubbles, unit),
        "memory": _memory(step, planned, unit),
    }


def _blocks(trace: Trace, unit: Unit) -> dict[str, Any]:
    origin = _origin(trace)
    return {
        "start": _column((trace.start - origin) * unit.scale, "<f8"),
        "end": _column((trace.end - origin) * unit.scale, "<f8"),
        "rank": _column(trace.rank, "<i4"),
        "stage": _column(trace.stage, "<i4"),
        "microbatch": _column(trace.microbatch, "<i4"),
        "kind": _column(trace.kind, "u1"),
        "shade": _column(lighter(trace), "u1"),
        "half": _column(trace.paired + 2 * second_of_pair(trace), "u1"),
        "held": None if trace.held is None else _column(trace.held, "<f8"),
        "several": several_stages(trace),
        "strip": bool(np.isin(trace.kind, MESSAGES).any()),
    }


def _origin(trace: Trace) -> float:
    return float(trace.start.min()) if len(trace) else 0.0


def _gaps(trace: Trace, unit: Unit) -> dict[str, Any]:
    spans, origin = idle_spans(trace), _origin(trace)
    return {
        "start": _column((spans.start - origin) * unit.scale, "<f8"),
        "end": _column((spans.end - origin) * unit.scale, "<f8"),
        "rank": _column(spans.rank, "<i4"),
        # As in the bars, where computing comes first.
        "cause": _column(spans.cause + 1, "u1"),
    }


def _bars(bubbles: Bubbles, unit: Unit) -> dict[str, Any]:
    """Return stacked bars, rank by rank: their ends, ranks, shares of the makespan, and causes (0 is computing)."""
    times = np.stack([bubbles.busy, *(bubbles.idle[cause] for cause in CAUSES)], axis=1).astype(np.float64)
    right = np.cumsum(times, axis=1)
    rank, cause = np.nonzero(times > 0)
    makespan = float(bubbles.makespan) or 1.0
    return {
        "left": ((right - times)[rank, cause] * unit.scale).tolist(),
        "right": (right[rank, cause] * unit.scale).tolist(),
        "rank": rank.tolist(),
        "share": (times[rank, cause] / makespan).tolist(),
        "cause": cause.tolist(),
    }


def _memory(step: StepAnalysis, planned: Trace | None, unit: Unit) -> dict[str, Any] | None:
    """Return steps of the ranks' memory, and its limit; of very many ranks, the one that holds most and some others."""
    trace = step.trace
    if step.peaks is None:
        return None
    ranks = list(range(trace.ranks))
    if trace.ranks > MAX_CURVES:
        spread = np.linspace(0, trace.ranks - 1, MAX_CURVES - 1).round().astype(int).tolist()
        ranks = sorted({int(step.peaks.argmax()), *spread})
    return {
        "unit": str(trace.info.get("held", "bytes")),
        "ranks": ranks,
        "measured": _curves(trace, ranks, unit),
        "planned": [] if planned is None else _curves(planned, ranks, unit),
        "limit": finite(trace.info.get("limit")),
    }


def _curves(trace: Trace, ranks: list[int], unit: Unit) -> list[dict[str, Any]]:
    origin = _origin(trace)
    finish = float(trace.end.max(initial=0)) - origin
    curves = []
    for rank in ranks:
        curve = memory_curve(trace, rank)
        # Two points per change, or a line would lead from one to the next.
        time = np.repeat(np.concatenate([[0.0], curve.time - origin, [finish]]), 2)[1:-1] * unit.scale
        held = np.repeat(np.concatenate([[0], curve.held]), 2)
        curves.append({"x": _column(time, "<f8"), "y": _column(held, "<f8")})
    return curves


def _column(values: npt.NDArray[Any], kind: str) -> dict[str, str]:
    return {"type": kind[-2:], "data": b64encode(np.ascontiguousarray(values, kind).tobytes()).decode()}


def styles() -> dict[str, Any]:
    """Return every colour, name and letter that the script needs."""
    return {
        "kinds": [
            {"full": kind.full, "light": kind.light, "meaning": kind.meaning, "letter": kind.letter}
            for kind in KINDS.values()
        ],
        "causes": [
            {"colour": BUSY, "meaning": "computing"},
            *({"colour": cause.colour, "meaning": cause.meaning} for cause in CAUSES.values()),
        ],
        "messages": list(MESSAGES),
    }
