"""The report: one HTML file that shows where the time and the memory of one or several traces went, and why.

The page works from ``file://`` and asks the network for nothing: it contains Bokeh's script, its own, and all data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.base.errors import ConfigError
from penstock.show.analysis import StepAnalysis
from penstock.show.figures import curves, figures, rank_colours
from penstock.show.page import render, write_page
from penstock.show.page_data import step_data
from penstock.show.report_page import UNKNOWN, RunFacts, overview_figure
from penstock.show.units import unit_of

MAX_EVENTS = 150_000


def write(
    path: str | Path,
    steps: Sequence[StepAnalysis],
    *,
    title: str,
    settings: str = "",
    metrics: Sequence[Mapping[str, Any]] = (),
    problems: Sequence[str] = (),
    facts: RunFacts = UNKNOWN,
    note: str = "",
    reload_seconds: int = 0,
) -> Path:
    """Write the report page.

    Of a trace's `info` the page also shows ``split`` (the names of every stage's layers), ``limit`` (bytes a rank may
    hold) and ``clock_error`` (seconds). If the steps together have more than `MAX_EVENTS` events, some in between are
    left out, and the page says so. With `reload_seconds` the page reloads itself, and keeps the reader's place.
    """
    if not steps:
        raise ConfigError("a report needs at least one trace")
    steps, problems = _chosen(steps, problems)
    unit = unit_of(step.trace for step in steps)
    packed = [step_data(step, unit) for step in steps]
    ranks = max(step.trace.ranks for step in steps)
    planned = any(step["planned"] for step in packed)
    held = {step["memory"]["unit"] for step in packed if step["memory"]}
    counted = "bytes" if held == {"bytes"} else "activations"
    memory = f"held ({counted})" if held else ""
    places = figures(ranks, unit, planned=planned, memory=memory)
    if len(steps) > 1:
        places["overview"] = overview_figure(steps, unit)
    places |= curves(metrics)
    data = {
        "unit": unit.name,
        "held": counted,
        "ranks": rank_colours(ranks),
        "figures": [f"{name}-figure" for name in ("overview", "measured", "planned", "memory", "bars")]
        + [name for name in places if name.startswith("curve-")],
        "steps": packed,
    }
    text = render(
        steps,
        unit,
        facts,
        data,
        places,
        title=title,
        settings=settings,
        problems=problems,
        note=note,
        reload_seconds=reload_seconds,
    )
    return write_page(path, text)


def _chosen(
    steps: Sequence[StepAnalysis], problems: Sequence[str]
) -> tuple[Sequence[StepAnalysis], Sequence[str]]:
    """Return the first step, the last, and as many in between as fit, and the problems with a word on that."""
    count, total = len(steps), sum(len(step.trace) for step in steps)
    keep = max(2, int(count * MAX_EVENTS / total)) if total > MAX_EVENTS else count
    if keep >= count:
        return steps, problems
    kept = sorted({round(n * (count - 1) / (keep - 1)) for n in range(keep)})
    problem = (
        f"The page has no room for all {count} traces with {total:,} events; it shows {len(kept)} of them, among them the "
        "first and the last."
    )
    return [steps[n] for n in kept], [*problems, problem]
