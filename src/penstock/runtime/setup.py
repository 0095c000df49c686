"""What a Pipeline checks before it builds anything."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from penstock.errors import ConfigError, ScheduleError
from penstock.runtime.world import World
from penstock.schedule.families import FAMILIES, build_schedule
from penstock.schedule.ops import Kind
from penstock.schedule.schedule import Schedule
from penstock.schedule.text import read_csv
from penstock.stage.stage import Stage


def require_count(what: str, value: object) -> None:
    """Refuse anything but a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{what} must be a whole number of at least 1, not {value!r}")


def resolve_schedule(
    schedule: str | Path | Schedule,
    ranks: int | None,
    microbatches: int,
    virtual_stages: int,
    world: World | None,
) -> Schedule:
    """The schedule that is meant, with the number of ranks checked against the processes there are."""
    if ranks is None and world is not None and world.size > 1:
        ranks = world.size
    if isinstance(schedule, str) and not schedule.endswith(".csv"):
        family = FAMILIES.get(schedule)
        # One virtual stage is what a Pipeline says when it is not told; a family that always has more keeps its own.
        fixed = family is not None and not (
            family.chooses_virtual_stages and family.least_virtual_stages == 1
        )
        wanted = None if fixed and virtual_stages == 1 else virtual_stages
        found = build_schedule(schedule, ranks or 1, microbatches, wanted)
    else:
        found = schedule if isinstance(schedule, Schedule) else read_csv(schedule)
        if ranks is not None and found.ranks != ranks:
            raise ScheduleError(
                f"the schedule {found.name} is for {found.ranks} ranks, but there are {ranks}"
            )
        if found.microbatches != microbatches:
            raise ScheduleError(
                f"the schedule {found.name} has {found.microbatches} microbatches, but microbatches={microbatches}"
            )
    if world is not None and world.size > 1 and found.ranks != world.size:
        raise ConfigError(
            f"{found.ranks} pipeline ranks, but {world.size} processes were started; start one process a rank"
        )
    return found


def local_device(device: torch.device | str | None, in_processes: bool) -> torch.device | None:
    """The device that is meant; in processes a GPU without a number is the one of LOCAL_RANK.

    Raises:
        ConfigError: it is not there.
    """
    if device is None:
        return None
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"{device!r} is no device: {str(error).splitlines()[0]}") from error
    if found.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                f"device={device!r}, but torch sees no GPU here; leave device out to stay on the CPU"
            )
        if in_processes and str(found) == "cuda":  # without a number
            found = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(found)
    return found


def require_runnable(schedule: Schedule) -> None:
    """Refuse a schedule with ops the executor has no code for."""
    if (schedule.kind == Kind.R).any():
        raise ScheduleError(f"{schedule.name} has ops of kind R (recompute), which the runtime does not run")


def require_untied(stages: Mapping[int, Stage]) -> None:
    """Refuse a parameter that two stages would write to at once."""
    home: dict[int, tuple[int, str]] = {}
    for index, stage in stages.items():
        for name, parameter in stage.module.whole_model_parameters():
            other = home.setdefault(id(parameter), (index, name))
            if other[0] != index:
                raise ConfigError(
                    f"{name} (stage {index}) and {other[1]} (stage {other[0]}) are one parameter; "
                    "tied weights have to be on one stage"
                )
