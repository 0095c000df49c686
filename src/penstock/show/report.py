"""The report: one HTML file that shows where the time and the memory of one or several traces went, and why.

The page works from ``file://`` and asks the network for nothing: Bokeh's script, the page's own and all data are in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.atomic import write_bytes
from penstock.errors import ConfigError
from penstock.show.page import render
from penstock.show.page_data import look_at, palette, step_data, unit_of
from penstock.trace.events import Trace

MOST_BLOCKS = 150_000


def write(
    path: str | Path,
    traces: Mapping[str, Trace],
    *,
    title: str,
    settings: str = "",
    metrics: Sequence[Mapping[str, Any]] = (),
    problems: Sequence[str] = (),
) -> Path:
    """Write the report page.

    Args:
        path: of the file; its folder must exist.
        traces: what the page's selector calls it ("step 10", or a schedule's name) → a trace, at least one. Of a trace's
            `info` the page also shows ``split`` (the names of every stage's layers), ``limit`` (bytes a rank may hold) and
            ``clock_error`` (seconds). When all of them have more than `MOST_BLOCKS` events some in between are left out,
            and the page says so.
        title: the page's; any text.
        settings: the resolved config, as text.
        metrics: the lines of ``metrics.jsonl``.
        problems: what could not be read, a sentence each.

    Returns:
        The path.

    Raises:
        ConfigError: there is no trace, Bokeh is not installed, or the file cannot be written.
    """
    if not traces:
        raise ConfigError("a report needs at least one trace")
    path = Path(path)
    text = _page(title, *_chosen(traces, list(problems)), settings, metrics)
    try:
        write_bytes(path, text.encode(errors="replace"))  # file names may hold bytes that are no UTF-8
    except OSError as error:
        raise ConfigError(f"cannot write the report {path}: {error.strerror}") from error
    return path


def _chosen(traces: Mapping[str, Trace], problems: list[str]) -> tuple[dict[str, Trace], list[str]]:
    """The traces that the page holds: the first, the last, and of those between as many as there is room for."""
    labels = list(traces)
    total = sum(len(trace) for trace in traces.values())
    keep = max(2, int(len(labels) * MOST_BLOCKS / total)) if total > MOST_BLOCKS else len(labels)
    if keep >= len(labels):
        return dict(traces), problems
    kept = sorted({round(n * (len(labels) - 1) / (keep - 1)) for n in range(keep)})
    problems.append(
        f"{len(labels)} traces with {total:,} events are more than a page holds; here are {len(kept)}, the first and the "
        "last among them"
    )
    return {labels[n]: traces[labels[n]] for n in kept}, problems


def _page(
    title: str,
    traces: dict[str, Trace],
    problems: list[str],
    settings: str,
    metrics: Sequence[Mapping[str, Any]],
) -> str:
    from penstock.show.figures import curves, figures, library, rank_colours

    steps = [look_at(label, trace) for label, trace in traces.items()]
    unit = unit_of(list(traces.values()))
    packed = [step_data(step, unit) for step in steps]
    ranks = max(step.trace.ranks for step in steps)
    planned = any(one["planned"] for one in packed)
    held = {one["memory"]["unit"] for one in packed if one["memory"]}
    counted = "bytes" if held == {"bytes"} else "activations"
    memory = f"held ({counted})" if held else ""
    places: dict[str, Any] = dict(figures(ranks, unit, planned=planned, memory=memory))
    training = curves(metrics)
    if training is not None:
        places["curves"] = training
    data = {
        "unit": unit.name,
        "held": counted,
        "palette": palette(),
        "ranks": rank_colours(ranks),
        "figures": [f"{name}-figure" for name in ("measured", "planned", "memory", "bars")]
        + [f"curve-{n}" for n in range(6)],
        "steps": packed,
    }
    return render(title, steps, unit, settings, problems, data, places, library())
