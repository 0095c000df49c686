"""Steps as JSON for the report page's script: columns to read as typed arrays, bars, and curves of memory."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.show.analysis import StepAnalysis
from penstock.show.blocks import lighter, second_of_pair, several_stages
from penstock.show.palette import BUSY, CAUSES, KINDS
from penstock.show.units import Unit, finite, is_measured
from penstock.trace.bubbles import idle_spans
from penstock.trace.events import COLLECTIVES, Activity, Trace
from penstock.trace.join import merged_halves
from penstock.trace.messages import memory_curve

MAX_CURVES = 12
MESSAGES = (Activity.SEND, Activity.RECV, *COLLECTIVES)
MERGED = {
    int(Activity.I): "whole backward (I and W in one)",
    int(Activity.W): "weight gradient (computed with its I)",
}
"""Names of the halves of a merged backward, by their kind."""


def step_data(step: StepAnalysis, unit: Unit) -> dict[str, Any]:
    """Return one step as JSON can hold it; every column is base64 of its little-endian bytes, with its type."""
    trace = step.trace
    planned = step.plan.trace if step.plan is not None and step.measured else None
    return {
        "label": step.label,
        "ranks": trace.ranks,
        "blocks": _blocks(trace, unit),
        "planned": None if planned is None else _blocks(planned, unit),
        "gaps": _gaps(step, unit),
        "bars": _bars(step, unit),
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
        "merged": _column(np.flatnonzero(merged_halves(trace)) if is_measured(trace) else np.zeros(0), "<i4"),
    }


def _origin(trace: Trace) -> float:
    return float(trace.start.min()) if len(trace) else 0.0


def _gaps(step: StepAnalysis, unit: Unit) -> dict[str, Any]:
    """Return the idle spans of the ranks that have events: nothing is known of ranks without."""
    spans, origin = idle_spans(step.trace), _origin(step.trace)
    known = np.isin(spans.rank, step.ranks)
    return {
        "start": _column((spans.start[known] - origin) * unit.scale, "<f8"),
        "end": _column((spans.end[known] - origin) * unit.scale, "<f8"),
        "rank": _column(spans.rank[known], "<i4"),
        # As in the bars, where computing comes first.
        "cause": _column(spans.cause[known] + 1, "u1"),
    }


def _bars(step: StepAnalysis, unit: Unit) -> dict[str, Any]:
    """Return stacked bars, rank by rank: their ends, ranks, shares of the makespan, and causes (0 is computing)."""
    bubbles = step.bubbles
    times = np.stack([bubbles.busy, *(bubbles.idle[cause] for cause in CAUSES)], axis=1).astype(np.float64)
    times[[rank for rank in range(len(times)) if rank not in set(step.ranks)]] = 0
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
    """Return steps of the ranks' memory, and its limit; of very many ranks, the one that holds most and a few more.

    None where nothing is known to be held, as by stages that are compiled.
    """
    trace = step.trace
    if step.peaks is None or not step.peaks.any():
        return None
    ranks = drawn_ranks(step)
    return {
        "unit": str(trace.info.get("held", "bytes")),
        "ranks": ranks,
        "measured": _curves(trace, ranks, unit),
        "planned": [] if planned is None else _curves(planned, ranks, unit),
        "limit": finite(trace.info.get("limit")),
    }


def drawn_ranks(step: StepAnalysis) -> list[int]:
    """Return the ranks whose memory is drawn: all, or the one that holds most and a few more; `peaks` must be known."""
    ranks = step.trace.ranks
    if ranks <= MAX_CURVES:
        return list(range(ranks))
    assert step.peaks is not None, "the trace has memory"
    spread = np.linspace(0, ranks - 1, MAX_CURVES - 1).round().astype(int).tolist()
    return sorted({int(step.peaks.argmax()), *spread})


def _curves(trace: Trace, ranks: list[int], unit: Unit) -> list[dict[str, Any]]:
    """Return what ranks hold from each time on, until the next; the last time is the end of the step."""
    origin = _origin(trace)
    finish = float(trace.end.max(initial=0)) - origin
    curves = []
    for rank in ranks:
        curve = memory_curve(trace, rank)
        # Ops of a pair, or clocks that disagree, may change it in another order than they are listed.
        time = np.maximum.accumulate(np.concatenate([[0.0], curve.time - origin, [finish]])) * unit.scale
        held = np.concatenate([[0], curve.held, curve.held[-1:] if len(curve.held) else [0]])
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
        "merged": MERGED,
    }
