"""All steps of a page together: how their time and its causes developed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.show.analysis import StepAnalysis
from penstock.show.palette import BUSY, CAUSES
from penstock.show.units import Unit, amount

_MAX_TICKS = 16
_STEP = re.compile(r"step (\d+)")


def overview_figure(steps: Sequence[StepAnalysis], unit: Unit, names: Sequence[str] = ()) -> dict[str, Any]:
    """Return a chart of the steps as JSON for ``Bokeh.embed.embed_item``: one bar a step, the ranks' mean time by cause.

    Its source is named ``overview``, with the number of each bar's step; ``chosen`` marks steps. Text from outside is left
    out: steps that are not numbered are counted.
    """
    from bokeh.embed import json_item
    from bokeh.models import ColumnDataSource, CustomJSHover, FixedTicker, HoverTool, Range1d, TapTool
    from bokeh.plotting import figure
    from bokeh.transform import linear_cmap

    columns: dict[str, list[Any]] = {
        name: [] for name in ("step", "bottom", "top", "cause", "share", "length")
    }
    for number, step in enumerate(steps):
        makespan, bottom = float(step.bubbles.makespan) or 1.0, 0.0
        for cause, time in enumerate(mean_times(step)):
            if time > 1e-9 * makespan:
                values = (
                    number,
                    bottom,
                    bottom + time * unit.scale,
                    cause,
                    time / makespan,
                    time * unit.scale,
                )
                for column, value in zip(columns.values(), values, strict=True):
                    column.append(value)
                bottom += time * unit.scale
    highest = max(columns["top"], default=0.0) or 1.0
    plot = figure(
        name="overview-figure", height=210, sizing_mode="stretch_width", tools="", toolbar_location=None,
        x_range=Range1d(start=-0.7, end=len(steps) - 0.3), y_range=Range1d(start=0, end=1.06 * highest),
        background_fill_color=None, border_fill_color=None, outline_line_color=None, min_border_left=70,
    )  # fmt: skip
    source = ColumnDataSource(columns, name="overview")
    colours = [BUSY, *(cause.colour for cause in CAUSES.values())]
    bars = plot.vbar(
        x="step", bottom="bottom", top="top", width=0.8, source=source, line_color=None, nonselection_fill_alpha=1.0,
        fill_color=linear_cmap("cause", colours, -0.5, len(colours) - 0.5),
    )  # fmt: skip
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
    plot.axis.axis_label_text_font_style = "normal"
    plot.axis.minor_tick_line_color = None
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
