"""``penstock simulate``: the costs of a schedule, in a table and as a timeline."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from penstock.base.counts import describe_size
from penstock.base.errors import ConfigError, nearest
from penstock.base.output_files import PAGE, OutputFile, require_outputs
from penstock.cli.cost_arguments import COSTS, LATENCY, late_ranks, priced
from penstock.cli.figure_options import FigureFile, figure_options, write_figure
from penstock.cli.schedule_arguments import (
    find_schedule,
    named_values,
    need_counts,
    schedule_options,
    sharding_options,
)
from penstock.schedule.check import check
from penstock.schedule.families import FAMILIES, require_family
from penstock.schedule.families.searched import shaped_placement
from penstock.schedule.memory import Budget
from penstock.schedule.ops import Kind
from penstock.schedule.residency import Sharding
from penstock.schedule.schedule import Schedule
from penstock.schedule.text import is_csv
from penstock.show.analysis import StepAnalysis
from penstock.show.planned import PlannedStep
from penstock.show.report import write
from penstock.show.terminal import bubble_table, draw_terminal, plain_table
from penstock.simulate.costs import Costs
from penstock.simulate.metrics import Metrics, measure
from penstock.simulate.reduction import reduce_gradients
from penstock.simulate.simulator import simulate
from penstock.trace.bubbles import Bubbles


@click.command(
    epilog="Example:  penstock simulate 1f1b --ranks 4 --microbatches 8 --costs 1,1,1 --latency 0.1\n\n"
    "          penstock simulate --compare 1f1b,zb-h1,zb-v -p 8 -m 24 --costs costs.toml\n\n"
    "          penstock simulate zb-v -p 4 -m 8 --out zb-v.pdf --width 6.9 --font 8\n\n"
    "          penstock simulate breadth-first -p 4 -m 8 -v 4 --shard weights --window 2 --gather 2 --reduce 1"
)
@click.argument("schedule", required=False)
@schedule_options
@COSTS
@LATENCY
@click.option(
    "--memory-limit", type=int, metavar="N",
    help="Activations (one microbatch on one stage each) that a rank may hold. Families that adapt stay within the limit; "
    "any other schedule that needs more is rejected. Default: no limit.",
)  # fmt: skip
@click.option(
    "--reduce", "reduction", type=click.FloatRange(0), metavar="R",
    help="Seconds that a rank spends on reducing its gradients over replicas, shared out over its stages; prints how much "
    "of that is exposed. With --shard, each reduction takes so long. Default: no reduction.",
)  # fmt: skip
@click.option(
    "--gather", type=click.FloatRange(0), metavar="G",
    help="Seconds in which replicas gather all weights of a rank once, with --shard weights. Default: the file's, or none.",
)  # fmt: skip
@sharding_options
@click.option(
    "--late", "late_texts", multiple=True, metavar="RANK=SHARE",
    help="Ops of this rank take longer by a share of their time, such as 2=0.1; the order stays that of ranks in time. May "
    "be repeated. Default: none.",
)  # fmt: skip
@click.option("--compare", metavar="A,B,C", help="Schedules to compare side by side.")
@click.option(
    "--html", type=click.Path(dir_okay=False, path_type=Path), metavar="PATH",
    help="Write a page with timelines, memory, and changes that would shorten the step.",
)  # fmt: skip
@figure_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    *,
    schedule: str | None,
    ranks: int | None,
    microbatches: int | None,
    virtual_stages: int | None,
    options: tuple[str, ...],
    costs: str,
    latency: str | None,
    memory_limit: int | None,
    reduction: float | None,
    gather: float | None,
    sharding: Sharding,
    late_texts: tuple[str, ...],
    compare: str | None,
    html: Path | None,
    figure: FigureFile | None,
    as_json: bool,
) -> None:
    """Predict what a schedule costs.

    SCHEDULE is a family (see `penstock schedule list`), a CSV file, or MODULE:FUNCTION of your own. The simulation is exact:
    every rank runs its ops in order, each as soon as its inputs have arrived. Idle time is printed as two percentages, since
    both are in use: of ranks x makespan, and of the longest rank (as in the zero-bubble paper).
    """
    others = [name.strip() for name in (compare or "").split(",") if name.strip()]
    names = [*([schedule] if schedule else []), *others]
    if not names:
        raise click.UsageError("name a schedule, or several with --compare")
    page = None if html is None else OutputFile("--html", html, PAGE)
    require_outputs([page, figure and figure.output], [costs, *names])
    if figure is not None and len(names) > 1:
        raise click.UsageError("--out draws one schedule; name one and leave --compare out, or write --html")
    shards = sharding.comes_and_goes
    if reduction is not None and compare is not None and not shards:
        raise click.UsageError(
            "--reduce takes one schedule and does not work with --compare, unless with --shard"
        )
    values, late = named_values(options), late_ranks(late_texts)
    if compare is not None:
        _check_options(values, names)
    runs = []
    for name in names:
        stages, fitting = (
            (virtual_stages, values) if compare is None else _fitting(name, virtual_stages, values)
        )
        built = _schedule(
            name,
            ranks=ranks,
            microbatches=microbatches,
            virtual_stages=stages,
            values=fitting,
            costs=costs,
            latency=latency,
            memory_limit=memory_limit,
        )
        table = _price_shards(priced(costs, latency, built.placement), built, sharding, gather, reduction)
        table = table.with_late(built.placement, late) if late else table
        runs.append(_run(built, table, memory_limit, sharding))
    exposed = None if reduction is None or shards else _exposed(runs[0][1], reduction)
    if html is not None:
        _write_page(html, runs, costs, latency, memory_limit, late_texts)
    if figure is not None:
        write_figure(runs[0][1].trace, figure)
    if as_json:
        figures = [metrics.as_dict() | _of_shards(step) for metrics, step in runs]
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
    if figure is not None and not as_json:
        click.echo(f"\ndrawn to {figure.path}")


_BUCKETS = 16
"""Number of buckets of a stage that stands for many: what they expose is hardly more than one bucket's reduction."""


def _exposed(step: PlannedStep, seconds: float) -> dict[str, object]:
    """Return how much of the reduction of gradients is exposed, in one bucket per stage and in many."""
    program, trace, schedule = step.program, step.trace, step.program.schedule
    each = [seconds * schedule.ranks / schedule.stages] * schedule.stages
    return {
        "seconds": seconds,
        "exposed_in_one_bucket": [float(t) for t in reduce_gradients(program, trace, each).exposed],
        "exposed": [float(t) for t in reduce_gradients(program, trace, each, _BUCKETS).exposed],
        "buckets": _BUCKETS,
    }


def _show_exposed(reduction: Mapping[str, Any]) -> None:
    def worst(name: str) -> str:
        return f"{max(reduction[name]):.6g}"

    click.echo(
        f"\nreduction     {reduction['seconds']:.6g} per rank; {worst('exposed_in_one_bucket')} exposed after the last op "
        "with one bucket per stage\n"
        f"              {worst('exposed')} exposed with {reduction['buckets']} buckets per stage"
    )


def _write_page(
    path: Path,
    runs: Sequence[tuple[Metrics, PlannedStep]],
    costs: str,
    latency: str | None,
    memory_limit: int | None,
    late: Sequence[str],
) -> None:
    limit = {} if memory_limit is None else {"limit": memory_limit}
    steps = [
        StepAnalysis(metrics.schedule, replace(step.trace, info={**step.trace.info, **limit}), step)
        for metrics, step in runs
    ]
    names = [metrics.schedule for metrics, _ in runs]
    settings = {"costs": costs, "latency": latency, "memory-limit": memory_limit}
    settings |= {"late": ", ".join(late)} if late else {}
    write(
        path,
        steps,
        title=f"Simulation of {', '.join(names)}",
        settings="\n".join(f"{name} = {value}" for name, value in settings.items() if value is not None),
    )


def _check_options(values: Mapping[str, object], names: list[str]) -> None:
    """Raise ConfigError if none of several schedules takes an option."""
    known = sorted({option for name in names if not is_csv(name) for option in require_family(name).options})
    for option in values:
        if option not in known:
            allowed = f"their options are {', '.join(known)}" if known else "they have no options"
            raise ConfigError(
                f"none of these schedules has an option {option!r}{nearest(option, known)}; {allowed}"
            )


def _fitting(
    name: str, virtual_stages: int | None, values: Mapping[str, object]
) -> tuple[int | None, dict[str, object]]:
    """Return those virtual stages and options that one of several schedules takes."""
    if is_csv(name):
        return None, {}
    family = require_family(name)
    fitting = {option: value for option, value in values.items() if option in family.options}
    return virtual_stages if family.chooses_virtual_stages else None, fitting


def _schedule(
    name: str, *, ranks: int | None, microbatches: int | None, virtual_stages: int | None,
    values: Mapping[str, object], costs: str, latency: str | None, memory_limit: int | None,
) -> Schedule:  # fmt: skip
    """Return the schedule; a family that adapts to costs, latency and memory gets the simulation's."""
    adapted: dict[str, object] = {}
    if name in FAMILIES and "costs" in FAMILIES[name].options:
        counts = need_counts(name, ranks, microbatches)
        v = FAMILIES[name].require_counts(*counts, virtual_stages)
        placement = shaped_placement(str(values.get("placement", "loop")), counts[0], v)
        table = priced(costs, latency, placement)
        adapted["costs"] = tuple(table.seconds[:, kind].tolist() for kind in (Kind.F, Kind.I, Kind.W))
        if "full" in FAMILIES[name].options:
            adapted["full"] = table.seconds[:, Kind.B].tolist()
        adapted["latency"] = float(table.communication.transfer(placement.stages).max(initial=0))
        adapted |= {} if memory_limit is None else {"memory_limit": memory_limit}
    return find_schedule(name, ranks, microbatches, virtual_stages, adapted | dict(values))


def _price_shards(
    table: Costs, schedule: Schedule, sharding: Sharding, gather: float | None, reduction: float | None
) -> Costs:
    """Return the costs with those of gathers and reductions, which the options give for a rank."""
    if gather is not None and not sharding.weights_come_and_go:
        raise ConfigError("--gather is the time of gathers of weights; it needs --shard weights or --store")
    if not sharding.comes_and_goes:
        return table
    given = type(table).of(schedule.placement, 0, 0, 0, gather=gather or 0, reduce=reduction or 0)
    table = replace(
        table,
        gather=table.gather if gather is None else given.gather,
        reduce=table.reduce if reduction is None else given.reduce,
    )
    if table.gather is None and table.reduce is None:
        raise ConfigError(
            f"--shard {sharding.shard} is simulated with the times of gathers and reductions; give --gather SECONDS or "
            "--reduce SECONDS, or gather or reduce in the file of costs"
        )
    return table


def _run(
    schedule: Schedule, table: Costs, memory_limit: int | None, sharding: Sharding
) -> tuple[Metrics, PlannedStep]:
    budget = None if memory_limit is None else Budget(memory_limit)
    program = check(schedule, budget=budget, sharding=sharding).program
    trace = simulate(program, table)
    return measure(schedule, table, trace), PlannedStep(program, table, trace)


def _of_shards(step: PlannedStep) -> dict[str, Any]:
    """Return gathers and reductions by rank, if any: how many there are, and how long the rank waits for them."""
    residency = step.program.residency
    if residency is None:
        return {}
    return {
        "gathers": [len(each) for each in residency.runs],
        "reductions": [len(each) for each in residency.reductions],
        **{name: step.trace.info[name] for name in ("exposed_gathers", "exposed_reductions")},
    }


def _show(metrics: Metrics, step: PlannedStep) -> None:
    console = Console(highlight=False)
    notes = "".join(f"{note}\n" for note in step.program.schedule.notes)
    click.echo(
        f"{metrics.schedule}: {describe_size(metrics.ranks, metrics.stages, metrics.microbatches)}\n{notes}\n"
        f"makespan      {metrics.makespan:.6g}  from the first start to the last end of all ranks\n"
        f"longest       {metrics.longest:.6g}  the largest span of one rank\n"
        f"lower bound   {metrics.lower_bound:.6g}  no order with this placement and these costs takes less; "
        f"the makespan is {metrics.over_bound:.1%} above it\n"
        f"bubble        {metrics.bubble_of_makespan:.1%} of ranks x makespan; "
        f"{metrics.bubble_of_longest:.1%} of the longest rank (the zero-bubble paper's rate)\n"
    )
    split = Bubbles(metrics.makespan, metrics.busy, metrics.idle)
    more: dict[str, list[Any]] = {"peak\nchunks": metrics.peak_activations.tolist()}
    if step.program.residency is not None:
        click.echo(f"{step.program.residency.summary()}")
        for name in ("gathers", "reductions"):
            times = _of_shards(step)[f"exposed_{name}"]
            click.echo(
                f"exposed {name}: {max(times):.6g} on rank {times.index(max(times))}, {sum(times):.6g} on all"
            )
        click.echo()
    console.print(bubble_table(split, more, narrow=step.program.residency is not None))
    console.print()
    console.print(draw_terminal(step.trace, console.width))


def _show_side_by_side(runs: list[Metrics]) -> None:
    bubbles = ("bubble/\nmakespan", "bubble/\nlongest")
    table = plain_table(
        "schedule", "v", "makespan", "longest", "above\nbound", *bubbles, "peak\nchunks", "peak\n1/p",
    )  # fmt: skip
    table.columns[0].justify = "left"
    for run in runs:
        peak = int(run.peak_activations.max())
        table.add_row(
            run.schedule, f"{run.stages / run.ranks:g}", f"{run.makespan:.6g}", f"{run.longest:.6g}",
            f"{run.over_bound:.1%}", f"{run.bubble_of_makespan:.1%}", f"{run.bubble_of_longest:.1%}",
            str(peak), f"{peak * run.ranks / run.stages:.4g}",
        )  # fmt: skip
    Console(highlight=False).print(table)
    click.echo(
        "\nv                stages per rank\n"
        "above bound      makespan above the least that any order with this placement and these costs can reach\n"
        "bubble/makespan  idle share of ranks x makespan\n"
        "bubble/longest   idle share of the longest rank, the zero-bubble paper's rate\n"
        "peak             most activations that a rank holds, in chunks and in chunks of 1/p of the model"
    )
