"""A trace as a picture: a timeline in SVG, PNG or PDF, drawn by matplotlib (the extra `pictures`).

Text of a vector picture stays text, so that it can be searched and edited. Beside their colour, backwards are hatched, so
that a grey print shows them, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.base.errors import ConfigError, os_errors_as
from penstock.show.blocks import lighter, second_of_pair
from penstock.show.palette import WITHOUT_MESSAGES
from penstock.show.units import unit_of
from penstock.trace.events import COLLECTIVES, Activity, Trace, both_ways

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".svg", ".png", ".pdf")
LABELLED = 600
RASTERIZED = 100_000
HATCHES = {Activity.I: "////", Activity.W: "\\\\\\\\", Activity.B: "xxx"}
"""Hatches of the halves of a backward; the full one has both."""
_LABEL = 0.7
"""Size of the number on a block over the font size of the axes."""
_LEAST_LABEL = 3.5
"""Points below which a number is left out; it would not be legible."""
_STRIP = 0.16  # height of a row of gathers or reductions below a rank's ops
_HALF = 0.42
"""Half of the height of a rank's row over the distance between ranks, so that a gap is left."""
_DIGIT = 0.65
"""Width of a digit over its font size."""


@dataclass(frozen=True)
class PictureStyle:
    """Look of a picture."""

    title: str | None = None  # above the timeline; None for the name of the schedule, empty for none
    width: float = 12.0  # inches
    font: float = 10.0  # points

    def __post_init__(self) -> None:
        """Raise `ConfigError` unless width and font size are numbers that a picture can have."""
        for name, value, least, most in (("width", self.width, 1, 100), ("font", self.font, 1, 100)):
            if not (isinstance(value, int | float) and math.isfinite(value) and least <= value <= most):
                unit = "inches" if name == "width" else "points"
                raise ConfigError(f"the {name} of a picture must be {least} to {most} {unit}, got {value!r}")


PLAIN = PictureStyle()


def draw_picture(trace: Trace, path: str | Path, style: PictureStyle = PLAIN) -> None:
    """Draw a trace to a file: one row per rank, time from left to right, one colour per kind of op.

    The lighter shade marks every second stage of a rank; the halves of a fused pair are above each other; gathers of
    weights and reductions are in a narrow strip below the ops. Up to
    `LABELLED` ops show their microbatch where it fits, and are hatched by kind; more than `RASTERIZED` ops are pixels
    even in a vector file.
    """
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"cannot draw {path.name}: the name must end in {', '.join(FORMATS)}")
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("pictures need matplotlib: pip install 'penstock-torch[pictures]'") from error
    # Text as text, in fonts that journals accept (not Type 3). Without random identifiers and dates, the same trace gives
    # the same file.
    settings: dict[Any, Any] = {
        "svg.fonttype": "none",
        "pdf.fonttype": 42,
        "svg.hashsalt": "penstock",
        "font.size": style.font,
        "hatch.linewidth": 0.3,
    }
    undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with matplotlib.rc_context(settings):
        figure = _figure(trace, style)
        with os_errors_as(ConfigError, f"cannot write the picture {path}"):
            # The resolution of a PNG, and of the ops that are pixels in a vector file.
            figure.savefig(path, dpi=150, metadata=undated.get(path.suffix.lower()))


def _figure(trace: Trace, style: PictureStyle) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    unit = unit_of([trace])
    shown = trace.only(WITHOUT_MESSAGES)
    shown = replace(shown, start=shown.start * unit.scale, end=shown.end * unit.scale)
    row = 0.03 * style.font
    figure = Figure(
        figsize=(style.width, 0.12 * style.font + row * min(trace.ranks, 64)), layout="constrained"
    )
    axes = figure.add_subplot()
    drawn = [kind for kind in WITHOUT_MESSAGES if (shown.kind == kind).any()]
    labelled = len(shown) <= LABELLED
    # Gathers and reductions have a strip below the ops; two if they cross.
    strips = 2 if both_ways(shown) else int(np.isin(shown.kind, COLLECTIVES).any())
    floor = _HALF - _STRIP * strips
    places = dict.fromkeys(COLLECTIVES, (floor, _HALF))
    if strips == 2:
        places = {Activity.GATHER: (floor, floor + _STRIP), Activity.REDUCE: (floor + _STRIP, _HALF)}
    for kind in drawn:
        _bars(axes, shown, kind, labelled, *places.get(kind, (-_HALF, floor)))
    axes.set_ylim(trace.ranks - 0.5, -0.5)
    axes.set_xlim(float(shown.start.min(initial=0)), float(shown.end.max(initial=0)) or 1.0)
    axes.set_ylabel("rank")
    axes.set_xlabel(f"time ({unit.name})" if unit.name else "time")
    title = str(trace.info.get("schedule", "")) if style.title is None else style.title
    if title:
        axes.set_title(title)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    keys = [
        Patch(
            facecolor=WITHOUT_MESSAGES[kind].full,
            edgecolor="white",
            hatch=HATCHES.get(kind) if labelled else None,
            linewidth=0,
            label=WITHOUT_MESSAGES[kind].meaning,
        )
        for kind in drawn
    ]
    # As many keys in a row as the width has room for.
    columns = max(1, int(style.width * 72 / (style.font * 9)))
    figure.legend(handles=keys, loc="outside lower center", ncols=min(len(keys) or 1, columns), frameon=False)
    if labelled:
        figure.draw_without_rendering()  # only now it is known how wide a block is
        _labels(axes, shown, style.font * _LABEL, floor)
    return figure


def _bars(axes: Axes, trace: Trace, kind: Activity, hatched: bool, upper: float, lower: float) -> None:
    """Draw all ops of one kind and shade as one collection of rectangles; a pair's forward fills the upper half."""
    from matplotlib.collections import PolyCollection

    style, second, light = WITHOUT_MESSAGES[kind], second_of_pair(trace), lighter(trace)
    middle = (upper + lower) / 2
    # The lines between blocks, and the lines of a hatch, are light on the dark shade and dark on the light one.
    for shade, lines, of_shade in ((style.full, "white", ~light), (style.light, style.full, light)):
        rows = np.flatnonzero((trace.kind == kind) & of_shade)
        if not len(rows):
            continue
        top = trace.rank[rows] + np.where(second[rows], middle, upper)
        bottom = trace.rank[rows] + np.where(trace.paired[rows], middle, lower)
        left, right = trace.start[rows].astype(np.float64), trace.end[rows].astype(np.float64)
        edges = ((left, top), (right, top), (right, bottom), (left, bottom))
        corners = np.stack([np.stack(point, axis=1) for point in edges], axis=1)
        hatch, width = (HATCHES.get(kind), 0.7) if hatched else (None, 0.3)
        bars = PolyCollection(
            list(corners), facecolors=shade, edgecolors=lines, linewidths=width, hatch=hatch
        )
        bars.set_rasterized(len(trace) > RASTERIZED)
        axes.add_collection(bars)


def _labels(axes: Axes, trace: Trace, size: float, floor: float) -> None:
    """Write the microbatch on every block that has room for it, on a plain patch of the block's colour."""
    second, light = second_of_pair(trace), lighter(trace)
    box = axes.get_window_extent().transformed(axes.figure.dpi_scale_trans.inverted())
    low, high = axes.get_xlim()
    points = 72 * box.width / (high - low)
    tall = 72 * box.height / trace.ranks * (floor + _HALF)
    for row in np.flatnonzero(trace.microbatch >= 0):
        text = str(trace.microbatch[row])
        room = (float(trace.end[row]) - float(trace.start[row])) * points
        half = bool(trace.paired[row] or second[row])
        fitting = min(size, 0.95 * room / (_DIGIT * len(text)), tall * (0.35 if half else 0.8))
        if fitting < min(_LEAST_LABEL, size):
            continue
        x = (float(trace.start[row]) + float(trace.end[row])) / 2
        quarters = 2 + int(second[row]) - int(trace.paired[row])
        y = trace.rank[row] - _HALF + (floor + _HALF) * quarters / 4
        kind = Activity(int(trace.kind[row]))
        style = WITHOUT_MESSAGES[kind]
        ink, ground = ("black", style.light) if light[row] else ("white", style.full)
        patch: dict[str, Any] = {"facecolor": ground, "edgecolor": "none", "pad": 0.1 if half else 0.8}
        behind = patch if kind in HATCHES else None
        align: dict[str, Any] = {"ha": "center", "va": "center_baseline"}
        axes.text(x, y, text, fontsize=fitting, clip_on=True, color=ink, bbox=behind, **align)
