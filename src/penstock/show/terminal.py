"""A trace as a timeline in text, one line per rank with time from left to right, and its times as a table.

Every op starts with its letter, so the drawing can be read without colours, too; `·` is an idle rank. Gathers of weights
and reductions have a line of their own below the ops of the rank.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.show.blocks import lighter, second_of_pair, several_stages
from penstock.show.palette import HEADINGS, WITHOUT_MESSAGES
from penstock.show.units import TICKS, Unit, decimals
from penstock.trace.bubbles import Bubbles
from penstock.trace.events import COLLECTIVES, Activity, Trace, both_ways

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

MAX_LINES = 32
IDLE = "·"
_OPS = tuple(kind for kind in WITHOUT_MESSAGES if kind not in COLLECTIVES)
_LETTERS = {kind: style.letter for kind, style in WITHOUT_MESSAGES.items()}
_STYLES = {style.letter: style.terminal for style in WITHOUT_MESSAGES.values()} | {
    "&": ("black on bright_white", "black on white"),
    IDLE: ("bright_black", "bright_black"),
}
_MEANINGS = {style.letter: style.meaning for style in WITHOUT_MESSAGES.values()} | {
    "&": "forward and backward in one"
}


def draw_terminal(trace: Trace, width: int | None = None) -> Text:
    """Draw a trace as text that rich colours by kind of op; ``str()`` of it is the same without colours.

    An op that is wide enough also shows its microbatch, and its stage if ranks have several; the shade tells a rank's
    stages apart. Of more than `MAX_LINES` ranks, only the first and the last are drawn.
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
    ops = {rank: line.only(_OPS) for rank, line in lines.items()}
    cells = _cells(ops.values(), max(8, columns - margin), end - begin)
    centres = begin + (np.arange(cells) + 0.5) * ((end - begin) / cells)
    several = any(several_stages(line) for line in lines.values())
    used: set[str] = set()
    apart = both_ways(shown)  # gathers and reductions have a line each
    for rank, line in lines.items():
        if rank and rank - 1 not in lines:
            text.append(f"{'⋮'.rjust(margin - 1)} {trace.ranks - len(lines)} more ranks\n")
        text.append(f"rank {rank} ".rjust(margin))
        pieces = _line(ops[rank], centres, several, IDLE)
        for kinds in ([kind] for kind in COLLECTIVES) if apart else (COLLECTIVES,):
            if len(moved := line.only(kinds)):
                pieces.append((f"\n{' ' * margin}", "", 0))
                pieces += _line(moved, centres, several, " ")
        for piece, letter, shade in pieces:
            used.add(letter)
            text.append(piece, _STYLES[letter][shade] if letter else "")
        text.append("\n")
    text.append(_axis(margin, cells, begin, end))
    legend = [f"{letter} {meaning}" for letter, meaning in _MEANINGS.items() if letter in used]
    return text.append(" " * margin + "   ".join([*legend, f"{IDLE} idle"]))


def bubble_table(
    bubbles: Bubbles, more: Mapping[str, Sequence[object]], unit: Unit = TICKS, *, narrow: bool = False
) -> Table:
    """Return a table for rich of where every rank's time went; of more than `MAX_LINES` ranks, some are left out.

    `more` are further columns by their heads. Times are shown to the thousandth of the makespan, simulated ticks to
    six digits. A `narrow` table breaks up its heads so that every cause fits into 80 columns.
    """
    causes = bubbles.causes
    heads = [HEADINGS[cause][narrow] for cause in causes]
    table = plain_table("rank", "busy", "bubble", *heads, *more, gap=2 - narrow)
    times = (bubbles.busy, bubbles.makespan - bubbles.busy, *(bubbles.idle[cause] for cause in causes))
    digits = f".{decimals(float(bubbles.makespan) * unit.scale)}f" if unit.name else ".6g"
    ranks = len(bubbles.busy)
    for rank in range(ranks):
        if ranks > MAX_LINES and MAX_LINES // 2 <= rank < ranks - MAX_LINES // 2:
            if rank == MAX_LINES // 2:
                table.add_row("...")
            continue
        shown = (
            f"{time[rank] * unit.scale:{digits}}" if time[rank] > 1e-9 * bubbles.makespan else "0"
            for time in times
        )
        table.add_row(str(rank), *shown, *(str(column[rank]) for column in more.values()))
    return table


def plain_table(*columns: str, gap: int = 2) -> Table:
    """Return an empty table with right-aligned columns, narrow enough for a terminal."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _cells(lines: Iterable[Trace], available: int, span: float) -> int:
    """Return how many cells to use: if possible as many as give the shortest op a whole number of them."""
    spent = np.concatenate([line.end - line.start for line in lines])
    shortest = float(spent[spent > 0].min(initial=span))
    each = int(available * shortest / span) if span > 0 else 0
    return min(available, round(span / shortest * each)) if each else available


def _hidden(rank: int, ranks: int) -> bool:
    # One rank less than MAX_LINES is drawn, because the count of the hidden ones has a line, too.
    return ranks > MAX_LINES and MAX_LINES // 2 <= rank < ranks - MAX_LINES // 2 + 1


def _line(
    trace: Trace, centres: np.ndarray[Any, Any], several: bool, nothing: str
) -> list[tuple[str, str, int]]:
    """Return a line in pieces: the text of an event, its letter, and its shade; `nothing` fills the time without any."""
    event = np.searchsorted(trace.start, centres, side="right") - 1
    begun = event >= 0
    event[begun] = np.where(trace.end[event[begun]] > centres[begun], event[begun], -1)
    # Both halves of a pair start at once, and the search finds the second.
    event[event >= 0] -= second_of_pair(trace)[event[event >= 0]]
    shades = lighter(trace)
    cuts = [0, *(np.flatnonzero(np.diff(event)) + 1).tolist(), len(event)]
    pieces = []
    for a, b in pairwise(cuts):
        row = int(event[a])
        if row < 0:
            pieces.append((nothing * (b - a), nothing.strip(), 0))
            continue
        letter = "&" if trace.paired[row] else _LETTERS[Activity(int(trace.kind[row]))]
        label = _label(trace, row, several)
        piece = label if len(label) <= b - a else letter
        fill = letter if trace.kind[row] in COLLECTIVES else " "
        pieces.append((piece.ljust(b - a, fill), letter, int(shades[row])))
    return pieces


def _label(trace: Trace, row: int, several: bool) -> str:
    kind = Activity(int(trace.kind[row]))
    stage = str(trace.stage[row]) if several and trace.stage[row] >= 0 else ""
    if trace.microbatch[row] < 0:
        return f"{_LETTERS[kind]}{stage}"
    label = f"{stage}{_LETTERS[kind]}{trace.microbatch[row]}"
    return f"{label}&{_label(trace, row + 1, several)}" if trace.paired[row] else label


def _axis(margin: int, cells: int, begin: float, end: float) -> str:
    left, right = f"{begin:.6g}", f" {end:.6g}"
    return " " * margin + left + right.rjust(cells - len(left)) + "\n"
