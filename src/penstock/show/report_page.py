"""Parts of a report beside its timeline: facts about the run, and all steps together.

The facts are what traces do not have: where, when and how the run ran, and how fast. The overview shows how the time of
the steps and its causes developed.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from penstock.base.bounded_io import MEGABYTE, parse_json, read_bytes
from penstock.base.counts import plural
from penstock.base.errors import PenstockError
from penstock.profile.closed_form import Workload
from penstock.profile.model_profile import of_shape
from penstock.profile.read_shape import read_shape
from penstock.show.analysis import StepAnalysis
from penstock.show.figures import cause_colours, plain_figure
from penstock.show.palette import CAUSES
from penstock.show.units import Unit, amount, finite

_MAX_BYTES = 16 * MEGABYTE
_MAX_SHOWN, _MAX_LENGTH = 8, 2000
_BACKWARD = 2
"""FLOPs of a backward over the FLOPs of its forward."""


class Fact(NamedTuple):
    """One line of a table of facts, as text."""

    name: str
    value: str


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run; empty where its folder does not tell."""

    # Speed of all ranks over the run, or over its last logged steps if it has not ended; None if unknown.
    tokens_per_second: float | None = None
    # Share of the devices' rated FLOP/s that the model's FLOPs are; None where one of them is unknown.
    mfu: float | None = None
    lines: tuple[Fact, ...] = ()  # the rest, in the order to show it

    @property
    def tiles(self) -> list[tuple[str, str]]:
        """(value, name) of the figures, for the page's tiles."""
        tiles = []
        if self.tokens_per_second is not None:
            tiles.append((f"{self.tokens_per_second:,.0f}", "tokens a second, all ranks"))
        if self.mfu is not None:
            tiles.append((f"{self.mfu:.1%}", "MFU"))
        return tiles


UNKNOWN = RunFacts()
"""Facts about a step that belongs to no run's folder."""


def read_facts(
    run: Path, settings: str, metrics: Sequence[Mapping[str, Any]], problems: list[str]
) -> RunFacts:
    """Read the facts about a run; a file that cannot be read adds a sentence to `problems`."""
    starts = _starts(run / "run.json", problems)
    last = starts[-1] if starts else {}
    speed = _speed(metrics)
    return RunFacts(speed, _mfu(run, settings, last, speed), fact_lines(starts))


def _starts(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        table = parse_json(read_bytes(path, _MAX_BYTES))
    except (OSError, ValueError) as error:
        problems.append(f"cannot read {path}: {error}")
        return []
    starts = table.get("starts") if isinstance(table, dict) else None
    starts = [start for start in starts if isinstance(start, dict)] if isinstance(starts, list) else []
    if not starts:
        problems.append(f"{path} has no list of starts")
    return starts


def _speed(metrics: Sequence[Mapping[str, Any]]) -> float | None:
    for kind in ("final", "train"):
        for row in reversed(metrics):
            if row.get("kind") == kind and (speed := finite(row.get("tokens_per_second"))):
                return speed
    return None


def fact_lines(starts: Sequence[Mapping[str, Any]]) -> tuple[Fact, ...]:
    """Return the facts about a run from the entries of its starts; the last one counts."""
    if not starts:
        return ()
    last = starts[-1]
    versions = last.get("versions")
    versions = versions if isinstance(versions, dict) else {}
    processes, threads = finite(last.get("processes")), finite(last.get("threads"))
    ranks = (
        "" if processes is None else f"{processes} processes" if processes > 1 else "threads of one process"
    )
    cores = "" if threads is None else f"{plural(int(threads), 'CPU thread')} per rank"
    facts = {
        "started": last.get("time"),
        "command": last.get("command"),
        "host": last.get("host"),
        "device": ", ".join(str(part) for part in (last.get("device"), last.get("dtype")) if part),
        "layout": ", ".join(str(part) for part in (last.get("layout"), ranks, cores) if part),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "resumed": "; ".join(
            f"after step {s.get('step')}, {s.get('time')}" for s in starts[1:][-_MAX_SHOWN:]
        ),
    }
    return tuple(Fact(name, _shortened(str(value))) for name, value in facts.items() if value)


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}..."


def _mfu(run: Path, settings: str, start: Mapping[str, Any], speed: float | None) -> float | None:
    """Return the MFU; None unless speed, model and the rating of the device for the run's dtype are known."""
    rated, processes = finite(start.get("rated_flops")), finite(start.get("processes"))
    if not speed or not rated or not processes:
        return None
    try:
        flops = _flops_of_token(run, tomllib.loads(settings), str(start.get("dtype", "")))
    except (PenstockError, ValueError, RecursionError):
        return None  # a model whose FLOPs are not known
    return speed * flops / (rated * processes) if flops else None


def _flops_of_token(run: Path, config: Mapping[str, Any], dtype: str) -> float | None:
    """Return the model's FLOPs for one token of a step: a forward and a backward of all weights, no recompute."""
    model, data = config.get("model"), config.get("data")
    sequence = data.get("sequence") if isinstance(data, dict) else None
    if not isinstance(model, dict) or not isinstance(sequence, int):
        return None
    hugging_face = model.get("path") or model.get("config")
    kept = hugging_face and (run / "config.json").is_file()
    table = of_shape(read_shape(run / ("config.json" if kept else "config.toml"))).table(
        Workload(microbatch=1, sequence=sequence, dtype=dtype)
    )
    forward = sum(float(table.costs[kind].model_flops) for kind in table.kinds)
    return (1 + _BACKWARD) * forward / sequence


_MAX_TICKS = 16
_STEP = re.compile(r"step (\d+)")


def overview_figure(steps: Sequence[StepAnalysis], unit: Unit, names: Sequence[str] = ()) -> dict[str, Any]:
    """Return a chart of the steps as JSON for ``Bokeh.embed.embed_item``: one bar a step, the ranks' mean time by cause.

    Its source is named ``overview``, with the number of each bar's step; ``chosen`` marks steps. Text from outside is left
    out: steps that are not numbered are counted.
    """
    from bokeh.embed import json_item
    from bokeh.models import ColumnDataSource, CustomJSHover, FixedTicker, HoverTool, Range1d, TapTool

    columns: dict[str, list[Any]] = {
        name: [] for name in ("step", "bottom", "top", "cause", "share", "length")
    }
    for number, step in enumerate(steps):
        makespan, bottom = float(step.bubbles.makespan) or 1.0, 0.0
        for cause, time in enumerate(mean_times(step)):
            if time > 1e-9 * makespan:
                height = time * unit.scale
                values = (number, bottom, bottom + height, cause, time / makespan, height)
                for column, value in zip(columns.values(), values, strict=True):
                    column.append(value)
                bottom += height
    highest = max(columns["top"], default=0.0) or 1.0
    x, y = Range1d(start=-0.7, end=len(steps) - 0.3), Range1d(start=0, end=1.06 * highest)
    plot = plain_figure("overview", x, y, height=210, tools="", toolbar_location=None)
    source = ColumnDataSource(columns, name="overview")
    places = {"x": "step", "bottom": "bottom", "top": "top", "width": 0.8}
    look = {"line_color": None, "fill_color": cause_colours(), "nonselection_fill_alpha": 1.0}
    bars = plot.vbar(**places, source=source, **look)
    chosen = ColumnDataSource({"step": [], "top": []}, name="chosen")
    plot.vbar(
        x="step",
        bottom=0,
        top="top",
        width=0.9,
        source=chosen,
        fill_color=None,
        line_color="#e07b00",
        line_width=2.5,
    )
    tip = '<div class="tip"><b>@cause{custom}</b><br>@length{custom} on average, @share{custom} of the step</div>'
    formatters: Any = {f"@{name}": CustomJSHover(name=f"say-{name}") for name in ("cause", "length", "share")}
    plot.add_tools(
        HoverTool(renderers=[bars], tooltips=tip, formatters=formatters, point_policy="follow_mouse"),
        TapTool(renderers=[bars]),
    )
    ticks = sorted({round(n) for n in np.linspace(0, len(steps) - 1, min(len(steps), _MAX_TICKS))})
    plot.xaxis.ticker = FixedTicker(ticks=ticks)
    plot.xaxis.major_label_overrides = {n: names[n] if names else _number(steps[n], n) for n in ticks}
    plot.xaxis.axis_label = "run" if names else "step" if numbered(steps) else "place in the list"
    plot.yaxis.axis_label = f"time ({unit.name})" if unit.name else "time"
    plot.xgrid.visible = False
    return dict(json_item(plot))


def mean_times(step: StepAnalysis) -> list[float]:
    """Return the mean computing time of the ranks that have events, then the mean of every cause of idle time."""
    bubbles, ranks = step.bubbles, step.ranks
    times = (bubbles.busy, *(bubbles.idle[cause] for cause in CAUSES))
    return [float(time[ranks].mean()) if ranks else 0.0 for time in times]


def overview_table(steps: Sequence[StepAnalysis], unit: Unit) -> dict[str, Any]:
    """Return a line for every step: its time, its idle share and the largest cause of that, and the most held by a rank."""
    heads = [
        "",
        "time",
        "idle",
        "largest cause",
        *(["most held"] if any(step.peaks is not None for step in steps) else []),
    ]
    rows = []
    for step in steps:
        makespan = float(step.bubbles.makespan) or 1.0
        idle = mean_times(step)[1:]
        largest = int(np.argmax(idle))
        cause = list(CAUSES.values())[largest]
        row = [
            step.label,
            unit.text(step.bubbles.makespan),
            f"{sum(idle) / makespan:.1%}",
            f"{cause.meaning} {idle[largest] / makespan:.1%}" if idle[largest] > 0 else "",
        ]
        if len(heads) > len(row):
            row.append("" if step.peaks is None else amount(step.trace, int(step.peaks.max())))
        rows.append(row)
    return {"heads": heads, "rows": rows}


def numbered(steps: Sequence[StepAnalysis]) -> bool:
    """Return whether the steps are numbered steps of a run, and not simulations with names."""
    return all(_STEP.fullmatch(step.label) for step in steps)


def _number(step: StepAnalysis, position: int) -> str:
    match = _STEP.fullmatch(step.label)
    return match[1] if match else str(position + 1)
