"""``penstock schedule``: list the catalogue; show, check, draw, convert and search schedules."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.cost_arguments import stage_bytes
from penstock.cli.schedule_arguments import VIRTUAL_STAGES, find_schedule, named_values, schedule_options
from penstock.cli.schedule_search import search_command
from penstock.errors import ScheduleError
from penstock.output_files import SCHEDULE, OutputFile, kind_of_start, require_outputs

if TYPE_CHECKING:
    from penstock.schedule.families import Family
    from penstock.schedule.memory import Budget
    from penstock.schedule.schedule import Schedule

_PICTURE = kind_of_start("a picture", b"\x89PNG", b"<?xml", b"<svg", b"%PDF")


@click.group(
    name="schedule",
    epilog="Example:  penstock schedule list -p 4 -m 8\n\n"
    "          penstock schedule check zb-v -p 4 -m 12 --memory-limit 8\n\n"
    "          penstock schedule draw dualpipe -p 8 -m 20 --out dualpipe.svg",
)
def command() -> None:
    """List, show, check, draw, convert and search schedules.

    A schedule is a family of the catalogue with its counts, or a CSV file in the format of PyTorch's pipelining.
    """


@command.command(name="list", epilog="Example:  penstock schedule list -p 8 -m 32 -v 2")
@click.option("--ranks", "-p", type=click.IntRange(1), default=4, show_default=True, help="Pipeline ranks.")
@click.option(
    "--microbatches",
    "-m",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    help="Microbatches per step.",
)
@VIRTUAL_STAGES
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_families(ranks: int, microbatches: int, virtual_stages: int | None, as_json: bool) -> None:
    """List the families of schedules.

    Prints their sources, requirements, bubbles (idle time of a rank) and peaks (most activations that each rank holds, in
    chunks of one microbatch on one stage). Bubbles and peaks are given as formulas and, for these counts, as simulated with
    F = B = W = 1 per rank and microbatch (B is the input gradient) and free communication.
    """
    from penstock.schedule.families import FAMILIES

    rows = [_row(family, ranks, microbatches, virtual_stages) for family in FAMILIES.values()]
    if as_json:
        click.echo(
            json.dumps({"ranks": ranks, "microbatches": microbatches, "families": rows}, ensure_ascii=False)
        )
        return
    for row in rows:
        bubble = "-" if row["bubble"]["value"] is None else f"{row['bubble']['value']:g}"
        click.echo(f"{row['name']:<18}{row['source']}; {row['refused'] or row['needs']}")
        click.echo(f"  bubble  {bubble:<24}{row['bubble']['formula']}")
        click.echo(f"  peak    {_brief(row['peak']['value']):<24}{row['peak']['formula']}")
    click.echo(
        f"\n{ranks} ranks, {microbatches} microbatches. Bubble: idle time of a rank, with F = B = W = 1 per rank and "
        "microbatch.\nPeak: most activations that each rank holds, in chunks, from rank 0 on."
    )


def _row(family: Family, ranks: int, microbatches: int, virtual_stages: int | None) -> dict[str, Any]:
    """Return the entry of a family; counts that it rejects are reported, not raised."""
    from penstock.schedule.check import check
    from penstock.schedule.memory import peak
    from penstock.simulate.costs import Costs
    from penstock.simulate.simulator import simulate
    from penstock.trace.bubbles import bubbles

    v = family.virtual_stages
    if virtual_stages is not None and family.chooses_virtual_stages:
        v = virtual_stages
    bubble: float | None = None
    held: list[int] | None = None
    refused: str | None = None
    try:
        schedule = family.build(ranks, microbatches, v)
        # A chunk's op is one tick, so that all times are whole.
        split = bubbles(simulate(check(schedule).program, Costs.of(schedule.placement, v, v, v)))
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


def _brief(held: Sequence[int] | None) -> str:
    """Return one number per rank: the first and last of many ranks, and a single one if all are equal."""
    if held is None:
        return "-"
    if len(set(held)) == 1:
        return str(held[0])
    shown = [str(chunks) for chunks in held]
    return " ".join(shown if len(shown) <= 8 else [*shown[:4], "...", *shown[-3:]])


@command.command(epilog="Example:  penstock schedule show interleaved-1f1b -p 4 -m 8 -v 2 -o group_size=5")
@click.argument("schedule")
@schedule_options
@click.option(
    "--program",
    is_flag=True,
    help="Print every instruction of each rank, including messages, hand-overs and reductions.",
)
def show(program: bool, **arguments: Any) -> None:
    """Print the ops of every rank in PyTorch's notation."""
    from penstock.schedule.check import check

    schedule = _schedule(**arguments)
    if program:
        lowered = check(schedule).program
        for rank in range(schedule.ranks):
            click.echo(f"rank {rank}")
            for instruction in lowered.instructions(rank):
                click.echo(f"  {lowered.describe(instruction)}")
        return
    click.echo(f"{_title(schedule)}\n")
    margin = len(f"rank {schedule.ranks - 1}")
    for rank in range(schedule.ranks):
        click.echo(f"{f'rank {rank}'.ljust(margin)}  {schedule.text(rank)}")


@command.command(
    epilog="Example:  penstock schedule check my.csv\n\n"
    "          penstock schedule check 1f1b -p 4 -m 8 --memory-limit 80000000 --saved 20000000"
)
@click.argument("schedule")
@schedule_options
@click.option(
    "--memory-limit",
    type=int,
    metavar="BYTES",
    help="Bytes that a rank may hold; without --saved, activations. Default: no limit.",
)
@click.option(
    "--saved", default="1", metavar="BYTES[,...]",
    help="Bytes that a forward saves for its backward: one number, or one per stage. Default: 1, to count activations.",
)  # fmt: skip
@click.option(
    "--waiting", default="0", metavar="BYTES[,...]",
    help="Bytes kept from the input-gradient half to the weight half: one number, or one per stage. Default: 0.",
)  # fmt: skip
@click.option(
    "--freed-at", type=click.Choice(["B", "W"]), default="W", show_default=True,
    help="Half of a split backward that frees the forward's bytes: input gradient (B) or weight gradient (W).",
)  # fmt: skip
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object, even for an invalid schedule (exit code 2).",
)
def check(
    memory_limit: int | None, saved: str, waiting: str, freed_at: str, as_json: bool, **arguments: Any
) -> None:
    """Prove that a schedule is valid.

    A valid schedule is complete, ordered along its data, free of deadlock even if every send blocks until its receive is
    posted, and within its memory. An invalid one is rejected with the smallest counter-example and exit code 2.
    """
    from penstock.schedule.check import check as prove

    schedule = _schedule(**arguments)
    budget = _budget(memory_limit, saved, waiting, freed_at)
    try:
        proof = prove(schedule, budget=budget if memory_limit is not None else None)
    except ScheduleError as error:
        if not as_json:
            raise
        click.echo(
            json.dumps({"schedule": schedule.name, "valid": False, "error": str(error)}, ensure_ascii=False)
        )
        click.get_current_context().exit(2)
    held = budget.peak(schedule).tolist()
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
        }
        click.echo(json.dumps(report, ensure_ascii=False))
        return
    unit = "chunks" if saved == "1" and waiting == "0" else "bytes"
    click.echo(
        f"{_title(schedule)}: valid\n"
        f"{proof.ops} ops, each once and after its inputs; the longest chain of waits has {proof.critical_path} ops\n"
        f"{sum(len(edge.consumers) for edge in edges)} messages between ranks; no deadlock, with at most "
        f"{max((edge.slots for edge in edges), default=0)} receives posted ahead on an edge\n"
        f"peak {unit} per rank: {' '.join(map(str, held))}"
    )
    if schedule.placement.has_copies:
        click.echo("every copied stage is reduced once on each of its ranks")


@command.command(epilog="Example:  penstock schedule draw zb-h1 -p 4 -m 8 --out zb-h1.svg")
@click.argument("schedule")
@schedule_options
@click.option(
    "--out",
    type=click.Path(dir_okay=False),
    help="Write an .svg, .png or .pdf file. Default: draw in the terminal.",
)
def draw(out: str | None, **arguments: Any) -> None:
    """Draw a schedule with F = B = W, in the terminal or to a file.

    To draw it with other costs, use `penstock simulate`.
    """
    from rich.console import Console

    from penstock.schedule.check import check as prove
    from penstock.show.picture import draw_picture
    from penstock.show.terminal import draw_terminal
    from penstock.simulate.costs import Costs
    from penstock.simulate.simulator import simulate

    if out is not None:
        require_outputs([OutputFile("--out", Path(out), _PICTURE)])
    schedule = _schedule(**arguments)
    each = [1] * schedule.stages
    trace = simulate(prove(schedule).program, Costs.of(schedule.placement, each, each, each))
    if out is not None:
        draw_picture(trace, out)
        click.echo(f"{_title(schedule)}: drawn to {out}")
        return
    console = Console(highlight=False)
    click.echo(f"{_title(schedule)}\n")
    console.print(draw_terminal(trace, console.width))


@command.command(name="csv", epilog="Example:  penstock schedule csv zb-v -p 4 -m 12 --out zb-v.csv")
@click.argument("schedule")
@schedule_options
@click.option("--out", type=click.Path(dir_okay=False), help="File to write. Default: print to the terminal.")
def to_csv(out: str | None, **arguments: Any) -> None:
    """Write a schedule as CSV, one line per rank.

    PyTorch's pipelining reads these files, and so does every command that takes a SCHEDULE.
    """
    from penstock.schedule.text import csv_line, write_csv

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
) -> Schedule:
    """Return the schedule that the argument and options name."""
    return find_schedule(schedule, ranks, microbatches, virtual_stages, named_values(options))


def _budget(limit: int | None, saved: str, waiting: str, freed_at: str) -> Budget:
    from penstock.schedule.memory import Budget

    return Budget(
        limit or 0,
        stage_bytes("--saved", saved),
        stage_bytes("--waiting", waiting),
        0,
        "B" if freed_at == "B" else "W",
    )


def _title(schedule: Schedule) -> str:
    return f"{schedule.name}: {schedule.ranks} ranks, {schedule.stages} stages, {schedule.microbatches} microbatches"
