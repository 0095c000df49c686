"""What a Pipeline checks before it builds anything."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from penstock.errors import ConfigError, ScheduleError
from penstock.parallel.mesh import MeshShape, require_fit
from penstock.runtime.options import ExecutionOptions
from penstock.runtime.start.launch_environment import own_device
from penstock.runtime.workers.world import World
from penstock.schedule.families import FAMILIES, build_schedule
from penstock.schedule.schedule import Schedule
from penstock.schedule.text import read_csv
from penstock.stage.compute.recompute import require_policy
from penstock.stage.compute.runner import Settings
from penstock.stage.rng.random_state import RandomState


def require_count(what: str, value: object) -> None:
    """Refuse anything but a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{what} must be a whole number of at least 1, not {value!r}")


def require_loss(loss_fn: object) -> None:
    """Refuse what cannot be called."""
    if not callable(loss_fn):
        raise ConfigError(f"loss_fn must be callable as loss_fn(output, target), not {loss_fn!r}")


def require_loss_without_parameters(loss_fn: object, schedule: Schedule, mesh: MeshShape | None) -> None:
    """Refuse to train parameters of a loss function that several ranks call, since nobody adds up their gradients.

    Raises:
        ConfigError: it has some, and the last stage has copies; names them.
    """
    copied = len(schedule.placement.holders[-1]) > 1 or (mesh is not None and mesh.dp > 1)
    if not copied or not isinstance(loss_fn, nn.Module):
        return
    if names := [name for name, p in loss_fn.named_parameters() if p.requires_grad]:
        raise ConfigError(
            f"loss_fn ({type(loss_fn).__name__}) has parameters to train: {', '.join(names)}; nobody adds their gradients up"
            f" over the copies of the last stage (schedule {schedule.name}, dp={1 if mesh is None else mesh.dp}). "
            "Make them part of the last layer, or use a schedule and mesh without copies"
        )


def resolve_schedule(
    schedule: str | Path | Schedule,
    ranks: int | None,
    microbatches: int,
    virtual_stages: int,
    processes: int | None,
) -> Schedule:
    """The schedule that is meant, with the number of ranks checked against the processes there are for a pipeline."""
    if ranks is None and processes is not None:
        ranks = processes
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
        held = {len(stages) for stages in found.placement.stages_of}
        if virtual_stages not in (1, found.stages / found.ranks) and held != {virtual_stages}:
            raise ScheduleError(
                f"the schedule {found.name} says itself which stages a rank holds ({found.stages} stages on {found.ranks} "
                f"ranks), but virtual_stages={virtual_stages}; leave virtual_stages out"
            )
        if found.microbatches != microbatches:
            raise ScheduleError(
                f"the schedule {found.name} has {found.microbatches} microbatches, but microbatches={microbatches}"
            )
    if processes is not None and found.ranks != processes:
        raise ConfigError(
            f"{found.ranks} pipeline ranks, but {processes} processes were started; start one process a rank"
        )
    return found


def resolve_mesh(
    mesh: MeshShape | None, ranks: int | None, world: World | None
) -> tuple[int | None, int | None]:
    """The pipeline ranks that are given, and how many processes there are for one pipeline; None where nothing says.

    Raises:
        ConfigError: a mesh that has another number of pipeline ranks than `ranks`, does not fit the processes, or is
            tensors in one process.
    """
    processes = world.size if world is not None and world.size > 1 else None
    if mesh is None:
        return ranks, processes
    if ranks is not None and ranks != mesh.pp:
        raise ConfigError(f"the mesh has {mesh.pp} pipeline ranks, but ranks={ranks}; leave ranks out")
    if processes is not None:
        require_fit(mesh, processes)
        return mesh.pp, mesh.pp
    if mesh.tp > 1:
        raise ConfigError(
            f"a mesh of {mesh} needs {mesh.ranks} processes; start them with torchrun --nproc-per-node {mesh.ranks}"
        )
    return mesh.pp, None


def local_device(device: torch.device | str | None, in_processes: bool) -> torch.device | None:
    """The device that is meant; in processes a GPU without a number is the process's own, as its launcher says.

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
            found = torch.device("cuda", own_device(torch.cuda.device_count()))
            torch.cuda.set_device(found)
    return found


class LossScale(Protocol):
    """What multiplies the loss before the backward, so that half precision does not underflow."""

    @property
    def scale(self) -> float:
        """The factor."""


def make_settings(
    recompute: object, autocast: object, options: ExecutionOptions, random: RandomState
) -> Settings:
    """Return how the stages compute.

    Raises:
        ConfigError: if `recompute` is no policy, `autocast` is no dtype of half precision, or ``options.memory`` is missing
            for "auto" or given without it.
    """
    policy, memory = require_policy(recompute), options.memory
    if policy == "auto":
        if memory is None:
            raise ConfigError(
                "recompute='auto' needs memory, the bytes that a rank may hold: execution=ExecutionOptions(memory=...)"
            )
    elif memory is not None:
        raise ConfigError(f"memory={memory!r} is for recompute='auto', not for recompute={recompute!r}")
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise ConfigError(f"autocast must be torch.bfloat16, torch.float16 or None, not {autocast!r}")
    assert autocast is None or isinstance(autocast, torch.dtype)
    return Settings(policy, options.offload, autocast, random, options.strict)


def require_seed(seed: object) -> int:
    """Refuse anything but a whole number."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ConfigError(f"seed must be a whole number, not {seed!r}")
    return seed
