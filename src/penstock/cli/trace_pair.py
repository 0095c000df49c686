"""``penstock trace A B``: two runs beside each other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from penstock.show.comparison.run_pair import RunPair
    from penstock.show.run import RunView


def compare_runs(first: RunView, second: RunView, step: int | None, html: Path | None, as_json: bool) -> None:
    """Print a comparison of two runs as text or JSON, and write its page if `html` is given."""
    from penstock.show.comparison.run_pair import pair_of

    pair = pair_of(first, second, step)
    for run in pair.runs:
        for problem in run.problems:
            click.echo(f"penstock: {problem}", err=True)
    written = {}
    if html is not None:
        from penstock.show.comparison.compare_page import write_comparison

        written["page"] = str(write_comparison(html, pair))
    if as_json:
        click.echo(json.dumps(pair.as_dict() | {"written": written}))
        return
    _show(pair)
    for kind, file in written.items():
        click.echo(f"{kind}: {file}")


def _show(pair: RunPair) -> None:
    from rich.console import Console

    from penstock.show.comparison.run_pair import NAMES
    from penstock.show.terminal import draw_terminal

    console = Console(highlight=False)
    for name, title in zip(NAMES, pair.titles, strict=True):
        click.echo(f"{name}  {title}")
    click.echo(f"\n{pair.sentence}\n")
    _table(console, ("", *NAMES), pair.figures())
    click.echo("\nMean of the ranks:")
    _table(console, ("", *NAMES, "B - A"), pair.times())
    if all(run.settings for run in pair.runs):
        differences = pair.config_differences()
        click.echo("\nDifferences of the configs:" if differences else "\nThe configs are equal.")
        if differences:
            _table(console, ("key", *NAMES), differences)
    longest = max(float(step.bubbles.makespan) for step in pair.steps) or 1.0
    for name, step in zip(NAMES, pair.steps, strict=True):
        width = max(20, round(console.width * float(step.bubbles.makespan) / longest))
        click.echo(f"\n{name}")
        console.print(draw_terminal(step.trace, width))


def _table(console: object, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    assert isinstance(console, Console)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for n, head in enumerate(heads):
        table.add_column(head, justify="left" if n == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
