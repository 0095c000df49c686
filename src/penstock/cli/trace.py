"""``penstock trace``: the times of a run's steps as a table, a timeline and a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import fill
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.base.counts import plural
from penstock.base.errors import ConfigError
from penstock.base.output_files import PAGE, OutputFile, kind_of_start, require_outputs
from penstock.cli.figure_options import FigureFile, figure_options, write_figure
from penstock.show.comparison import NAMES, RunPair, pair_of, write_comparison
from penstock.show.run import RunView, read_run, write_report
from penstock.show.terminal import bubble_table, draw_terminal
from penstock.show.units import amount, unit_of
from penstock.simulate.cost_file import write_costs
from penstock.trace.bubbles import bubble_fraction

WIDE = 108
_COSTS = kind_of_start("a file of costs", b"medians by stage", b'{\n "F": [', within=1000)
_PATH = click.Path(dir_okay=False, path_type=Path)


@click.command(
    epilog="Example:  penstock trace runs/my-run --html report.html\n\n"
    "          penstock trace runs/my-run --step 10 --out step.svg --title ''\n\n"
    "          penstock trace runs/my-run --costs costs.toml\n\n"
    "          penstock trace runs/before runs/after --html compared.html"
)
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN [RUN]")
@click.option("--step", type=int, metavar="N", help="Step to show. Default: the last traced step.")
@click.option(
    "--html",
    type=_PATH,
    metavar="PATH",
    help="Write the report page with all traced steps, or only --step. Of two runs: the page that compares them.",
)
@figure_options
@click.option(
    "--costs", type=_PATH, metavar="PATH",
    help="Write the step's costs by stage, medians of what was measured, for `penstock simulate --costs` (TOML or .json).",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    *,
    runs: tuple[Path, ...],
    step: int | None,
    html: Path | None,
    figure: FigureFile | None,
    costs: Path | None,
    as_json: bool,
) -> None:
    """Show where the time of a run went.

    RUN is the folder of a run, or a single trace file (.npz). Files that cannot be read are named on stderr, and the rest is
    shown. Two runs are compared: their configs, the time of a step by cause, and its timeline.
    """
    if len(runs) > 2:
        raise click.UsageError(f"give one run, or two to compare, got {len(runs)}")
    outputs = (
        None if html is None else OutputFile("--html", html, PAGE),
        None if costs is None else OutputFile("--costs", costs, _COSTS),
        figure and figure.output,
    )
    require_outputs(outputs, runs)
    if len(runs) == 2:
        if single := next((file.option for file in outputs[1:] if file is not None), None):
            raise click.UsageError(f"{single} takes one run, got two; compare them with --html")
        compare_runs(read_run(runs[0]), read_run(runs[1]), step, html, as_json)
        return
    view = read_run(runs[0])
    chosen = view.choose(step)
    for problem in view.problems:
        click.echo(f"penstock: {problem}", err=True)
    written = _write(view, chosen, step, html, figure)
    if costs is not None:
        written["costs"] = str(_write_costs(view, chosen, costs))
    if as_json:
        click.echo(json.dumps(_figures(view, chosen) | {"written": written}))
        return
    _show(view, chosen)
    for kind, file in written.items():
        click.echo(f"{kind}: {file}")


def _write(
    run: RunView, chosen: int, step: int | None, html: Path | None, figure: FigureFile | None
) -> dict[str, str]:
    written: dict[str, str] = {}
    if html is not None:
        written["page"] = str(write_report(run, html, step))
    if figure is not None:
        write_figure(run.traces[chosen], figure)
        written["timeline"] = str(figure.path)
    return written


def _write_costs(run: RunView, number: int, path: Path) -> Path:
    step = run.steps[number]
    if step.plan is None:
        raise ConfigError(f"{run.title} has no costs of every stage to write: {step.unplanned}")
    seconds = "measured" if step.measured else "simulated"
    return write_costs(
        path,
        step.plan.costs,
        f"{run.title}, step {number}: {seconds} medians by stage, in the trace's unit of time",
    )


def _figures(run: RunView, number: int) -> dict[str, Any]:
    step = run.steps[number]
    trace, advice = step.trace, step.advice
    return {
        "step": number,
        "steps": list(run.traces),
        "problems": list(run.problems),
        "schedule": trace.info.get("schedule"),
        "source": trace.info.get("source"),
        "ranks": trace.ranks,
        "ranks_present": step.ranks,
        "clock_error": trace.info.get("clock_error"),
        "makespan": float(step.bubbles.makespan),
        "bubble_of_makespan": bubble_fraction(trace),
        "busy": step.bubbles.busy.tolist(),
        "bubble_causes": {cause: time.tolist() for cause, time in step.bubbles.idle.items()},
        "peak_held": None if step.peaks is None else step.peaks.tolist(),
        "planned_makespan": None if step.plan is None else float(step.plan.trace.end.max()),
        "where": step.where,
        "what": None if advice is None else advice.sentence,
        "changes": [] if advice is None else [asdict(change) for change in advice.changes],
    }


def _show(run: RunView, number: int) -> None:
    console = Console(highlight=False)
    step = run.steps[number]
    trace, unit = step.trace, unit_of([step.trace])
    others = f"; traced steps: {', '.join(map(str, run.traces))}" if len(run.traces) > 1 else ""
    name = f"{run.title}, step {number}{others}" if number else run.title
    click.echo(
        f"{name}\n{trace.info.get('schedule', 'a trace')}, {plural(trace.ranks, 'rank')}, "
        f"{unit.text(step.bubbles.makespan)}\n"
    )
    for sentence in step.sentences:
        click.echo(fill(sentence, console.width, break_long_words=False, break_on_hyphens=False))
    for n, line in enumerate(step.to_try):
        click.echo(f"{'       or: ' if n else 'To try it: '}{line}")
    click.echo(f"\nTimes are in {unit.name}." if unit.name else "")
    held = {} if step.peaks is None else {"most\nheld": [amount(trace, peak) for peak in step.peaks.tolist()]}
    console.print(bubble_table(step.bubbles, held, unit, narrow=console.width < WIDE))
    console.print()
    console.print(draw_terminal(trace, console.width))


def compare_runs(first: RunView, second: RunView, step: int | None, html: Path | None, as_json: bool) -> None:
    """Print a comparison of two runs as text or JSON, and write its page if `html` is given."""
    pair = pair_of(first, second, step)
    for run in pair.runs:
        for problem in run.problems:
            click.echo(f"penstock: {problem}", err=True)
    written = {}
    if html is not None:
        written["page"] = str(write_comparison(html, pair))
    if as_json:
        click.echo(json.dumps(pair.as_dict() | {"written": written}))
        return
    _show_pair(pair)
    for kind, file in written.items():
        click.echo(f"{kind}: {file}")


def _show_pair(pair: RunPair) -> None:
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


def _table(console: Console, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for n, head in enumerate(heads):
        table.add_column(head, justify="left" if n == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
