"""``penstock schedule search``: the best order for given costs and memory, with a bound on what it leaves."""

from __future__ import annotations

import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import click

from penstock.base.counts import describe_size
from penstock.base.errors import ConfigError
from penstock.base.output_files import SCHEDULE, OutputFile, require_outputs
from penstock.cli.cost_arguments import COSTS, LATENCY, SAVED, WAITING, parse_bytes, priced, stage_bytes
from penstock.cli.options import choice, count
from penstock.schedule.families.family import require_size
from penstock.schedule.families.searched import shaped_placement
from penstock.schedule.memory import Budget
from penstock.schedule.text import is_csv, write_csv
from penstock.simulate.certified_search import CertifiedSchedule, search_schedule
from penstock.train.signals import of_signal


@click.command(
    name="search",
    epilog="Example:  penstock schedule search -p 4 -m 8 -v 2 --placement v --backward split --costs 6,8,4 "
    "--memory-limit 6\n\n"
    "          penstock schedule search -p 4 -m 12 --costs 10,10,10 --latency 1 --memory-limit 5 --out best.csv",
)
@count("--ranks", "-p", required=True, help="Pipeline ranks.")
@count("--microbatches", "-m", required=True, help="Microbatches per step.")
@count(
    "--virtual-stages", "-v",
    help="Stages per rank. Default: 1 for a loop, 2 for a V. Two pipes have one each.",
)  # fmt: skip
@choice(
    "--placement", "loop", "v", "bidirectional",
    help="Stages on ranks: in a loop (r, r+p, ...), down and up again (a V), or two pipes in opposite directions with a "
    "copy of every stage.",
)  # fmt: skip
@choice(
    "--backward", "full", "split",
    help="Run each backward as one op, or allow its two halves (input and weight gradient) to run apart.",
)  # fmt: skip
@COSTS
@LATENCY
@click.option(
    "--memory-limit", metavar="N|BYTES",
    help="Activations (one microbatch on one stage each) that a rank may hold, or with --saved bytes, such as 40GB. "
    "Default: no limit.",
)  # fmt: skip
@SAVED
@WAITING
@click.option(
    "--seconds", type=click.FloatRange(0, min_open=True), default=10.0, show_default=True, metavar="T",
    help="End the search after T seconds. Ctrl-C also ends it, with the best schedule so far.",
)  # fmt: skip
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the random numbers."
)
@click.option("--out", type=click.Path(dir_okay=False), metavar="PATH", help="CSV file for the schedule.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def search_command(
    *,
    ranks: int,
    microbatches: int,
    virtual_stages: int | None,
    placement: str,
    backward: str,
    costs: str,
    latency: str | None,
    memory_limit: str | None,
    saved: str,
    waiting: str,
    seconds: float,
    seed: int,
    out: str | None,
    as_json: bool,
) -> None:
    """Search for the fastest schedule that fits in a given memory.

    The result is at least as quick as every schedule of the catalogue that has this placement and fits, and comes with a
    lower bound: no order can gain more than the gap. --out writes CSV for `penstock simulate`, `penstock schedule check` and
    `Pipeline(schedule=...)`.
    """
    if math.isnan(seconds):
        raise ConfigError("--seconds must be a number above 0, got nan")
    if out is not None:
        if not is_csv(out) and (Path(out).is_file() or not os.path.exists(out)):
            raise ConfigError(f"--out must end in .csv, by which other commands know a schedule, got {out!r}")
        require_outputs([OutputFile("--out", Path(out), SCHEDULE)])
    v = virtual_stages or (2 if placement == "v" else 1)
    require_size("search", ranks, microbatches, v)
    placed = shaped_placement(placement, ranks, v)
    budget, counted = _budget(memory_limit, saved, waiting, placed.stages)
    table = priced(costs, latency, placed)
    try:
        result = search_schedule(
            placed,
            microbatches,
            table,
            "split" if backward == "split" else "full",
            budget,
            seconds=seconds,
            seed=seed,
        )
    except KeyboardInterrupt:
        click.echo("penstock: interrupted before an order was found; no file was written", err=True)
        click.get_current_context().exit(of_signal(signal.SIGINT))
    result = replace(result, peak=counted.peak(result.schedule))
    if out is not None:
        write_csv(result.schedule, out)
    if as_json:
        click.echo(json.dumps(result.as_dict()))
    else:
        _show(result, microbatches, budget, saved == "1" and waiting == "0")
        if out is not None:
            click.echo(f"\nwritten: {out}")


def _budget(memory_limit: str | None, saved: str, waiting: str, stages: int) -> tuple[Budget | None, Budget]:
    """Return the limit, if there is one, and a budget that counts memory with the sizes given."""
    sizes = {name: stage_bytes(name, text) for name, text in (("--saved", saved), ("--waiting", waiting))}
    for name, size in sizes.items():
        if isinstance(size, list) and len(size) != stages:
            raise ConfigError(
                f"{name} must be one number of bytes, or one for each of the {stages} stages, got {len(size)}"
            )
    counted = Budget(0, sizes["--saved"], sizes["--waiting"])
    if memory_limit is None:
        return None, counted
    in_units = memory_limit.strip().isdecimal()
    if not in_units and saved == "1":
        raise ConfigError(
            f"--memory-limit must be a number of activations unless --saved gives their bytes, got {memory_limit!r}"
        )
    limit = int(memory_limit) if in_units else int(parse_bytes("--memory-limit", memory_limit))
    return replace(counted, limit=limit), counted


def _show(result: CertifiedSchedule, microbatches: int, budget: Budget | None, counted: bool) -> None:
    unit = "activations" if counted else "bytes"
    allowed = "no limit" if budget is None else f"of {budget.limits(1)[0]}"
    ended = {
        "proved": "the lower bound is reached: no order is quicker",
        "converged": "the search ended by itself",
        "time": "the time limit was reached",
        "interrupted": "interrupted",
    }[result.ended]
    schedule = result.schedule
    click.echo(
        f"{schedule.name}: {describe_size(schedule.ranks, schedule.stages, microbatches)}\n\n"
        f"makespan      {result.makespan:.6g}\n"
        f"bubble        {result.bubble:.6g}, of the busiest rank\n"
        f"memory        {result.peak.max()} {unit} ({allowed})\n"
        f"lower bound   {result.lower_bound:.6g}  no order with this placement, costs and memory takes less\n"
        f"gap           {result.gap:.2%}\n"
        f"search        {result.seconds:.1f} s, {result.rounds} rounds from {result.start}; {ended}"
    )
