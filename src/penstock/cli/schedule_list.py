"""``penstock schedule list``: the families of schedules."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.schedule_arguments import VIRTUAL_STAGES
from penstock.errors import ScheduleError
from penstock.plural import plural

if TYPE_CHECKING:
    from penstock.schedule.families import CatalogueFamily


@click.command(name="list", epilog="Example:  penstock schedule list -p 8 -m 32 -v 2")
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
def list_command(ranks: int, microbatches: int, virtual_stages: int | None, as_json: bool) -> None:
    """List the families of schedules.

    Prints their sources, requirements, bubbles (idle time of a rank) and peaks (most activations that each rank holds, in
    chunks of one microbatch on one stage). Bubbles and peaks are given as formulas and, for these counts, as simulated with
    F = B = W = 1 per rank and microbatch (B is the input gradient) and free communication.
    """
    from penstock.schedule.check import brief
    from penstock.schedule.families import FAMILIES

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
    from penstock.schedule.check import check
    from penstock.schedule.memory import peak
    from penstock.simulate.costs import Costs
    from penstock.simulate.simulator import simulate
    from penstock.trace.bubbles import bubbles

    chosen = virtual_stages if family.chooses_virtual_stages else None
    v = family.default_virtual_stages if chosen is None else chosen
    bubble: float | None = None
    held: list[int] | None = None
    refused: str | None = None
    try:
        schedule = family.build(ranks, microbatches, chosen)
        v = max(len(stages) for stages in schedule.placement.stages_of)
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
