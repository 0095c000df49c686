"""The watching page: empty charts, which its script fills during the run."""

from __future__ import annotations

from typing import Any

from penstock.show.figures import library, require_bokeh
from penstock.show.page import fill_template

_CHARTS = (
    ("loss", "loss (nats per token)"),
    ("held_out_bits", "held-out bits per token"),
    ("tokens_per_second", "tokens per second"),
    ("step_seconds", "seconds per step"),
    ("lr", "learning rate"),
    ("grad_norm", "gradient norm"),
    ("bubble", "idle share of the ranks"),
    ("rss", "memory of each process (GiB)"),
    ("cuda_peak", "GPU memory of each process, peak (GiB)"),
)
"""Numbers of ``metrics.jsonl`` and the titles of their charts."""


def watch_page(title: str) -> bytes:
    """Return the page as HTML in UTF-8.

    Args:
        title: heading, any text.

    Raises:
        ConfigError: if Bokeh is not installed.
    """
    require_bokeh()
    from bokeh.embed import json_item

    figures = {f"chart-{name}": dict(json_item(_chart(name))) for name, _ in _CHARTS}
    figures["timeline"] = dict(json_item(_timeline()))
    text = fill_template(
        "watch.html",
        {"charts": [name for name, _ in _CHARTS]},
        figures,
        library(),
        scripts=("watch.js",),
        styles=("page.css", "watch.css"),
        connects=True,
        title=title,
        charts=_CHARTS,
    )
    return text.encode(errors="replace")


def _chart(name: str) -> Any:
    """Return a line chart; of memory with a line per rank, whose source has a column ``colour``."""
    from bokeh.models import ColumnDataSource, HoverTool, Range1d
    from bokeh.plotting import figure

    plot: Any = figure(
        name=f"{name}-figure", x_range=Range1d(start=0, end=1), y_range=Range1d(start=0, end=1),
        height=190, sizing_mode="stretch_width", toolbar_location=None, tools="",
        background_fill_color=None, border_fill_color=None, outline_line_color=None, min_border_left=55,
    )  # fmt: skip
    source = ColumnDataSource({"xs": [], "ys": [], "rank": [], "colour": []}, name=name)
    lines = plot.multi_line("xs", "ys", source=source, line_width=2, line_color="colour", line_join="round")
    by_rank = name in ("rss", "cuda_peak")
    tip = "rank @rank, step $x{0}: $y{0.000}" if by_rank else "step $x{0}: $y{0.0000}"
    plot.add_tools(HoverTool(renderers=[lines], tooltips=tip, line_policy="nearest"))
    plot.xaxis.axis_label = "step"
    plot.axis.axis_label_text_font_style = "normal"
    plot.axis.minor_tick_line_color = None
    plot.xaxis.ticker.min_interval = 1
    return plot


def _timeline() -> Any:
    from bokeh.models import ColumnDataSource, HoverTool, PanTool, Range1d, ResetTool, WheelZoomTool
    from bokeh.plotting import figure

    pan, wheel = PanTool(dimensions="width"), WheelZoomTool(dimensions="width", modifiers={"ctrl": True})
    plot: Any = figure(
        name="timeline-figure", height=160, sizing_mode="stretch_width", tools=[pan, wheel, ResetTool()],
        active_drag=pan, active_scroll=wheel, toolbar_location="right", background_fill_color=None, border_fill_color=None,
        outline_line_color=None, min_border_left=55, x_range=Range1d(start=0, end=1), y_range=Range1d(start=1, end=0),
    )  # fmt: skip
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    plot.xgrid.visible = plot.ygrid.visible = False
    columns = ("left", "right", "top", "bottom", "colour", "text", "ink")
    source = ColumnDataSource({column: [] for column in columns}, name="timeline")
    blocks = plot.quad(
        "left",
        "right",
        "top",
        "bottom",
        source=source,
        fill_color="colour",
        line_color=None,
        name="timeline-blocks",
    )
    plot.add_tools(
        HoverTool(renderers=[blocks], tooltips="@text: @left to @right", point_policy="follow_mouse")
    )
    labels = ColumnDataSource({"x": [], "y": [], "text": [], "ink": []}, name="timeline-labels")
    plot.text(
        "x", "y", "text", source=labels, text_color="ink", text_font_size={"value": "11px"},
        text_align={"value": "center"}, text_baseline={"value": "middle"}, text_font={"value": "sans-serif"},
    )  # fmt: skip
    plot.yaxis.axis_label = "rank"
    plot.yaxis.ticker.mantissas = [1, 2, 5]
    plot.yaxis.ticker.min_interval = 1
    plot.yaxis.ticker.num_minor_ticks = 0
    plot.axis.axis_label_text_font_style = "normal"
    plot.axis.minor_tick_line_color = None
    return plot
