"""Figures of a plan's page: timeline and idle time as on the report page, memory by rank, and time over memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.plan.explore.search_result import SimulatedLayout
from penstock.plan.prediction import Prediction
from penstock.show.figures import figures, height_of_ranks
from penstock.show.palette import MEMORY_PARTS
from penstock.show.units import Unit, size_text, time_text

GIGABYTE = 1e9
_LIMIT = "#d03030"
_DOTS, _BEST = "#3f7fc4", "#e07b00"


def plan_figures(
    plan: Prediction, outcomes: Sequence[SimulatedLayout], unit: Unit
) -> dict[str, dict[str, Any]]:
    """Return the figures as JSON for ``Bokeh.embed.embed_item``, by the id of their element."""
    places = figures(len(plan.memory), unit, planned=False, memory="")
    from bokeh.embed import json_item

    places["memory"] = dict(json_item(_memory(plan)))
    if outcomes:
        places["frontier"] = dict(json_item(_frontier(plan, outcomes)))
    return places


def _memory(plan: Prediction) -> Any:
    from bokeh.models import HoverTool, Range1d

    ranks = len(plan.memory)
    most = max(plan.peak_bytes, plan.capacity) / GIGABYTE
    plot = _figure(
        "memory-parts",
        Range1d(start=0, end=1.04 * most),
        Range1d(start=ranks - 0.5, end=-0.5),
        height=height_of_ranks(ranks),
    )
    plot.grid.visible = False
    plot.xaxis.axis_label, plot.yaxis.axis_label = "GB", "rank"
    plot.yaxis.ticker.mantissas = [1, 2, 5]
    plot.yaxis.ticker.min_interval = 1
    plot.yaxis.ticker.num_minor_ticks = 0
    columns: dict[str, list[Any]] = {
        name: [] for name in ("rank", "left", "right", "part", "size", "total", "op", "colour")
    }
    for number, rank in enumerate(plan.memory):
        left = 0.0
        for name, (colour, meaning) in MEMORY_PARTS.items():
            size = float(getattr(rank, name)) / GIGABYTE
            if size > 0:
                values = (
                    number, left, left + size, meaning, size_text(size * GIGABYTE), size_text(rank.total), rank.peak_op,
                    colour,
                )  # fmt: skip
                for key, value in zip(columns, values, strict=True):
                    columns[key].append(value)
                left += size
    bars = plot.hbar(
        y="rank", left="left", right="right", height=0.8, line_color=None, fill_color="colour", source=columns
    )
    tip = '<div class="tip"><b>@part</b>: @size<br>rank @rank, @total in all, most at @op</div>'
    plot.add_tools(HoverTool(renderers=[bars], tooltips=tip, point_policy="follow_mouse"))
    plot.vspan(x=[plan.capacity / GIGABYTE], line_color=_LIMIT, line_width=2, line_dash="8 4")
    return plot


def _frontier(plan: Prediction, outcomes: Sequence[SimulatedLayout]) -> Any:
    from bokeh.models import DataRange1d, HoverTool

    plot = _figure("frontier", DataRange1d(range_padding=0.06), DataRange1d(range_padding=0.08), height=320)
    plot.xaxis.axis_label, plot.yaxis.axis_label = "memory of the fullest device (GB)", "step (s)"
    line = frontier(outcomes)
    plot.step(
        [outcome.peak_bytes / GIGABYTE for outcome in line],
        [outcome.step_seconds for outcome in line],
        mode="after",
        line_color=_DOTS,
        line_alpha=0.6,
        line_width=1.5,
    )
    columns: dict[str, list[Any]] = {
        "memory": [outcome.peak_bytes / GIGABYTE for outcome in outcomes],
        "seconds": [outcome.step_seconds for outcome in outcomes],
        "size": [size_text(outcome.peak_bytes) for outcome in outcomes],
        "step": [time_text(outcome.step_seconds) for outcome in outcomes],
        "layout": [str(outcome.layout).replace(",", ", ") for outcome in outcomes],
        "colour": [_BEST if outcome.layout == plan.layout else _DOTS for outcome in outcomes],
        "dot": [13 if outcome.layout == plan.layout else 8 for outcome in outcomes],
    }
    dots = plot.scatter(
        "memory", "seconds", size="dot", fill_color="colour", fill_alpha=0.75, line_color=None, source=columns
    )
    tip = '<div class="tip"><b>@step</b> a step, @size<br>@layout</div>'
    plot.add_tools(HoverTool(renderers=[dots], tooltips=tip, point_policy="follow_mouse"))
    return plot


def frontier(outcomes: Sequence[SimulatedLayout]) -> list[SimulatedLayout]:
    """Return the layouts that no other beats in both time and memory, by growing memory."""
    line: list[SimulatedLayout] = []
    for outcome in sorted(outcomes, key=lambda outcome: (outcome.peak_bytes, outcome.step_seconds)):
        if not line or outcome.step_seconds < line[-1].step_seconds:
            line.append(outcome)
    return line


def _figure(name: str, x: Any, y: Any, height: int) -> Any:
    from bokeh.plotting import figure

    plot = figure(
        name=f"{name}-figure", x_range=x, y_range=y, height=height, sizing_mode="stretch_width", tools="save",
        toolbar_location="right", background_fill_color=None, border_fill_color=None, outline_line_color=None,
        min_border_left=70,
    )  # fmt: skip
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    plot.axis.axis_label_text_font_style = "normal"
    plot.axis.minor_tick_line_color = None
    return plot
