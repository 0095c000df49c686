"""``penstock schedule``: list the catalogue; show, check, draw, convert and search schedules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from penstock.base.counts import describe_size, plural
from penstock.base.errors import ConfigError, ScheduleError
from penstock.base.output_files import SCHEDULE, OutputFile, require_outputs
from penstock.cli.cost_arguments import COSTS, LATENCY, SAVED, WAITING, priced, stage_bytes
from penstock.cli.figure_options import FigureFile, figure_options, write_figure
from penstock.cli.options import choice, count
from penstock.cli.schedule_arguments import (
    VIRTUAL_STAGES,
    find_schedule,
    named_values,
    schedule_options,
    sharding_options,
)
from penstock.cli.schedule_search import search_command
from penstock.schedule.check import brief
from penstock.schedule.check import check as prove
from penstock.schedule.families import FAMILIES, CatalogueFamily
from penstock.schedule.memory import Budget, WeightBytes, peak
from penstock.schedule.residency import Sharding
from penstock.schedule.schedule import Schedule
from penstock.schedule.text import csv_line, write_csv
from penstock.show.terminal import draw_terminal
from penstock.simulate.costs import Costs
from penstock.simulate.simulator import simulate
from penstock.trace.bubbles import bubbles


@click.group(
    name="schedule",
    epilog="Example:  penstock schedule list -p 4 -m 8\n\n"
    "          penstock schedule check zb-v -p 4 -m 12 --memory-limit 8\n\n"
    "          penstock schedule draw dualpipe -p 8 -m 20 --out dualpipe.svg",
)
def command() -> None:
    """List, show, check, draw, convert and search schedules.

    A schedule is a family with its counts, a CSV file in the format of PyTorch's pipelining, or MODULE:FUNCTION of your own.
    """


@command.command(epilog="Example:  penstock schedule show interleaved-1f1b -p 4 -m 8 -v 2 -o group_size=5")
@click.argument("schedule")
@schedule_options
@click.option(
    "--program",
    is_flag=True,
    help="Print every instruction of each rank, including messages, hand-overs and reductions.",
)
@sharding_options
def show(program: bool, sharding: Sharding, **arguments: Any) -> None:
    """Print the ops of every rank in PyTorch's notation.

    With --shard, the gathers (UNSHARD) and releases (RESHARD) of weights and the reductions of gradients (REDUCE_GRAD) are
    among them.
    """
    schedule = _schedule(**arguments)
    lowered = prove(schedule, sharding=sharding).program if program or sharding.comes_and_goes else None
    if program and lowered is not None:
        for rank in range(schedule.ranks):
            click.echo(f"rank {rank}")
            for instruction in lowered.instructions(rank):
                click.echo(f"  {lowered.describe(instruction)}")
        return
    click.echo(f"{_title(schedule)}\n")
    margin = len(f"rank {schedule.ranks - 1}")
    for rank in range(schedule.ranks):
        residency = lowered.residency if lowered is not None else None
        text = schedule.text(rank) if residency is None else " ".join(residency.text(schedule, rank))
        click.echo(f"{f'rank {rank}'.ljust(margin)}  {text}")


@command.command(
    epilog="Example:  penstock schedule check my.csv\n\n"
    "          penstock schedule check 1f1b -p 4 -m 8 --memory-limit 80000000 --saved 20000000\n\n"
    "          penstock schedule check breadth-first -p 4 -m 8 -v 4 --shard weights --window 2 --replicas 8 --saved 1GB "
    "--weights 3GB --gradients 3GB --memory-limit 20GB"
)
@click.argument("schedule")
@schedule_options
@click.option(
    "--memory-limit",
    metavar="BYTES",
    help="Bytes that a rank may hold; without --saved, activations. Default: no limit.",
)
@SAVED
@WAITING
@click.option(
    "--weights",
    default="0",
    metavar="BYTES[,...]",
    help="Bytes of a stage's weights, counted as well: one number, or one per stage. Default: 0.",
)
@click.option(
    "--gradients",
    default="0",
    metavar="BYTES[,...]",
    help="Bytes of the gradients of a stage's weights: one number, or one per stage. Default: 0.",
)
@count("--replicas", default=1, help="Replicas that --shard divides over.")
@sharding_options
@choice(
    "--freed-at", "B", "W", default="W",
    help="Half of a split backward that frees the forward's bytes: input gradient (B) or weight gradient (W).",
)  # fmt: skip
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object, even for an invalid schedule (exit code 2).",
)
def check(
    *, memory_limit: str | None, saved: str, waiting: str, weights: str, gradients: str, replicas: int, freed_at: str,
    as_json: bool, sharding: Sharding, **arguments: Any,
) -> None:  # fmt: skip
    """Prove that a schedule is valid.

    A valid schedule is complete, ordered along its data, free of deadlock even if every send blocks until its receive is
    posted, and within its memory. An invalid one is rejected with the smallest counter-example and exit code 2.
    """
    limit = None if memory_limit is None else stage_bytes("--memory-limit", memory_limit)
    if isinstance(limit, list):
        raise ConfigError(f"--memory-limit must be one number of bytes, got {memory_limit!r}")
    counts = saved == "1" and weights == gradients == "0"
    schedule = _schedule(**arguments, memory_limit=limit if counts else None)
    sizes = WeightBytes(stage_bytes("--weights", weights), stage_bytes("--gradients", gradients), replicas)
    budget = Budget(
        limit or 0,
        stage_bytes("--saved", saved),
        stage_bytes("--waiting", waiting),
        0,
        "B" if freed_at == "B" else "W",
        sizes if weights != "0" or gradients != "0" else None,
    )
    try:
        proof = prove(schedule, budget=budget if limit is not None else None, sharding=sharding)
    except ScheduleError as error:
        if not as_json:
            raise
        click.echo(
            json.dumps({"schedule": schedule.name, "valid": False, "error": str(error)}, ensure_ascii=False)
        )
        click.get_current_context().exit(2)
    residency = proof.program.residency
    held = budget.peak(schedule, residency).tolist()
    edges = list(proof.program.edges.values())
    if as_json:
        report = {
            "schedule": schedule.name,
            "valid": True,
            "ranks": schedule.ranks,
            "stages": schedule.stages,
            "microbatches": schedule.microbatches,
            "ops": proof.ops,
            "critical_path": proof.critical_path,
            "peak": held,
            "messages": sum(len(edge.consumers) for edge in edges),
            "receive_slots": max((edge.slots for edge in edges), default=0),
            "reduced_over": {str(s): list(ranks) for s, ranks in proof.program.reductions.items()},
            "gathers": [len(runs) for runs in residency.runs] if residency is not None else [],
            "reductions": [len(each) for each in residency.reductions] if residency is not None else [],
            "in_order": schedule.in_order,
            "notes": list(schedule.notes),
        }
        click.echo(json.dumps(report, ensure_ascii=False))
        return
    click.echo(proof.summary(held, "activations" if counts and waiting == "0" else "bytes"))


@command.command(
    epilog="Example:  penstock schedule draw zb-h1 -p 4 -m 8 --costs 2,3,1 --out zb-h1.svg\n\n"
    "          penstock schedule draw 1f1b -p 4 -m 8 --out 1f1b.pdf --width 3.3 --font 7 --title ''"
)
@click.argument("schedule")
@schedule_options
@COSTS
@LATENCY
@figure_options
def draw(costs: str, latency: str | None, figure: FigureFile | None, **arguments: Any) -> None:
    """Draw a schedule as it runs with given costs, in the terminal or to a file.

    Costs are as for `penstock simulate`, which also prints figures.
    """
    require_outputs([figure and figure.output], [costs, arguments["schedule"]])
    schedule = _schedule(**arguments)
    trace = simulate(prove(schedule).program, priced(costs, latency, schedule.placement))
    heading = "\n".join([_title(schedule), *schedule.notes])
    if figure is not None:
        write_figure(trace, figure)
        click.echo(f"{heading}\ndrawn to {figure.path}")
        return
    console = Console(highlight=False)
    click.echo(f"{heading}\n")
    console.print(draw_terminal(trace, console.width))


@command.command(name="csv", epilog="Example:  penstock schedule csv zb-v -p 4 -m 12 --out zb-v.csv")
@click.argument("schedule")
@schedule_options
@click.option("--out", type=click.Path(dir_okay=False), help="File to write. Default: print to the terminal.")
def to_csv(out: str | None, **arguments: Any) -> None:
    """Write a schedule as CSV, one line per rank.

    PyTorch's pipelining reads these files, and so does every command that takes a SCHEDULE.
    """
    if out is not None:
        require_outputs([OutputFile("--out", Path(out), SCHEDULE)], [arguments["schedule"]])
    schedule = _schedule(**arguments)
    if out is None:
        for rank in range(schedule.ranks):
            click.echo(csv_line(schedule, rank))
        return
    write_csv(schedule, out)
    click.echo(f"{_title(schedule)}: written to {out}")


command.add_command(search_command)


def _schedule(
    schedule: str,
    ranks: int | None,
    microbatches: int | None,
    virtual_stages: int | None,
    options: tuple[str, ...],
    memory_limit: int | None = None,
) -> Schedule:
    """Return the schedule that the argument and options name; a family that adapts to a memory limit gets it."""
    adapts = schedule in FAMILIES and "memory_limit" in FAMILIES[schedule].options
    adapted = {"memory_limit": memory_limit} if adapts and memory_limit is not None else {}
    return find_schedule(schedule, ranks, microbatches, virtual_stages, adapted | named_values(options))


def _title(schedule: Schedule) -> str:
    return f"{schedule.name}: {describe_size(schedule.ranks, schedule.stages, schedule.microbatches)}"


@command.command("list", epilog="Example:  penstock schedule list -p 8 -m 32 -v 2")
@count("--ranks", "-p", default=4, help="Pipeline ranks.")
@count("--microbatches", "-m", default=8, help="Microbatches per step.")
@VIRTUAL_STAGES
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_command(ranks: int, microbatches: int, virtual_stages: int | None, as_json: bool) -> None:
    """List the families of schedules.

    Prints their sources, requirements, bubbles (idle time of a rank) and peaks (most activations that each rank holds, in
    chunks of one microbatch on one stage). Bubbles and peaks are given as formulas and, for these counts, as simulated with
    F = B = W = 1 per rank and microbatch (B is the input gradient) and free communication.
    """
    rows = [_row(family, ranks, microbatches, virtual_stages) for family in FAMILIES.values()]
    if as_json:
        counts = {"ranks": ranks, "microbatches": microbatches}
        click.echo(json.dumps({**counts, "families": rows}, ensure_ascii=False))
        return
    for row in rows:
        bubble = "-" if row["bubble"]["value"] is None else f"{row['bubble']['value']:g}"
        held = "-" if row["peak"]["value"] is None else brief(row["peak"]["value"])
        about = row["refused"] or row["needs"]
        click.echo(f"{row['name']:<18}{row['source']}" + (f"; {about}" if about else ""))
        click.echo(f"  bubble  {bubble:<24}{row['bubble']['formula'] or ''}".rstrip())
        click.echo(f"  peak    {held:<24}{row['peak']['formula'] or ''}".rstrip())
    click.echo(
        f"\n{plural(ranks, 'rank')}, {plural(microbatches, 'microbatch')}. "
        "Bubble: idle time of a rank, with F = B = W = 1 per rank and microbatch.\n"
        "Peak: most activations that each rank holds, in chunks, from rank 0 on."
    )


def _row(
    family: CatalogueFamily, ranks: int, microbatches: int, virtual_stages: int | None
) -> dict[str, Any]:
    """Return the entry of a family; counts that it rejects are reported, not raised."""
    chosen = virtual_stages if family.chooses_virtual_stages else None
    v = family.default_virtual_stages if chosen is None else chosen
    bubble: float | None = None
    held: list[int] | None = None
    refused: str | None = None
    try:
        schedule = family.build(ranks, microbatches, chosen)
        v = max(len(stages) for stages in schedule.placement.stages_of)
        # A chunk's op is one tick, so that all times are whole.
        split = bubbles(simulate(prove(schedule).program, Costs.of(schedule.placement, v, v, v)))
        bubble = float((split.makespan - split.busy).max()) / v
        held = peak(schedule).tolist()
    except ScheduleError as error:
        refused = str(error)
    return {
        "name": family.name,
        "source": family.source,
        "needs": family.needs,
        "virtual_stages": v,
        "options": family.options,
        "in_order": family.in_order,
        "bubble": {"formula": family.bubble.text, "value": bubble},
        "peak": {"formula": family.peak.text, "value": held},
        "refused": refused,
    }
