"""The report page's figures, made with Bokeh: empty, until the page's script fills them with the chosen step.

They contain no text from users, which the page's template escapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from penstock.base.errors import ConfigError
from penstock.show.palette import BUSY, CAUSES, KINDS
from penstock.show.units import Unit, finite

CURVES = (
    ("loss (nats per token)", "loss", "train"),
    ("held-out bits per token", "held_out_bits", "held_out"),
    ("learning rate", "lr", "train"),
    ("gradient norm", "grad_norm", "train"),
    ("tokens per second", "tokens_per_second", "train"),
    ("idle share of pipe.step", "bubble", "train"),
    ("imbalance of experts", "expert_imbalance", "train"),
    ("exchange of tokens, mean s", "exchange_seconds", "train"),
)
"""Title, key and kind of line of every curve of ``metrics.jsonl``."""
_EDGES = {"left": "start", "right": "end", "top": "top", "bottom": "bottom"}
_BARE: dict[str, Any] = dict.fromkeys(("background_fill_color", "border_fill_color", "outline_line_color"))
LINES = ("#3f7fc4", "#e07b00")
"""Colours of curves in one figure, legible on both backgrounds."""
BLOCKS = ("start", "end", "top", "bottom", "fill", "kind", "stage", "microbatch", "rank", "length", "held")
_TOOLTIP = (
    '<div class="tip"><b>@kind{custom}</b> @stage{custom} @microbatch{custom}<br>rank @rank<br>'
    "@start{custom} to @end{custom}<br>takes <b>@length{custom}</b><br>@held{custom}</div>"
)


def require_bokeh() -> None:
    """Raise `ConfigError` if Bokeh is not installed."""
    try:
        import_module("bokeh.embed")
    except ImportError as error:
        raise ConfigError("the report page needs bokeh: pip install 'penstock-torch[report]'") from error


def figures(
    ranks: int, unit: Unit, *, planned: bool, memory: str, labels: Sequence[str] = ("rank", "rank, planned")
) -> dict[str, dict[str, Any]]:
    """Return a page's figures as JSON for ``Bokeh.embed.embed_item``, by the id of their element.

    `ranks` is the largest number of any step. Without a name of the memory axis there is no memory chart. `labels`
    are the rank axes of both timelines.
    """
    require_bokeh()
    # Within functions, because Bokeh is an extra: this module is imported without it.
    from bokeh.embed import json_item
    from bokeh.layouts import column
    from bokeh.models import Range1d

    x, y = Range1d(start=0, end=1), Range1d(start=ranks - 0.5, end=-0.5)
    tall = height_of_ranks(ranks)
    names = ("measured", "planned")[: 1 + planned]
    rows: list[Any] = [
        _timeline(name, x, y, tall, unit, label) for name, label in zip(names, labels, strict=False)
    ]
    if memory:
        rows.append(_memory(x, unit, memory))
    time = column(rows, sizing_mode="stretch_width", name="time")
    bars = _bars(y, tall, unit)
    return {"time": dict(json_item(time)), "bars": dict(json_item(bars))}


def height_of_ranks(ranks: int) -> int:
    """Return the pixels of a figure with a row for every rank."""
    row = max(7, min(34, 620 // max(1, ranks)))
    # Tall enough for the name of an axis.
    return max(150, 48 + min(900, row * ranks))


def curves(*runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the curves of runs' ``metrics.jsonl`` as JSON for ``embed_item``, by the id of their element, ``curve-N``.

    Curves of a single point are left out.
    """
    from bokeh.embed import json_item

    shown: dict[str, dict[str, Any]] = {}
    for title, key, kind in CURVES:
        lines = [points_of(metrics, key, kind) for metrics in runs]
        if any(len(points) > 1 for points in lines):
            name = f"curve-{len(shown)}"
            shown[name] = dict(json_item(curve(name, title, lines)))
    return shown


def points_of(metrics: Sequence[Mapping[str, Any]], key: str, kind: str) -> list[tuple[float, float]]:
    """Return (step, number) of every line of a kind that has both; of a list by process, its mean."""
    rows = [(finite(row.get("step")), _mean(row.get(key))) for row in metrics if row.get("kind") == kind]
    return [(step, number) for step, number in rows if step is not None and number is not None]


def _mean(value: object) -> float | None:
    numbers = [finite(each) for each in (value if isinstance(value, list) and value else [value])]
    known = [number for number in numbers if number is not None]
    return sum(known) / len(known) if len(known) == len(numbers) else None


def _timeline(name: str, x: Any, y: Any, height: int, unit: Unit, label: str) -> Any:
    from bokeh.models import ColumnDataSource, HoverTool
    from bokeh.transform import linear_cmap

    plot = _figure(name, x, y, height, unit)
    plot.xgrid.visible = plot.ygrid.visible = False
    plot.yaxis.axis_label = label
    source = ColumnDataSource({column: [] for column in BLOCKS}, name=name)
    _gaps(plot, f"{name}-gaps")
    colours = [shade for kind in KINDS.values() for shade in (kind.full, kind.light)]
    fill = linear_cmap("fill", colours, -0.5, len(colours) - 0.5)
    look = {"line_color": "white", "line_width": 0.7, "fill_color": fill}
    hover = {"hover_line_color": "black", "hover_fill_color": fill}
    quads = plot.quad(**_EDGES, source=source, name=f"{name}-blocks", **look, **hover)
    labels = ColumnDataSource({"x": [], "y": [], "text": [], "colour": []}, name=f"{name}-labels")
    centred = {"text_align": {"value": "center"}, "text_baseline": {"value": "middle"}}
    font = {"text_font_size": {"value": "11px"}, "text_font": {"value": "sans-serif"}}
    plot.text(x="x", y="y", text="text", text_color="colour", source=labels, **centred, **font)
    formatters = _formatters("kind", "stage", "microbatch", "start", "end", "length", "held")
    plot.add_tools(
        HoverTool(
            renderers=[quads],
            tooltips=_TOOLTIP,
            formatters=formatters,
            point_policy="follow_mouse",
            name=f"{name}-hover",
        )
    )
    return plot


def _gaps(plot: Any, name: str) -> None:
    """Draw idle spans as narrow strips in the colour of their cause."""
    from bokeh.models import ColumnDataSource, HoverTool

    columns = ("start", "end", "top", "bottom", "cause", "length", "rank")
    source = ColumnDataSource({column: [] for column in columns}, name=name)
    spans = plot.quad(**_EDGES, source=source, line_color=None, fill_color=cause_colours())
    formatters = _formatters("cause", "length")
    plot.add_tools(
        HoverTool(
            renderers=[spans],
            tooltips='<div class="tip">rank @rank idle: <b>@cause{custom}</b><br>for @length{custom}</div>',
            formatters=formatters,
            point_policy="follow_mouse",
            visible=False,
        )
    )


def _memory(x: Any, unit: Unit, label: str) -> Any:
    from bokeh.models import AdaptiveTicker, ColumnDataSource, CustomJSTickFormatter, HoverTool, Range1d

    plot = _figure("memory", x, Range1d(start=0, end=1), 230, unit)
    plot.yaxis.axis_label = label
    plot.yaxis.ticker = AdaptiveTicker(
        base=1024 if "bytes" in label else 10,
        mantissas=[2**n for n in range(10)] if "bytes" in label else [1, 2, 5],
        min_interval=1,
        desired_num_ticks=4,
    )
    plot.yaxis.formatter = CustomJSTickFormatter()  # implemented by the page's script, as in `_formatters`
    empty: dict[str, list[Any]] = {"xs": [], "ys": [], "rank": [], "colour": []}
    band = ColumnDataSource(dict(empty), name="memory-band")
    plot.patches("xs", "ys", source=band, fill_color="colour", fill_alpha=0.22, line_color=None)
    for name, dash, width in (("memory-planned", "4 3", 1.0), ("memory", "solid", 1.6)):
        source = ColumnDataSource(dict(empty), name=name)
        look = {"line_color": "colour", "line_dash": dash, "line_width": width, "line_join": "bevel"}
        lines = plot.multi_line("xs", "ys", source=source, **look)
        word = "planned" if "planned" in name else "held"
        plot.add_tools(
            HoverTool(renderers=[lines], tooltips=f"rank @rank, {word}", line_policy="nearest", visible=False)
        )
    limit = ColumnDataSource({"y": []}, name="limit")
    plot.hspan(y="y", source=limit, line_color="#d03030", line_width=2, line_dash="8 4")
    return plot


def _bars(y: Any, height: int, unit: Unit) -> Any:
    from bokeh.models import ColumnDataSource, HoverTool, Range1d

    plot = _figure("bars", Range1d(start=0, end=1), Range1d(start=y.start, end=y.end), height, unit)
    plot.xgrid.visible = plot.ygrid.visible = False
    plot.yaxis.axis_label = "rank"
    source = ColumnDataSource({c: [] for c in ("left", "right", "rank", "share", "cause")}, name="bars")
    places = {"y": "rank", "left": "left", "right": "right", "height": 0.8}
    bars = plot.hbar(**places, source=source, line_color=None, fill_color=cause_colours())
    formatters = _formatters("cause", "share")
    plot.add_tools(
        HoverTool(
            renderers=[bars],
            tooltips='<div class="tip"><b>@cause{custom}</b><br>rank @rank<br>@share{custom} of the step</div>',
            formatters=formatters,
            point_policy="follow_mouse",
        )
    )
    return plot


def plain_figure(name: str, x: Any, y: Any, height: int, **options: Any) -> Any:
    """Return a figure of the page, as wide as it, without a ground and with plain axes."""
    from bokeh.plotting import figure

    size = {"height": height, "sizing_mode": "stretch_width", "min_border_left": 70}
    options = {"toolbar_location": "right", **size, **_BARE, **options}
    plot = figure(name=f"{name}-figure", x_range=x, y_range=y, **options)
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    plot.axis.axis_label_text_font_style = "normal"
    plot.axis.minor_tick_line_color = None
    return plot


def cause_colours() -> Any:
    """Return the fill of what has the number of a cause, or of work before them, in the column "cause"."""
    from bokeh.transform import linear_cmap

    colours = [BUSY, *(cause.colour for cause in CAUSES.values())]
    return linear_cmap("cause", colours, -0.5, len(colours) - 0.5)


def _figure(name: str, x: Any, y: Any, height: int, unit: Unit) -> Any:
    """Return a figure with tools for a time axis: drag to pan, ctrl and wheel to zoom."""
    from bokeh.models import BoxZoomTool, PanTool, ResetTool, SaveTool, WheelZoomTool

    tall = name in ("measured", "planned") and y.start > 64
    pan = PanTool(dimensions="both" if tall else "width")
    wheel = WheelZoomTool(dimensions="width", modifiers={"ctrl": True})
    tools = [pan, wheel, BoxZoomTool(dimensions="both" if tall else "width"), ResetTool(), SaveTool()]
    active = {"tools": tools, "active_drag": pan, "active_scroll": wheel}
    # Of very many blocks, every fifth is drawn while they are moved, and all of them afterwards.
    detail = {"lod_threshold": 12_000, "lod_factor": 5, "lod_interval": 150, "lod_timeout": 150}
    plot = plain_figure(name, x, y, height, **active, **detail)
    plot.xaxis.axis_label = f"time ({unit.name})" if unit.name else "time"
    if name != "memory":
        plot.yaxis.ticker.mantissas = [1, 2, 5]
        plot.yaxis.ticker.min_interval = 1
        plot.yaxis.ticker.num_minor_ticks = 0
    return plot


def curve(name: str, title: str, lines: Sequence[list[tuple[float, float]]]) -> Any:
    """Return a figure of curves over steps; the title must not be a user's text, which only the template escapes."""
    from bokeh.plotting import figure

    still: dict[str, Any] = {"toolbar_location": None, "sizing_mode": "stretch_width"}
    plot: Any = figure(
        name=name, height=190, title=title, tools="hover", tooltips="step @x: @y", **_BARE, **still
    )
    for points, colour in zip(lines, LINES, strict=False):
        if not points:
            continue
        x, y = (list(column) for column in zip(*points, strict=True))
        plot.line(x, y, line_width=2, line_color=colour)
        if len(points) < 60:
            plot.scatter(x, y, size=5, color=colour)
    # Without it, the axis of a constant such as a learning rate would be from -1 to 1.
    plot.y_range.default_span = 0.2 * max(abs(y) for points in lines for _, y in points) or 2.0
    plot.xaxis.ticker.min_interval = 1
    plot.xaxis.ticker.num_minor_ticks = 0
    plot.xaxis.axis_label = "step"
    plot.axis.axis_label_text_font_style = "normal"
    plot.axis.minor_tick_line_color = None
    return plot


def rank_colours(ranks: int) -> dict[str, list[str]]:
    """Return one colour per rank for a light background and for a dark one, where each is legible."""
    from bokeh.palettes import plasma

    # Yellow is hard to see on white, and dark blue on black, so each scale leaves out one end.
    scales = {"light": plasma(256)[:161], "dark": plasma(256)[104:250]}
    return {
        scheme: [scale[round(rank * (len(scale) - 1) / max(1, ranks - 1))] for rank in range(ranks)]
        for scheme, scale in scales.items()
    }


def library() -> list[str]:
    """Return the scripts of Bokeh's core, without widgets, tables, WebGL and mathematics."""
    from bokeh.resources import Resources

    return list(Resources(mode="inline", components=["bokeh"], log_level="warn").js_raw)


def _formatters(*columns: str) -> Any:
    """Return formatters of a tooltip's columns, which the page's script implements by their names.

    Bokeh's own way, code in a string, is blocked by the page's policy.
    """
    from bokeh.models import CustomJSHover

    return {f"@{column}": CustomJSHover(name=f"say-{column}") for column in columns}
