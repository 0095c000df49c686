"""A trace as a timeline in text: one line a rank, time from left to right, on one screen.

Every op starts with its letter, so the drawing reads without colours, too; `·` is an idle rank.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.trace.bubbles import Bubbles
from penstock.trace.events import Activity, Trace

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

MOST_LINES = 32
IDLE = "·"
_CAUSES = {
    "warm_up": "warm-up",
    "cool_down": "cool-down",
    "activation": "wait for\nactivation",
    "gradient": "wait for\ngradient",
    "communication": "commu-\nnication",
    "overhead": "overhead",
    "imbalance": "imbalance",
}
_NARROW = {
    **_CAUSES,
    "cool_down": "cool-\ndown",
    "activation": "wait for\nacti-\nvation",
    "overhead": "over-\nhead",
    "imbalance": "imbal-\nance",
}
_LETTERS = {
    Activity.F: "F",
    Activity.B: "B",
    Activity.I: "I",
    Activity.W: "W",
    Activity.R: "R",
    Activity.REDUCE: "=",
    Activity.OPTIMIZER: "O",
}
_STYLES = {
    "F": ("black on bright_blue", "black on blue"),
    "B": ("black on bright_green", "black on green"),
    "I": ("black on bright_cyan", "black on cyan"),
    "W": ("black on bright_yellow", "black on yellow"),
    "R": ("black on bright_magenta", "black on magenta"),
    "&": ("black on bright_white", "black on white"),
    "=": ("red", "red"),
    "O": ("white on red", "white on red"),
    IDLE: ("bright_black", "bright_black"),
}
_MEANINGS = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "R": "recompute",
    "&": "forward and backward in one",
    "=": "reduction",
    "O": "optimizer",
}


def draw_terminal(trace: Trace, width: int | None = None) -> Text:
    """Draw a trace as text that rich colours by kind of op; ``str()`` of it is the same without colours.

    An op wide enough shows its microbatch, too, and its stage where ranks hold several; the shade tells a rank's stages
    apart. Of more than `MOST_LINES` ranks the first and the last are drawn.

    Args:
        trace: what to draw; its messages are left out.
        width: columns to use; the terminal's if not given.
    """
    from rich.text import Text

    columns = width or shutil.get_terminal_size().columns
    shown = trace.only(_LETTERS)
    text = Text(no_wrap=True, overflow="crop")
    if not len(shown):
        return text.append("nothing ran")
    begin, end = float(shown.start.min()), float(shown.end.max())
    margin = len(f"rank {trace.ranks - 1} ")
    lines = {
        rank: shown.select(rows)
        for rank, rows in enumerate(shown.rank_slices())
        if not _hidden(rank, trace.ranks)
    }
    cells = _cells(lines.values(), max(8, columns - margin), end - begin)
    centres = begin + (np.arange(cells) + 0.5) * ((end - begin) / cells)
    several = any(len(_stages(line.stage)) > 1 for line in lines.values())
    used: set[str] = set()
    for rank, line in lines.items():
        if rank and rank - 1 not in lines:
            text.append(f"{'⋮'.rjust(margin - 1)} {trace.ranks - len(lines)} ranks more\n")
        text.append(f"rank {rank} ".rjust(margin))
        for piece, letter, shade in _line(line, centres, several):
            used.add(letter)
            text.append(piece, _STYLES[letter][shade])
        text.append("\n")
    text.append(_axis(margin, cells, begin, end))
    legend = [f"{letter} {meaning}" for letter, meaning in _MEANINGS.items() if letter in used]
    return text.append(" " * margin + "   ".join([*legend, f"{IDLE} idle"]))


def bubble_table(
    split: Bubbles,
    more: Mapping[str, Sequence[object]],
    *,
    each: float = 1.0,
    rounded: bool = False,
    narrow: bool = False,
) -> Table:
    """Where every rank's time went, a line a rank, as a table for rich; of more than `MOST_LINES` ranks some are left out.

    Args:
        split: a cause that no rank has gets no column.
        more: further columns by their heads, a value a rank.
        each: how many of the unit shown the trace's unit has.
        rounded: times to the thousandth of the whole; else to six digits.
        narrow: heads are broken up, so that every cause fits into 80 columns.
    """
    causes = split.causes
    heads = _NARROW if narrow else _CAUSES
    table = plain_table("rank", "busy", "bubble", *(heads[cause] for cause in causes), *more, gap=2 - narrow)
    whole = float(split.makespan) * each
    digits = f".{max(0, 2 - math.floor(math.log10(whole)))}f" if rounded and whole > 0 else ".6g"
    ranks = len(split.busy)
    for rank in range(ranks):
        if ranks > MOST_LINES and MOST_LINES // 2 <= rank < ranks - MOST_LINES // 2:
            if rank == MOST_LINES // 2:
                table.add_row("...")
            continue
        times = (split.busy, split.makespan - split.busy, *(split.idle[cause] for cause in causes))
        table.add_row(
            str(rank),
            *(_figure(time[rank], split.makespan, each, digits) for time in times),
            *(str(c[rank]) for c in more.values()),
        )
    return table


def _figure(time: Any, whole: Any, each: float, digits: str) -> str:
    return f"{time * each:{digits}}" if time > 1e-9 * whole else "0"


def plain_table(*columns: str, gap: int = 2) -> Table:
    """An empty table with right-aligned columns, narrow enough for a terminal."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _cells(lines: Iterable[Trace], most: int, span: float) -> int:
    """How many cells to use: so many that the shortest op has a whole number of them, if it has one at all."""
    spent = np.concatenate([line.end - line.start for line in lines])
    shortest = float(spent[spent > 0].min(initial=span))
    each = int(most * shortest / span) if span > 0 else 0
    return min(most, round(span / shortest * each)) if each else most


def _hidden(rank: int, ranks: int) -> bool:
    return ranks > MOST_LINES and MOST_LINES // 2 <= rank < ranks - MOST_LINES // 2 + 1


def _line(trace: Trace, centres: np.ndarray[Any, Any], several: bool) -> list[tuple[str, str, int]]:
    """One rank's line in pieces: the text of an op, its letter, and its shade."""
    work = np.flatnonzero(trace.kind != Activity.REDUCE)
    reductions = np.flatnonzero(trace.kind == Activity.REDUCE)
    event = np.full(len(centres), -1)
    for rows in (reductions, work):
        at = np.searchsorted(trace.start[rows], centres, side="right") - 1
        running = at >= 0
        running[running] = trace.end[rows[at[running]]] > centres[running]
        event[running] = rows[at[running]]
    # Both halves of a pair start at once, and the search finds the second.
    first = np.concatenate([[False], trace.paired[:-1]])
    event[event >= 0] -= first[event[event >= 0]]
    stages = _stages(trace.stage)
    cuts = [0, *(np.flatnonzero(np.diff(event)) + 1).tolist(), len(event)]
    pieces = []
    for a, b in pairwise(cuts):
        row = int(event[a])
        if row < 0:
            pieces.append((IDLE * (b - a), IDLE, 0))
            continue
        letter = "&" if trace.paired[row] else _LETTERS[Activity(int(trace.kind[row]))]
        label = _label(trace, row, several)
        shade = int(np.searchsorted(stages, trace.stage[row])) % 2
        piece = label if len(label) <= b - a else letter
        pieces.append((piece.ljust(b - a, "=" if letter == "=" else " "), letter, shade))
    return pieces


def _stages(column: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.unique(column[column >= 0])


def _label(trace: Trace, row: int, several: bool) -> str:
    kind = Activity(int(trace.kind[row]))
    if trace.stage[row] < 0 or trace.microbatch[row] < 0:
        return _LETTERS[kind]
    stage = str(trace.stage[row]) if several else ""
    label = f"{stage}{_LETTERS[kind]}{trace.microbatch[row]}"
    return f"{label}&{_label(trace, row + 1, several)}" if trace.paired[row] else label


def _axis(margin: int, cells: int, begin: float, end: float) -> str:
    left, right = f"{begin:.6g}", f" {end:.6g}"
    return " " * margin + left + right.rjust(cells - len(left)) + "\n"
