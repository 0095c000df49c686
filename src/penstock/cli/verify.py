"""``penstock verify``: train a few steps with and without pipelines, and print the largest differences."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING

import click
from rich.live import Live
from rich.table import Table

from penstock.cli.output import table_console
from penstock.schedule.families import FAMILIES, require_family
from penstock.schedule.text import is_csv

if TYPE_CHECKING:
    from penstock.verify.training import Difference

TARGETS = "penstock.train.model.verify_target"


@click.command(
    epilog="Example:  penstock verify --ranks 4 --schedule all\n\n"
    "          penstock verify --ranks 2 --schedule 1f1b --model mymodels:subject\n\n"
    "          penstock verify --ranks 2 --schedule 1f1b --ep 2"
)
@click.option(
    "--ranks",
    "-p",
    multiple=True,
    type=click.IntRange(1),
    default=[2],
    show_default=True,
    help="Pipeline ranks. May be repeated.",
)
@click.option(
    "--microbatches",
    "-m",
    multiple=True,
    type=click.IntRange(1),
    help="Microbatches per step. May be repeated. Default: the ranks, twice the ranks, and 7.",
)
@click.option(
    "--schedule",
    "schedules",
    multiple=True,
    default=["all"],
    show_default=True,
    help="A family, MODULE:FUNCTION of your own, a CSV file, or all (of the catalogue). May be repeated.",
)
@click.option(
    "--virtual-stages",
    "-v",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="Stages per rank, for families where it can be chosen.",
)
@click.option(
    "--transport",
    type=click.Choice(["threads", "processes", "both"]),
    default="both",
    show_default=True,
    help="Run ranks as threads, as gloo processes, or both; with --ep or --cp, both means processes.",
)
@click.option(
    "--ep",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Replicas that divide the experts, each with the ranks and microbatches given here.",
)
@click.option(
    "--cp",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Processes that divide the tokens of each sample.",
)
@click.option(
    "--model",
    help="MODULE:FUNCTION that returns a penstock.verify.VerifyTarget. Default: a small decoder, with experts if --ep is "
    "given.",
)
@click.option(
    "--steps", type=click.IntRange(1), default=3, show_default=True, help="Optimizer steps to compare."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def command(
    *,
    ranks: tuple[int, ...],
    microbatches: tuple[int, ...],
    schedules: tuple[str, ...],
    virtual_stages: int,
    transport: str,
    ep: int,
    cp: int,
    model: str | None,
    steps: int,
    as_json: bool,
) -> None:
    """Prove that pipelined training equals plain PyTorch.

    Trains a few optimizer steps without a pipeline, with ranks as threads and with ranks as gloo processes, and prints the
    largest differences of losses, weights and gradients. Exit code 1 if a difference is larger than allowed. With --ep or
    --cp, and for schedules with two copies of a stage, sums have another order: allowed is 4 times the difference of plain
    PyTorch from itself in float64. Otherwise nothing is.
    """
    from penstock.verify.training import verify

    names = list(FAMILIES) if "all" in schedules else list(schedules)
    chosen = [
        (name, virtual_stages if not is_csv(name) and require_family(name).chooses_virtual_stages else 1)
        for name in names
    ]
    both = ["processes"] if ep * cp > 1 else ["threads", "processes"]
    transports = both if transport == "both" else [transport]
    model = model or f"{TARGETS}:{'small_mixture' if ep > 1 else 'small_llama'}"
    runs = [
        verify(
            model,
            chosen,
            [p],
            sorted(set(microbatches or (p, 2 * p, 7))),
            transports=transports,
            steps=steps,
            ep=ep,
            cp=cp,
        )
        for p in ranks
    ]
    bad = _show(chain.from_iterable(runs), ep, cp, as_json)
    if bad:
        raise click.exceptions.Exit(1)


def _show(rows: Iterator[Difference], ep: int, cp: int, as_json: bool) -> int:
    """Print every row as it comes, and return how many differ by more than is allowed."""
    bad = 0
    if as_json:
        for row in rows:
            bad += not row.good
            click.echo(json.dumps(asdict(row) | {"good": row.good}))
        return bad
    of_each = f", on each of {ep} replicas that divide the experts" if ep > 1 else ""
    of_each += f", on each of {cp} processes that divide the samples" if cp > 1 else ""
    table = Table(title=f"largest difference from plain PyTorch (p ranks, m microbatches{of_each})")
    for column in ("schedule", "transport", "p", "m"):
        table.add_column(column, no_wrap=True)
    for column in ("loss", "weights", "gradients", "allowed"):
        table.add_column(column, justify="right", no_wrap=True)
    console = table_console()
    with Live(table, console=console, auto_refresh=False) as live:
        for row in rows:
            bad += not row.good
            numbers = [f"{value:.2g}" for value in (row.loss, row.weights, row.gradients)]
            numbers.append("0" if not any(row.allowed) else " ".join(f"{value:.1g}" for value in row.allowed))
            style = None if row.good else "bold red"
            table.add_row(
                row.schedule, row.transport, str(row.ranks), str(row.microbatches), *numbers, style=style
            )
            live.refresh()
    if not console.is_terminal:
        click.echo()
    click.echo(
        "no difference is larger than allowed" if not bad else f"{bad} row(s) differ by more than allowed"
    )
    return bad
