"""A trace as a picture: a timeline in SVG, PNG or PDF, drawn by matplotlib (the extra `pictures`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from penstock.errors import ConfigError
from penstock.show.blocks import lighter, second_of_pair
from penstock.show.palette import WITHOUT_MESSAGES
from penstock.show.units import unit_of
from penstock.trace.events import Activity, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".svg", ".png", ".pdf")
LABELLED = 600
RASTERIZED = 100_000


def draw_picture(trace: Trace, path: str | Path) -> None:
    """Draw a trace to a file: one row per rank, time from left to right, one colour per kind of op.

    The lighter shade marks every second stage of a rank; the halves of a fused pair are above each other. Up to `LABELLED`
    ops show their microbatch; more than `RASTERIZED` ops are pixels even in a vector file.

    Args:
        trace: the trace to draw; its messages are left out.
        path: file to write; its ending, one of `FORMATS`, sets the format.

    Raises:
        ConfigError: if matplotlib is not installed, the ending is not allowed, or the file cannot be written.
    """
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"cannot draw {path.name}: the name must end in {', '.join(FORMATS)}")
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ConfigError("pictures need matplotlib: pip install 'penstock[pictures]'") from error
    unit = unit_of([trace])
    shown = trace.only(WITHOUT_MESSAGES)
    shown = replace(shown, start=shown.start * unit.scale, end=shown.end * unit.scale)
    figure = Figure(figsize=(12, 1.2 + 0.3 * min(trace.ranks, 64)), layout="constrained")
    axes = figure.add_subplot()
    drawn = [kind for kind in WITHOUT_MESSAGES if (shown.kind == kind).any()]
    for kind in drawn:
        _bars(axes, shown, kind)
    if len(shown) <= LABELLED:
        _labels(axes, shown)
    axes.set_ylim(trace.ranks - 0.5, -0.5)
    axes.set_xlim(float(shown.start.min(initial=0)), float(shown.end.max(initial=0)) or 1.0)
    axes.set_ylabel("rank")
    axes.set_xlabel(f"time ({unit.name})" if unit.name else "time")
    axes.set_title(str(trace.info.get("schedule", "")))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    keys = [Patch(color=WITHOUT_MESSAGES[kind].full, label=WITHOUT_MESSAGES[kind].meaning) for kind in drawn]
    figure.legend(handles=keys, loc="outside lower center", ncols=len(WITHOUT_MESSAGES), frameon=False)
    # Without random identifiers and dates, the same trace gives the same file.
    with matplotlib.rc_context({"svg.hashsalt": "penstock"}):
        try:
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
        except OSError as error:
            raise ConfigError(f"cannot write the picture {path}: {error.strerror}") from error


def _bars(axes: Axes, trace: Trace, kind: Activity) -> None:
    """Draw all ops of one kind as one collection of rectangles; a pair's forward fills the upper half."""
    from matplotlib.collections import PolyCollection

    rows = np.flatnonzero(trace.kind == kind)
    second = second_of_pair(trace)
    top = trace.rank[rows] - 0.42 + 0.42 * second[rows]
    bottom = trace.rank[rows] + 0.42 - 0.42 * trace.paired[rows]
    left, right = trace.start[rows].astype(np.float64), trace.end[rows].astype(np.float64)
    corners = np.stack(
        [np.stack(point, axis=1) for point in ((left, top), (right, top), (right, bottom), (left, bottom))],
        axis=1,
    )
    shade = np.where(lighter(trace)[rows], WITHOUT_MESSAGES[kind].light, WITHOUT_MESSAGES[kind].full)
    bars = PolyCollection(list(corners), facecolors=shade.tolist(), edgecolors="white", linewidths=0.3)
    bars.set_rasterized(len(trace) > RASTERIZED)
    axes.add_collection(bars)


def _labels(axes: Axes, trace: Trace) -> None:
    second, light = second_of_pair(trace), lighter(trace)
    for row in np.flatnonzero(trace.microbatch >= 0):
        x = (float(trace.start[row]) + float(trace.end[row])) / 2
        y = trace.rank[row] + 0.21 * (int(second[row]) - int(trace.paired[row]))
        colour = "black" if light[row] else "white"
        axes.text(
            x, y, str(trace.microbatch[row]), ha="center", va="center", fontsize=6, clip_on=True, color=colour
        )
