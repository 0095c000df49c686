"""``penstock compare``: the first tensor that differs between two recordings."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from penstock.recordings.compare import Difference


@click.command(
    epilog="Example:  penstock compare recordings/plain recordings/run\n\n"
    "          penstock compare recordings/plain recordings/run --exact recordings/float64 --json"
)
@click.argument("reference", type=click.Path(path_type=Path))
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--exact",
    type=click.Path(path_type=Path),
    help="A recording of the reference in float64: a tensor may then differ four times as much as the reference from it.",
)
@click.option(
    "--scale",
    type=float,
    default=1.0,
    show_default=True,
    help="Factor by which RUN's losses are larger before their backward.",
)
@click.option(
    "--all", "shows_all", is_flag=True, help="Print every tensor that differs, not the first alone."
)
@click.option(
    "--page",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a page: a map of modules by microbatches, with the first difference marked.",
)
@click.option("--bits", is_flag=True, help="Other bits are a difference, also where rounding explains them.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    *,
    reference: Path,
    run: Path,
    exact: Path | None,
    scale: float,
    bits: bool,
    page: Path | None,
    shows_all: bool,
    as_json: bool,
) -> None:
    """Find the first tensor that differs between two recordings.

    REFERENCE and RUN are folders that penstock.record wrote. Tensors are compared in the order of computation. Exit code 1
    if one differs by more than the order of sums explains, or a recording is incomplete.
    """
    from penstock.recordings.compare import compare

    found = compare(reference, run, exact=exact, scale=scale, bits=bits)
    if page is not None:
        from penstock.show.page import write_page
        from penstock.verify.map_page import render_map

        write_page(page, render_map(found, f"{run} compared with {reference}"))
    if as_json:
        table = {
            "good": found.good,
            "same": found.same,
            "rounded": found.rounded,
            "before": found.before,
            "around": found.around,
            "incomplete": found.incomplete,
            "differences": [_table(one) for one in found.differences],
            "notes": found.notes,
        }
        click.echo(json.dumps(table))
    else:
        click.echo(str(found))
        for one in found.differences[1:] if shows_all else ():
            click.echo(str(one))
    if not found.good:
        raise click.exceptions.Exit(1)


def _table(one: Difference) -> dict[str, Any]:
    key = one.key
    return {
        **asdict(key),
        "kind": key.kind.name.lower(),
        "what": one.what,
        "size": None if one.size == float("inf") else one.size,
        "allowed": one.allowed,
    }
