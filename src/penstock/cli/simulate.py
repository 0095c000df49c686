"""``penstock simulate``: what a schedule costs, in a table and as a timeline."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.given import find_schedule, named_values, need_counts
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.schedule.placement import Placement
    from penstock.schedule.schedule import Schedule
    from penstock.simulate.costs import Costs
    from penstock.simulate.metrics import Metrics
    from penstock.trace.events import Trace


@click.command(
    epilog="Example:  penstock simulate 1f1b --ranks 4 --microbatches 8 --costs 1,1,1 --latency 0.1\n\n"
    "          penstock simulate --compare 1f1b,zb-h1,zb-v -p 8 -m 24 --costs costs.toml"
)
@click.argument("schedule", required=False)
@click.option("--ranks", "-p", type=click.IntRange(1), help="Pipeline ranks; a CSV file says its own.")
@click.option(
    "--microbatches", "-m", type=click.IntRange(1), help="Microbatches a step; a CSV file says its own."
)
@click.option(
    "--virtual-stages", "-v", type=click.IntRange(1),
    help="Stages a rank, for families that leave it open. Default: the family's own.",
)  # fmt: skip
@click.option(
    "--costs",
    default="1,1,1",
    show_default=True,
    metavar="FILE|F,B,W",
    help="Seconds a rank spends on a microbatch's forward, input gradient and weight gradient (a stage takes its share, "
    "a full backward B+W), or a TOML or JSON file that says it stage by stage.",
)
@click.option(
    "--latency", metavar="C", help="Seconds a message takes between ranks. Default: the file's, or 0."
)
@click.option(
    "--memory-limit",
    type=int,
    metavar="N",
    help="Activations (a microbatch on a stage) that a rank may hold. A family that adapts keeps within it, any other "
    "is refused if it holds more.",
)
@click.option(
    "--option", "-o", "options", multiple=True, metavar="NAME=VALUE",
    help="A further parameter of the family, as in group_size=4; several times.",
)  # fmt: skip
@click.option(
    "--reduce", "reduction", type=click.FloatRange(0), metavar="R",
    help="Seconds a rank reduces its gradients over replicas (a stage takes its share): shows what is exposed.",
)  # fmt: skip
@click.option("--compare", metavar="A,B,C", help="Schedules to put side by side.")
@click.option(
    "--html", type=click.Path(dir_okay=False, path_type=Path), metavar="PATH",
    help="Write a page with the timelines, the memory, and what would change them.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    schedule: str | None,
    ranks: int | None,
    microbatches: int | None,
    virtual_stages: int | None,
    costs: str,
    latency: str | None,
    memory_limit: int | None,
    options: tuple[str, ...],
    reduction: float | None,
    compare: str | None,
    html: Path | None,
    as_json: bool,
) -> None:
    """Predict what a schedule costs.

    SCHEDULE is a family (`penstock schedule list` shows them) or a CSV file. Its ops are timed exactly: every rank runs its
    list in order, every op as soon as what it needs is there. Two percentages of idle time are in use, and both are
    printed: that of the makespan, over all ranks, and that of the longest rank, which is the zero-bubble paper's.
    """
    others = [name.strip() for name in (compare or "").split(",") if name.strip()]
    names = [*([schedule] if schedule else []), *others]
    if not names:
        raise click.UsageError("name a schedule, or several with --compare")
    if reduction is not None and compare is not None:
        raise click.UsageError("--reduce is for one schedule, without --compare")
    values = named_values(options)
    if compare is not None:
        _check_options(values, names)
    runs = []
    for name in names:
        fitting = (virtual_stages, values) if compare is None else _fitting(name, virtual_stages, values)
        found = _schedule(name, ranks, microbatches, *fitting, costs, latency, memory_limit)
        runs.append(_run(found, costs, latency, memory_limit))
    exposed = None if reduction is None else _exposed(found, runs[0][1], reduction)
    if html is not None:
        _write_page(html, runs, costs, latency, memory_limit)
    if as_json:
        figures = [metrics.as_dict() for metrics, _ in runs]
        if exposed is not None:
            figures[0]["reduction"] = exposed
        click.echo(json.dumps(figures[0] if compare is None else {"schedules": figures}))
    elif compare is None:
        _show(*runs[0])
        if exposed is not None:
            _show_exposed(exposed)
    else:
        _show_side_by_side([metrics for metrics, _ in runs])
    if html is not None and not as_json:
        click.echo(f"\npage: {html}")


def _exposed(schedule: Schedule, trace: Trace, seconds: float) -> dict[str, object]:
    """What of the reduction of gradients is exposed, by how finely they are cut."""
    from penstock.schedule.program import lower
    from penstock.simulate.reduction import fewest_buckets, reduce_gradients

    program = lower(schedule)
    each = [seconds * schedule.ranks / schedule.stages] * schedule.stages
    counts = fewest_buckets(program, trace, each)
    return {
        "seconds": seconds,
        "exposed_in_one_bucket": [float(t) for t in reduce_gradients(program, trace, each).exposed],
        "exposed": [float(t) for t in reduce_gradients(program, trace, each, counts).exposed],
        "buckets": [counts[stage] for stage in range(schedule.stages)],
    }


def _show_exposed(found: Mapping[str, Any]) -> None:
    def worst(name: str) -> str:
        return f"{max(found[name]):.6g}"

    click.echo(
        f"\nreduction     {found['seconds']:.6g} a rank; {worst('exposed_in_one_bucket')} exposed after the last op if "
        f"a stage's gradients are one bucket\n"
        f"              {worst('exposed')} with {', '.join(map(str, found['buckets']))} buckets, stage by stage "
        "(1: it hides anyway)"
    )


def _write_page(
    path: Path, runs: list[tuple[Metrics, Trace]], costs: str, latency: str | None, memory_limit: int | None
) -> None:
    from penstock.show.report import write

    limit = {} if memory_limit is None else {"limit": memory_limit}
    traces = {metrics.schedule: replace(trace, info={**trace.info, **limit}) for metrics, trace in runs}
    settings = {"costs": costs, "latency": latency, "memory-limit": memory_limit}
    write(
        path,
        traces,
        title=f"Simulation of {', '.join(traces)}",
        settings="\n".join(f"{name} = {value}" for name, value in settings.items() if value is not None),
    )


def _check_options(values: Mapping[str, object], names: list[str]) -> None:
    """Of several schedules at least one has to take each option."""
    from penstock.errors import nearest
    from penstock.schedule.families import FAMILIES

    known = sorted({option for name in names if name in FAMILIES for option in FAMILIES[name].options})
    for option in values:
        if option not in known:
            taken = f"they take {', '.join(known)}" if known else "they take none"
            raise ConfigError(
                f"none of these schedules has an option {option!r}{nearest(option, known)}; {taken}"
            )


def _fitting(
    name: str, virtual_stages: int | None, values: Mapping[str, object]
) -> tuple[int | None, dict[str, object]]:
    """What of the virtual stages and options one schedule of several takes."""
    from penstock.schedule.families import FAMILIES

    family = FAMILIES.get(name)
    if family is None:
        return None, {}
    taken = {option: value for option, value in values.items() if option in family.options}
    return virtual_stages if family.chooses_virtual_stages else None, taken


def _schedule(
    name: str, ranks: int | None, microbatches: int | None, virtual_stages: int | None,
    values: Mapping[str, object], costs: str, latency: str | None, memory_limit: int | None,
) -> Schedule:  # fmt: skip
    """The schedule; a family that adapts to costs, latency and memory is given those of the simulation."""
    from penstock.schedule.families import FAMILIES
    from penstock.schedule.ops import Kind
    from penstock.schedule.placement import Placement

    known: dict[str, object] = {}
    if name in FAMILIES and "costs" in FAMILIES[name].options:
        counts = need_counts(name, ranks, microbatches)
        FAMILIES[name].require_counts(*counts)
        placement = Placement.loop(counts[0])
        priced = _priced(costs, latency, placement)
        known["costs"] = tuple(priced.seconds[:, kind].tolist() for kind in (Kind.F, Kind.I, Kind.W))
        known["latency"] = float(priced.communication.transfer(placement.stages).max(initial=0))
        known |= {} if memory_limit is None else {"memory_limit": memory_limit}
    return find_schedule(name, ranks, microbatches, virtual_stages, known | dict(values))


def _run(
    schedule: Schedule, costs: str, latency: str | None, memory_limit: int | None
) -> tuple[Metrics, Trace]:
    from penstock.schedule.check import check
    from penstock.schedule.memory import Budget
    from penstock.simulate.metrics import measure
    from penstock.simulate.simulator import simulate

    program = check(schedule, budget=None if memory_limit is None else Budget(memory_limit)).program
    priced = _priced(costs, latency, schedule.placement)
    trace = simulate(program, priced)
    return measure(schedule, priced, trace), trace


def _priced(costs: str, latency: str | None, placement: Placement) -> Costs:
    from penstock.simulate.cost_file import read_costs
    from penstock.simulate.costs import Communication, Costs, Link

    pause = None if latency is None else _number(latency)
    if latency is not None and pause is None:
        raise ConfigError(f"--latency is a number of seconds, not {latency!r}")
    numbers = [_number(word) for word in costs.split(",")]
    if len(numbers) == 3 and None not in numbers:
        f, b, w = (number for number in numbers if number is not None)
        link = Link(pause or 0)
        return Costs.of(placement, f, b, w, communication=Communication(same_node=link, other_node=link))
    if not os.path.exists(costs):
        raise ConfigError(f"--costs is three numbers, as in 1,1,1, or a file; {costs!r} is neither")
    return read_costs(costs, placement, pause)


def _number(text: str) -> int | float | None:
    """A number as it is written, so that whole ones stay whole."""
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return None


def _show(metrics: Metrics, trace: Trace) -> None:
    from rich.console import Console

    from penstock.show.terminal import bubble_table, draw_terminal
    from penstock.trace.bubbles import bubbles

    console = Console(highlight=False)
    click.echo(
        f"{metrics.schedule}: {metrics.ranks} ranks, {metrics.stages} stages, {metrics.microbatches} microbatches\n\n"
        f"makespan      {metrics.makespan:.6g}  from the first start to the last end of all ranks\n"
        f"longest       {metrics.longest:.6g}  the largest span of one rank\n"
        f"lower bound   {metrics.lower_bound:.6g}  no order with this placement and these costs is shorter; "
        f"the makespan is {metrics.over_bound:.1%} above it\n"
        f"bubble        {metrics.bubble_of_makespan:.1%} of ranks x makespan; "
        f"{metrics.bubble_of_longest:.1%} of the longest rank (the zero-bubble paper's rate)\n"
    )
    console.print(bubble_table(bubbles(trace), {"peak\nchunks": metrics.peak_activations.tolist()}))
    console.print()
    console.print(draw_terminal(trace, console.width))


def _show_side_by_side(runs: list[Metrics]) -> None:
    from rich.console import Console

    from penstock.show.terminal import plain_table

    bubbles = ("bubble/\nmakespan", "bubble/\nlongest")
    table = plain_table(
        "schedule", "v", "makespan", "longest", "above\nbound", *bubbles, "peak\nchunks", "peak\n1/p"
    )
    table.columns[0].justify = "left"
    for found in runs:
        held = int(found.peak_activations.max())
        table.add_row(
            found.schedule, f"{found.stages / found.ranks:g}", f"{found.makespan:.6g}", f"{found.longest:.6g}",
            f"{found.over_bound:.1%}", f"{found.bubble_of_makespan:.1%}", f"{found.bubble_of_longest:.1%}",
            str(held), f"{held * found.ranks / found.stages:.4g}",
        )  # fmt: skip
    Console(highlight=False).print(table)
    click.echo(
        "\nv                stages a rank\n"
        "above bound      the makespan, over the least that any order with this placement and these costs can reach\n"
        "bubble/makespan  the idle share of ranks x makespan\n"
        "bubble/longest   the idle share of the longest rank, which is the zero-bubble paper's rate\n"
        "peak             most activations of a rank, in chunks and in chunks of 1/p of the model"
    )
