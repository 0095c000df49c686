"""The report: one HTML file that shows where the time and the memory of one or several traces went, and why.

The page works from ``file://`` and asks the network for nothing: Bokeh's script, the page's own and all data are in it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from penstock.atomic import write_text
from penstock.errors import ConfigError
from penstock.show.page import body
from penstock.show.page_data import look_at, palette, step_data, unit_of
from penstock.show.policy import policy
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
        write_text(path, text)
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
    data = [step_data(step, unit) for step in steps]
    ranks = max(step.trace.ranks for step in steps)
    planned = any(one["planned"] for one in data)
    held = {one["memory"]["unit"] for one in data if one["memory"]}
    counted = "bytes" if held == {"bytes"} else "activations"
    memory = f"held ({counted})" if held else ""
    places: dict[str, Any] = dict(figures(ranks, unit, planned=planned, memory=memory))
    training = curves(metrics)
    if training is not None:
        places["curves"] = training
    whole = {
        "unit": unit.name,
        "held": counted,
        "palette": palette(),
        "ranks": rank_colours(ranks),
        "figures": [f"{name}-figure" for name in ("measured", "planned", "memory", "bars")]
        + [f"curve-{n}" for n in range(6)],
        "steps": data,
    }
    own = files("penstock.show")
    style, early, late = (
        own.joinpath(name).read_text("utf-8") for name in ("page.css", "nonce.js", "page.js")
    )
    text = body(title, steps, unit, settings, problems, curves=training is not None, memory=bool(memory))
    scripts = [f"\n{script}\n" for script in (early, *library(), late)]
    nonce = secrets.token_urlsafe(16)
    *first, last = (f"<script>{script}</script>" for script in scripts)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{policy(scripts, nonce)}\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{escape(title)}</title>\n<link rel="icon" href="data:,">\n<style nonce="{nonce}">\n{style}</style>\n'
        f"{''.join(first)}\n</head>\n<body>\n{text}\n"
        f'<script type="application/json" id="penstock-data">{_inside_script(whole)}</script>\n'
        f'<script type="application/json" id="penstock-figures">{_inside_script(places)}</script>\n'
        f"{last}\n</body>\n</html>\n"
    )


def _inside_script(value: object) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
