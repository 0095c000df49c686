"""``penstock trace``: where a run's time went, in a table, as a timeline, and as a page."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.show.run import RunView
    from penstock.trace.events import Trace

WIDE = 108
_PATH = click.Path(dir_okay=False, path_type=Path)


@click.command(
    epilog="Example:  penstock trace runs/my-run --html report.html\n\n"
    "          penstock trace runs/my-run --step 10 --chrome step.json --svg step.svg"
)
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--step", type=int, metavar="N", help="The step to show. Default: the last that was traced.")
@click.option(
    "--html", type=_PATH, metavar="PATH", help="Write the report page: all steps, or the one of --step."
)
@click.option(
    "--chrome", type=_PATH, metavar="PATH", help="Write JSON for ui.perfetto.dev and chrome://tracing."
)
@click.option("--png", type=_PATH, metavar="PATH", help="Draw the timeline as PNG.")
@click.option("--svg", type=_PATH, metavar="PATH", help="Draw the timeline as SVG.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    run: Path,
    step: int | None,
    html: Path | None,
    chrome: Path | None,
    png: Path | None,
    svg: Path | None,
    as_json: bool,
) -> None:
    """Show where the time of a run went.

    RUN is a run's folder, as `penstock train` leaves it, or a single trace file (.npz). What cannot be read is named, and
    the rest is shown.
    """
    from penstock.show.run import read_run

    for path, ending in ((png, ".png"), (svg, ".svg")):
        if path is not None and path.suffix.lower() != ending:
            raise ConfigError(f"--{ending[1:]} {path}: the name must end in {ending}")
    found = read_run(run)
    chosen = found.choose(step)
    trace = found.traces[chosen]
    for problem in found.problems:
        click.echo(f"penstock: {problem}", err=True)
    written = _write(found, trace, step, html, chrome, [path for path in (png, svg) if path])
    if as_json:
        click.echo(json.dumps(_figures(found, chosen, trace) | {"written": written}))
        return
    _show(found, chosen, trace)
    for what, where in written.items():
        click.echo(f"{what}: {where}")


def _write(
    run: RunView, trace: Trace, step: int | None, html: Path | None, chrome: Path | None, pictures: list[Path]
) -> dict[str, str]:
    from penstock.show.chrome import write_chrome
    from penstock.show.picture import draw_picture
    from penstock.show.run import write_report

    jobs: list[tuple[str, Path, Callable[[Path], object]]] = []
    if html is not None:
        jobs.append(("page", html, lambda path: write_report(run, path, step)))
    if chrome is not None:
        jobs.append(("chrome", chrome, lambda path: write_chrome(trace, path)))
    jobs += [(path.suffix[1:].lower(), path, lambda path: draw_picture(trace, path)) for path in pictures]
    for _, path, write in jobs:
        write(path)
    return {what: str(path) for what, path, _ in jobs}


def _figures(run: RunView, step: int, trace: Trace) -> dict[str, Any]:
    from penstock.show.page_data import look_at
    from penstock.trace.bubbles import bubble_fraction
    from penstock.trace.join import present
    from penstock.trace.memory_curve import peaks

    seen = look_at(f"step {step}", trace)
    advice = seen.advice
    return {
        "step": step,
        "steps": list(run.traces),
        "problems": list(run.problems),
        "schedule": trace.info.get("schedule"),
        "source": trace.info.get("source"),
        "ranks": trace.ranks,
        "ranks_present": present(trace),
        "clock_error": trace.info.get("clock_error"),
        "makespan": float(seen.split.makespan),
        "bubble_of_makespan": bubble_fraction(trace),
        "busy": seen.split.busy.tolist(),
        "bubble_causes": {cause: time.tolist() for cause, time in seen.split.idle.items()},
        "peak_held": None if trace.held is None else peaks(trace).tolist(),
        "planned_makespan": None if seen.plan is None else float(seen.plan.trace.end.max()),
        "where": seen.where,
        "what": None if advice is None else advice.what,
        "changes": [] if advice is None else [vars(change) for change in advice.changes],
    }


def _show(run: RunView, step: int, trace: Trace) -> None:
    from rich.console import Console

    from penstock.show.page_data import amount, look_at, unit_of
    from penstock.show.terminal import bubble_table, draw_terminal
    from penstock.trace.memory_curve import peaks

    console = Console(highlight=False)
    seen = look_at(f"step {step}", trace)
    others = f"; traced are {', '.join(map(str, run.traces))}" if len(run.traces) > 1 else ""
    name = f"{run.title}, step {step}{others}" if step else run.title
    unit = unit_of([trace])
    took = f"{float(seen.split.makespan) * unit.each:.4g} {unit.name}".rstrip()
    click.echo(f"{name}\n{trace.info.get('schedule', 'a trace')}, {trace.ranks} ranks, {took}\n")
    click.echo(seen.where)
    click.echo(f"There is no plan: {seen.unplanned}" if seen.advice is None else seen.advice.what)
    click.echo(f"\nTimes are in {unit.name}." if unit.name else "")
    more = (
        {} if trace.held is None else {"most\nheld": [amount(trace, held) for held in peaks(trace).tolist()]}
    )
    narrow = console.width < WIDE
    console.print(bubble_table(seen.split, more, each=unit.each, rounded=bool(unit.name), narrow=narrow))
    console.print()
    console.print(draw_terminal(trace, console.width))
