"""Facts about a run that its traces do not have: where, when and how it ran, and how fast."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from penstock.base.bounded_io import MEGABYTE, parse_json, read_bytes
from penstock.base.counts import plural
from penstock.base.errors import PenstockError
from penstock.plan.cluster import PRESETS, read_cluster
from penstock.plan.profile.closed_form import Workload
from penstock.plan.profile.model_profile import of_shape
from penstock.plan.profile.model_shape import read_shape
from penstock.show.units import finite

_MAX_BYTES = 16 * MEGABYTE
_MAX_SHOWN, _MAX_LENGTH = 8, 2000
_BACKWARD = 2
"""FLOPs of a backward over the FLOPs of its forward."""


class Fact(NamedTuple):
    """One line of a table of facts, as text."""

    name: str
    value: str


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run; empty where its folder does not tell."""

    # Speed of all ranks over the run, or over its last logged steps if it has not ended; None if unknown.
    tokens_per_second: float | None = None
    # Share of the devices' rated FLOP/s that the model's FLOPs are; None where one of them is unknown.
    mfu: float | None = None
    lines: tuple[Fact, ...] = ()  # the rest, in the order to show it

    @property
    def tiles(self) -> list[tuple[str, str]]:
        """(value, name) of the figures, for the page's tiles."""
        tiles = []
        if self.tokens_per_second is not None:
            tiles.append((f"{self.tokens_per_second:,.0f}", "tokens a second, all ranks"))
        if self.mfu is not None:
            tiles.append((f"{self.mfu:.1%}", "MFU"))
        return tiles


UNKNOWN = RunFacts()
"""Facts about a step that belongs to no run's folder."""


def read_facts(
    run: Path, settings: str, metrics: Sequence[Mapping[str, Any]], problems: list[str]
) -> RunFacts:
    """Read the facts about a run; a file that cannot be read adds a sentence to `problems`."""
    starts = _starts(run / "run.json", problems)
    last = starts[-1] if starts else {}
    speed = _speed(metrics)
    return RunFacts(speed, _mfu(run, settings, last, speed), _lines(starts))


def _starts(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        table = parse_json(read_bytes(path, _MAX_BYTES))
    except (OSError, ValueError) as error:
        problems.append(f"cannot read {path}: {error}")
        return []
    starts = table.get("starts") if isinstance(table, dict) else None
    starts = [start for start in starts if isinstance(start, dict)] if isinstance(starts, list) else []
    if not starts:
        problems.append(f"{path} has no list of starts")
    return starts


def _speed(metrics: Sequence[Mapping[str, Any]]) -> float | None:
    for kind in ("final", "train"):
        for row in reversed(metrics):
            if row.get("kind") == kind and (speed := finite(row.get("tokens_per_second"))):
                return speed
    return None


def _lines(starts: Sequence[Mapping[str, Any]]) -> tuple[Fact, ...]:
    if not starts:
        return ()
    last = starts[-1]
    versions = last.get("versions")
    versions = versions if isinstance(versions, dict) else {}
    processes, threads = finite(last.get("processes")), finite(last.get("threads"))
    ranks = (
        "" if processes is None else f"{processes} processes" if processes > 1 else "threads of one process"
    )
    cores = "" if threads is None else f"{plural(int(threads), 'CPU thread')} per rank"
    facts = {
        "started": last.get("time"),
        "command": last.get("command"),
        "host": last.get("host"),
        "device": ", ".join(str(part) for part in (last.get("device"), last.get("dtype")) if part),
        "layout": ", ".join(str(part) for part in (last.get("layout"), ranks, cores) if part),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "resumed": "; ".join(
            f"after step {s.get('step')}, {s.get('time')}" for s in starts[1:][-_MAX_SHOWN:]
        ),
    }
    return tuple(Fact(name, _shortened(str(value))) for name, value in facts.items() if value)


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}..."


def _mfu(run: Path, settings: str, start: Mapping[str, Any], speed: float | None) -> float | None:
    """Return the MFU; None unless speed, model and the rating of the device for the run's dtype are known."""
    name, dtype = str(start.get("device", "")).lower(), str(start.get("dtype", ""))
    processes = finite(start.get("processes"))
    device = next((preset for preset in PRESETS if preset.split("-")[0] in name), None)
    if speed is None or device is None or processes is None:
        return None
    try:
        config = tomllib.loads(settings)
        rated = (read_cluster(f"{device}*1x1").device.peak or {}).get(dtype)
        flops = _flops_of_token(run, config, dtype)
    except (PenstockError, ValueError, RecursionError):
        return None  # a model whose FLOPs are not known
    return speed * flops / (rated * processes) if rated and flops else None


def _flops_of_token(run: Path, config: Mapping[str, Any], dtype: str) -> float | None:
    """Return the model's FLOPs for one token of a step: a forward and a backward of all weights, no recompute."""
    model, data = config.get("model"), config.get("data")
    sequence = data.get("sequence") if isinstance(data, dict) else None
    if not isinstance(model, dict) or not isinstance(sequence, int):
        return None
    hugging_face = model.get("path") or model.get("config")
    kept = hugging_face and (run / "config.json").is_file()
    table = of_shape(read_shape(run / ("config.json" if kept else "config.toml"))).table(
        Workload(1, sequence, dtype=dtype)
    )
    forward = sum(float(table.costs[kind].model_flops) for kind in table.kinds)
    return (1 + _BACKWARD) * forward / sequence
