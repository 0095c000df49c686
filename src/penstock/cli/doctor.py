"""``penstock doctor``: check a machine, or under torchrun a cluster, before a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from penstock.base.counts import plural
from penstock.base.errors import ConfigError
from penstock.cli.options import count
from penstock.cli.output import table_console

if TYPE_CHECKING:
    from penstock.doctor.examine import Report

MATRIX = 12
"""Up to so many ranks, links are a table of all pairs; with more, only those between neighbours are shown."""


@click.command(
    epilog="Example:  penstock doctor --folder runs\n\n"
    "          penstock doctor --ranks 8 --measure cluster.toml\n\n"
    "          torchrun --nnodes 2 --nproc-per-node 8 ... -m penstock doctor --folder /shared/runs --json"
)
@count("--ranks", "-p", help="Processes to start on this machine. Default: 2. Not under torchrun.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    help="Folder that will hold runs: every rank writes there and looks for every rank's file. Default: none is checked.",
)
@click.option(
    "--measure",
    "cluster",
    type=click.Path(path_type=Path),
    help="If all is sound, measure the devices and the links, and write this TOML file for penstock plan --cluster.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds that one check may take.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    ranks: int | None, folder: Path | None, cluster: Path | None, timeout: float, as_json: bool
) -> None:
    """Check a machine or a cluster before a run.

    Run alone, it starts processes on this machine that talk over the loopback interface; under torchrun it checks all
    ranks. It checks versions, devices, cores, memory, limits, the links between every pair of ranks, the clocks, whether a
    wait times out, and a shared folder. Exit codes: 0 sound, 1 something will not work, 2 bad input.
    """
    from penstock.doctor.examine import examine_here, examine_together
    from penstock.runtime.start.place import current_place

    place = current_place()
    if place is None or place.size == 1:
        report = examine_here(ranks or 2, folder, timeout, cluster)
    else:
        if ranks is not None:
            raise ConfigError(
                f"--ranks starts processes, but a launcher has started {place.size}; leave --ranks out to check them"
            )
        report = examine_together(place, folder, timeout, cluster)
    if place is None or place.rank == 0:
        if as_json:
            click.echo(json.dumps(report.plain()))
        else:
            _show(report, started=place is None)
            if report.cluster:
                _cluster(report.cluster, cluster)
            elif cluster is not None:
                click.echo(f"nothing was measured, and {cluster} was not written")
    if not report.sound:
        raise click.exceptions.Exit(1)


def _show(report: Report, *, started: bool) -> None:
    machines = report.machines
    hosts = len({one["machine"] for one in machines.values()})
    here = ", started for this check" if started else ""
    click.echo(f"{plural(report.ranks, 'rank')} on {plural(hosts, 'machine')}{here}\n")
    for versions in dict.fromkeys(
        ", ".join(f"{name} {version}" for name, version in one["versions"].items())
        for one in machines.values()
    ):
        click.echo(versions)
    _machines(report)
    if report.links:
        _links(report, "latency, µs", lambda link: f"{link['latency'] * 1e6:.0f}")
        _links(report, "bandwidth, GB/s", lambda link: f"{link['bandwidth'] / 1e9:.2f}")
    ways: dict[str, int] = {}
    for link in (link for own in report.links.values() for link in own):
        ways[link["way"]] = ways.get(link["way"], 0) + 1
    if ways:
        click.echo("transport: " + ", ".join(f"{way} ({n} links)" for way, n in ways.items()))
    if report.clocks:
        clock = max(report.clocks.values(), key=lambda clock: abs(clock["offset"]))
        click.echo(f"clocks: off by at most {clock['offset'] * 1e3:+.2f} ms ± {clock['error'] * 1e3:.2f} ms")
    if report.waits:
        click.echo(f"waits: one with a timeout of 1 s ended after {max(report.waits.values()):.2f} s")
    _folder(report)
    click.echo()
    for finding in report.findings:
        click.secho(
            f"{finding.level.upper()}  {finding.what}", fg="red" if finding.level == "problem" else "yellow"
        )
        click.echo(f"  why: {finding.why}\n  do:  {finding.do}")
    problems = sum(finding.level == "problem" for finding in report.findings)
    unsteady = any(finding.subject == "rates" for finding in report.findings)
    sound = "sound, but unsteady: measure again" if unsteady else "sound"
    click.echo(sound if not problems else plural(problems, "problem"))


def _machines(report: Report) -> None:
    table = Table(box=None, pad_edge=False)
    columns = (
        "host",
        "ranks",
        "cores",
        "threads\na rank",
        "memory GiB",
        "free GiB",
        "open files",
        "/dev/shm GiB",
        "GPUs",
    )
    for column in columns:
        table.add_column(column, justify="left" if column in ("host", "GPUs") else "right", no_wrap=True)
    by_machine: dict[str, list[int]] = {}
    for rank, one in report.machines.items():
        by_machine.setdefault(one["machine"], []).append(rank)
    for ranks in by_machine.values():
        one = report.machines[ranks[0]]
        cores = (
            f"{one['cores']}"
            if one["core_quota"] is None
            else f"{one['cores']} (quota {one['core_quota']:g})"
        )
        threads = sorted({report.machines[rank]["threads"] for rank in ranks})
        gpus: dict[str, int] = {}
        for device in one["devices"]:
            gpus[device["name"]] = gpus.get(device["name"], 0) + 1
        table.add_row(
            one["host"], _span(ranks), cores, ", ".join(map(str, threads)),
            _gib(one["memory"]), _gib(one["memory_available"]),
            "no limit" if one["open_files"] is None else str(one["open_files"]), _gib(one["shm"]),
            ", ".join(f"{n} x {name}" for name, n in gpus.items()) or "none",
        )  # fmt: skip
    click.echo()
    table_console().print(table)


def _links(report: Report, title: str, show: Callable[[Mapping[str, Any]], str]) -> None:
    """Print a table with senders as rows and receivers as columns; with too many ranks, neighbours only."""
    ranks = sorted(report.links)
    all_pairs = report.ranks <= MATRIX
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("from \\ to" if all_pairs else "link", justify="right", no_wrap=True)
    for column in ranks if all_pairs else ["there", "back"]:
        table.add_column(str(column), justify="right", no_wrap=True)
    cells = {
        (rank, link["to"]): "broken" if "trouble" in link else show(link)
        for rank in ranks
        for link in report.links[rank]
    }
    if all_pairs:
        for rank in ranks:
            table.add_row(str(rank), *(cells.get((rank, other), "-") for other in ranks))
    else:
        for rank in ranks[:-1]:
            table.add_row(
                f"{rank} - {rank + 1}",
                *(cells.get(pair, "-") for pair in ((rank, rank + 1), (rank + 1, rank))),
            )
    click.echo()
    table_console().print(table)


def _folder(report: Report) -> None:
    sound = [one for one in report.folder.values() if one is not None]
    if not sound:
        return
    longest = {key: max(one[key] for one in sound) * 1e3 for key in ("write", "fsync", "rename", "see")}
    free = min(one["free"] for one in sound)
    click.echo(
        "folder: at most {write:.1f} ms to write 1 MiB, {fsync:.1f} ms to fsync, {rename:.1f} ms to rename, {see:.1f} ms to "
        "see every rank's file; {free} GiB free".format(**longest, free=_gib(free))
    )


def _cluster(table: Mapping[str, Any], path: Path | None) -> None:
    device = table["device"]
    rates = ", ".join(f"{dtype} {rate / 1e12:.3g}" for dtype, rate in device["matmul"].items())
    click.echo(
        f"\nmatrix products: {rates} TFLOP/s, and half of that at width {device['matmul_width']:.0f}; memory "
        f"{device['memory_bandwidth'] / 1e9:.3g} GB/s; launch {device['launch'] * 1e6:.2f} µs; optimizer "
        f"{device['optimizer_bandwidth'] / 1e9:.3g} GB/s"
    )
    for name, where in (("node", "within a node"), ("network", "between nodes")):
        if name in table:
            link = table[name]
            click.echo(f"links {where}: {link['latency'] * 1e6:.3g} µs, {link['bandwidth'] / 1e9:.3g} GB/s")
    click.echo(f"interval of predictions: divided and multiplied by {1 + table['error']:.3g}")
    click.echo(f"written to {path}")


def _gib(size: int | None) -> str:
    return "?" if size is None else f"{size / (1 << 30):.1f}"


def _span(ranks: list[int]) -> str:
    if len(ranks) > 1 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))
