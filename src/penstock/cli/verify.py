"""``penstock verify``: train a few steps with and without pipelines, and compare every tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING, Any

import click
from rich.live import Live
from rich.table import Table

from penstock.cli.options import choice, count
from penstock.cli.output import table_console
from penstock.schedule.families import FAMILIES, require_family
from penstock.schedule.text import is_csv

if TYPE_CHECKING:
    from penstock.verify.training import Row

TARGETS = "penstock.train.model.verify_target"


@click.command(
    epilog="Example:  penstock verify --ranks 4 --schedule all\n\n"
    "          penstock verify --ranks 2 --schedule 1f1b --model mymodels:subject\n\n"
    "          penstock verify --ranks 2 --schedule 1f1b --dp 2 --shard optimizer --recompute full"
)
@count("--ranks", "-p", multiple=True, default=[2], help="Pipeline ranks. May be repeated.")
@count(
    "--microbatches", "-m", multiple=True,
    help="Microbatches per step. May be repeated. Default: the ranks, twice the ranks, and 7.",
)  # fmt: skip
@click.option(
    "--schedule", "schedules", multiple=True, default=["all"], show_default=True,
    help="A family, MODULE:FUNCTION of your own, a CSV file, or all (of the catalogue). May be repeated.",
)  # fmt: skip
@count("--virtual-stages", "-v", default=2, help="Stages per rank, for families where it can be chosen.")
@choice(
    "--transport", "threads", "processes", "both", default="both",
    help="Run ranks as threads, as gloo processes, or both; with --dp, --tp, --ep or --cp, both means processes.",
)  # fmt: skip
@count("--dp", default=1, help="Replicas, each with the ranks and microbatches given here.")
@count("--tp", default=1, help="Processes that divide matrices.")
@count("--ep", default=1, help="Replicas that divide the experts; without --dp there are so many.")
@count("--cp", default=1, help="Processes that divide the tokens of each sample.")
@choice("--shard", "none", "optimizer", "gradients", "weights", help="What replicas divide.")
@choice("--recompute", "none", "full", help="What of the forward runs again for the backward.")
@choice("--autocast", "none", "bf16", help="Dtype of autocast, on both sides.")
@click.option(
    "--model",
    help="MODULE:FUNCTION that returns a penstock.verify.VerifyTarget. Default: a small decoder, with experts if --ep is "
    "given.",
)
@count("--steps", default=3, help="Optimizer steps to compare.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def command(
    *,
    ranks: tuple[int, ...],
    microbatches: tuple[int, ...],
    schedules: tuple[str, ...],
    virtual_stages: int,
    transport: str,
    model: str | None,
    steps: int,
    as_json: bool,
    **layout: Any,
) -> None:
    """Prove that pipelined training equals plain PyTorch.

    Trains a few optimizer steps without a pipeline, with ranks as threads and with ranks as gloo processes, and compares
    every output, gradient, update and loss. Exit code 1 if one differs by more than allowed; the first of them is printed.
    With replicas or divided matrices, experts or samples, and for schedules with copies of a stage, sums have another
    order: allowed is 4 times the difference of plain PyTorch from itself in float64. Otherwise all bits must be the same.
    """
    from penstock.verify.training import Layout, verify

    beside = Layout(**layout)
    names = list(FAMILIES) if "all" in schedules else list(schedules)
    chosen = [
        (name, virtual_stages if not is_csv(name) and require_family(name).chooses_virtual_stages else 1)
        for name in names
    ]
    both = ["processes"] if beside.processes > 1 else ["threads", "processes"]
    transports = both if transport == "both" else [transport]
    model = model or f"{TARGETS}:{'small_mixture' if beside.ep > 1 else 'small_llama'}"
    runs = [
        verify(
            model,
            chosen,
            [p],
            sorted(set(microbatches or (p, 2 * p, 7))),
            transports=transports,
            steps=steps,
            layout=beside,
        )
        for p in ranks
    ]
    bad = _show(chain.from_iterable(runs), str(beside), as_json)
    if bad:
        raise click.exceptions.Exit(1)


def _show(rows: Iterator[Row], layout: str, as_json: bool) -> int:
    """Print every row as it comes, and return how many differ by more than is allowed."""
    bad: list[Row] = []
    if as_json:
        for row in rows:
            bad += [] if row.good else [row]
            click.echo(json.dumps(asdict(row) | {"good": row.good}))
        return len(bad)
    beside = f"; {layout}" if layout else ""
    table = Table(title=f"tensors compared with plain PyTorch (p ranks, m microbatches{beside})")
    for column in ("schedule", "transport", "p", "m"):
        table.add_column(column, no_wrap=True)
    for column in ("same bits", "rounded", "different"):
        table.add_column(column, justify="right", no_wrap=True)
    console = table_console()
    with Live(table, console=console, auto_refresh=False) as live:
        for row in rows:
            bad += [] if row.good else [row]
            table.add_row(
                row.schedule, row.transport, str(row.ranks), str(row.microbatches), str(row.same),
                str(row.rounded), str(row.different), style=None if row.good else "bold red",
            )  # fmt: skip
            live.refresh()
    if not console.is_terminal:
        click.echo()
    for row in bad[:1]:
        click.echo(f"{row.schedule} in {row.transport}: {row.first}")
    click.echo(
        "no tensor differs by more than allowed"
        if not bad
        else f"{len(bad)} row(s) differ by more than allowed"
    )
    return len(bad)
