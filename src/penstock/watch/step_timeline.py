"""A traced step as the watching page draws it: coloured blocks with labels, and what they add up to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from penstock.show.blocks import lighter, second_of_pair
from penstock.show.palette import KINDS, WITHOUT_MESSAGES
from penstock.show.units import unit_of
from penstock.trace.bubbles import bubble_fraction
from penstock.trace.events import Activity, Trace
from penstock.trace.folder import read_file, step_path

MAX_BLOCKS = 20_000
_HALF = 0.42  # of a row's height, above and below its middle


def step_timeline(run: Path, step: int) -> dict[str, Any]:
    """Return a traced step as JSON can hold it.

    Returns:
        ``step``, ``ranks``, ``schedule``, ``unit`` of times (ms, ...), ``makespan`` and ``idle`` as text, ``columns`` of the
        blocks, ``kinds`` (letter, meaning and colour of those in the step), and ``omitted``, the number of blocks beyond
        `MAX_BLOCKS`.

    Raises:
        DataError: if the trace cannot be read.
    """
    trace, _ = read_file(step_path(run, step))
    unit = unit_of([trace])
    origin = float(trace.start.min())
    rows = np.flatnonzero(np.isin(trace.kind, list(WITHOUT_MESSAGES)))
    shown = rows[np.argsort(trace.start[rows], kind="stable")[:MAX_BLOCKS]]
    light, second = lighter(trace), second_of_pair(trace)
    top = trace.rank - np.where(second, 0.0, _HALF)
    bottom = trace.rank + np.where(trace.paired, 0.0, _HALF)
    kinds = [Activity(int(kind)) for kind in np.unique(trace.kind[shown])]
    return {
        "step": step,
        "ranks": trace.ranks,
        "schedule": str(trace.info.get("schedule", "")),
        "unit": unit.name,
        "makespan": unit.text(float(trace.end.max()) - origin),
        "idle": f"{bubble_fraction(trace):.1%}",
        "columns": {
            "left": _scaled(trace.start[shown] - origin, unit.scale),
            "right": _scaled(trace.end[shown] - origin, unit.scale),
            "top": top[shown].tolist(),
            "bottom": bottom[shown].tolist(),
            "colour": [_colour(trace, row, bool(light[row])) for row in shown],
            "text": [_label(trace, row) for row in shown],
            "ink": ["#000000" if light[row] else "#ffffff" for row in shown],
        },
        "kinds": [[KINDS[kind].letter, KINDS[kind].meaning, KINDS[kind].full] for kind in kinds],
        "omitted": len(rows) - len(shown),
    }


def _scaled(times: Any, scale: float) -> list[float]:
    return [float(f"{time:.6g}") for time in (times * scale).tolist()]


def _colour(trace: Trace, row: int, light: bool) -> str:
    style = KINDS[Activity(int(trace.kind[row]))]
    return style.light if light else style.full


def _label(trace: Trace, row: int) -> str:
    microbatch = int(trace.microbatch[row])
    return KINDS[Activity(int(trace.kind[row]))].letter + ("" if microbatch < 0 else str(microbatch))
