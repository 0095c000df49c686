"""A cluster's file with the rates and links that the ranks measured, in the format of `penstock.plan.cluster`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
import torch

from penstock.base.atomic import write_text
from penstock.base.errors import ConfigError
from penstock.base.output_files import OutputFile, require_outputs, signed, signed_kind
from penstock.measure.device_rates import measure_device, medians
from penstock.measure.link_speeds import measure_links
from penstock.measure.rounds import Answer, Rounds
from penstock.plan.cluster import MEASURED_ERROR, read_cluster
from penstock.runtime.start.launch_environment import find_launch, own_device
from penstock.runtime.workers.world import World

# More than a pass measures times the passes, since a few calls of each have to finish in any case.
_KERNELS = 200
_LARGEST_ERROR = 0.9
_FIRST_LINE = "# Measured by penstock doctor"
_DIGITS = 4  # significant digits of the file; measurements repeat to two or three


@dataclass(frozen=True)
class Measurement:
    """Outcome of measuring a cluster, equal on every rank."""

    table: Mapping[str, Any]  # contents of the file; empty if something failed
    trouble: Sequence[tuple[int, str]] = ()


def require_writable(path: Path) -> None:
    """Require a path at which a measured cluster's file can be written, before anything is measured."""
    if path.suffix != ".toml" or "\0" in str(path):
        raise ConfigError(
            f"--measure writes a cluster's file, whose name must end in .toml, got {str(path)!r}"
        )
    require_outputs([OutputFile("--measure", path, signed_kind("penstock doctor", _FIRST_LINE))])
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"cannot write {path}: {path.parent} cannot be written; choose another folder")


def write_measured_cluster(
    rounds: Rounds, world: World | None, machines: Sequence[str], path: Path
) -> Measurement:
    """Measure devices and links, and let rank 0 write the file; every rank calls it."""
    nodes = dict.fromkeys(machines)
    sizes = {machines.count(node) for node in nodes}
    if len(sizes) > 1:
        why = f"the machines have {', '.join(map(str, sorted(sizes)))} ranks; start as many on each"
        return Measurement({}, [(0, why)])
    (per_node,) = sizes
    device = device_of(rounds.rank, machines)
    measured = rounds.each(
        "device rates", lambda: measure_device(device, per_node, rounds.timeout / _KERNELS)
    )
    table: dict[str, Any] = {"name": path.stem, "ranks_per_node": per_node, "nodes": len(nodes)}
    answers = measured
    if not _trouble(measured):
        rates = medians([answer.value for answer in measured])
        rates["memory"] = min(answer.value["memory"] for answer in measured)  # all ranks have to fit
        error = min(_LARGEST_ERROR, max(MEASURED_ERROR, rates.pop("spread")))
        table |= {"dtype": next(iter(rates["matmul"])), "error": error, "device": rates}
        if world is not None:
            joined = world
            answers = rounds.each(
                "link speeds", lambda: measure_links(joined, machines, device, rounds.timeout)
            )
            if not _trouble(answers):
                table |= answers[0].value
    if not (trouble := _trouble(answers)):
        written = rounds.each(
            "cluster file", lambda: _write(table, path, device) if rounds.rank == 0 else None
        )
        trouble = _trouble(written)
    return Measurement({} if trouble else rounded(table), trouble)


def device_of(rank: int, machines: Sequence[str]) -> torch.device:
    """Return the device of a rank: its own GPU if its machine has one for each rank there, else the CPU."""
    count = torch.cuda.device_count()
    place = list(machines[:rank]).count(machines[rank])
    launch = find_launch()
    own = own_device(count) if launch is not None else place
    alone = launch is not None and launch.own_devices and count > 0
    if not alone and count < machines.count(machines[rank]):
        return torch.device("cpu")
    device = torch.device("cuda", own)
    torch.cuda.set_device(device)
    return device


def _trouble(answers: Sequence[Answer]) -> list[tuple[int, str]]:
    return [(rank, answer.trouble) for rank, answer in enumerate(answers) if answer.trouble]


def rounded(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table with numbers of as many digits as measurements are good for."""
    return {
        key: rounded(value)
        if isinstance(value, Mapping)
        else float(f"{value:.{_DIGITS}g}")
        if isinstance(value, float)
        else value
        for key, value in table.items()
    }


def _write(table: Mapping[str, Any], path: Path, device: torch.device) -> None:
    what = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    text = tomli_w.dumps(rounded(table))
    first_line = f"{_FIRST_LINE} with torch {torch.__version__} on {what} per rank."
    write_text(path, signed(f"{first_line}\n{text}"))
    read_cluster(path)
