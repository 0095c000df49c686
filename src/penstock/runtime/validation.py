"""Checks of a Pipeline's arguments, before it builds anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from penstock.base.counts import plural
from penstock.base.errors import ConfigError, ScheduleError, first_line
from penstock.parallel.axes import used_axes
from penstock.parallel.axis import GivenLoss
from penstock.parallel.mesh import Mesh, MeshShape, require_fit, require_threads
from penstock.runtime.batch.loss_weights import Reduction, require_reduction
from penstock.runtime.options import ExecutionOptions
from penstock.runtime.start.launch_environment import own_device
from penstock.runtime.start.place import Place
from penstock.schedule.check import check
from penstock.schedule.families import CatalogueFamily, require_family
from penstock.schedule.program import Program
from penstock.schedule.schedule import Schedule
from penstock.schedule.text import is_csv, read_csv
from penstock.stage.compute.output_loss import OutputLoss
from penstock.stage.compute.recompute import require_policy
from penstock.stage.compute.runner import LossFunction, Settings
from penstock.stage.devices import place_of
from penstock.stage.layers import Layer
from penstock.stage.rng.random_state import RandomState


def require_loss_without_parameters(loss_fn: object, schedule: Schedule, mesh: MeshShape | None) -> None:
    """Check that a loss function which several ranks call has no parameters to train: their gradients are not reduced."""
    copied = len(schedule.placement.holders[-1]) > 1 or (mesh is not None and mesh.replicas > 1)
    if not copied or not isinstance(loss_fn, nn.Module):
        return
    if names := [name for name, p in loss_fn.named_parameters() if p.requires_grad]:
        raise ConfigError(
            f"loss_fn ({type(loss_fn).__name__}) has parameters to train: {', '.join(names)}; their gradients are not added "
            f"over the copies of the last stage (schedule {schedule.name}, dp={1 if mesh is None else mesh.dp}). "
            "Make them part of the last layer, or use a schedule and mesh without copies"
        )


def resolve_schedule(
    schedule: str | Path | Schedule,
    ranks: int | None,
    microbatches: int,
    virtual_stages: int | None,
    processes: int | None,
) -> Schedule:
    """Return the schedule that a Pipeline's arguments choose."""
    if ranks is None and processes is not None:
        ranks = processes
    if isinstance(schedule, str) and not is_csv(schedule):
        family = require_family(schedule)
        chosen = virtual_stages
        if isinstance(family, CatalogueFamily):
            # A family that always has more stages keeps its number.
            fixed = not (family.chooses_virtual_stages and family.least_virtual_stages == 1)
            chosen = None if fixed and virtual_stages == 1 else virtual_stages or (None if fixed else 1)
        resolved = family.build(ranks or 1, microbatches, chosen)
    else:
        resolved = schedule if isinstance(schedule, Schedule) else read_csv(schedule)
        _require_match(resolved, ranks, microbatches, virtual_stages or 1)
    if processes is not None and resolved.ranks != processes:
        raise ConfigError(
            f"{resolved.ranks} pipeline ranks, but the launch has {plural(processes, 'process')}; start one process per rank"
        )
    return resolved


def program_for(
    schedule: Schedule, given: str | Path | Schedule, virtual_stages: int | None, microbatches: int
) -> Program:
    """Return the checked program of a pipeline for another number of microbatches.

    Args:
        given: name or function of the pipeline's family; or else a schedule or file, which has only one number.
    """
    named = isinstance(given, str) and not is_csv(given)
    chosen = (given, virtual_stages) if named else (schedule, None)
    found = resolve_schedule(chosen[0], schedule.ranks, microbatches, chosen[1], None)
    if found.placement != schedule.placement:
        raise ScheduleError(
            f"with {plural(microbatches, 'microbatch')} the schedule {found.name} places its stages on other ranks than "
            f"with {schedule.microbatches}, which the pipeline was built for; build another one"
        )
    return check(found).program


def _require_match(schedule: Schedule, ranks: int | None, microbatches: int, virtual_stages: int) -> None:
    if ranks is not None and schedule.ranks != ranks:
        raise ScheduleError(
            f"the schedule {schedule.name} is for {plural(schedule.ranks, 'rank')}, but there are {ranks}"
        )
    counts = {len(stages) for stages in schedule.placement.stages_of}
    if virtual_stages not in (1, schedule.stages / schedule.ranks) and counts != {virtual_stages}:
        raise ScheduleError(
            f"the schedule {schedule.name} already assigns its stages to ranks ({plural(schedule.stages, 'stage')} on "
            f"{plural(schedule.ranks, 'rank')}), but virtual_stages={virtual_stages}; leave virtual_stages out"
        )
    if schedule.microbatches != microbatches:
        # A file's number is that of its highest op, so an op too many would pass for another number.
        check(schedule)
        raise ScheduleError(
            f"the schedule {schedule.name} has {plural(schedule.microbatches, 'microbatch')}, "
            f"but microbatches={microbatches}; a schedule or a file has one number, the name of a family takes any"
        )


def resolve_mesh(
    mesh: MeshShape | Mesh | None, ranks: int | None, place: Place | None
) -> tuple[int | None, int | None]:
    """Return the number of pipeline ranks if it is given, and the number of processes of one pipeline, None in threads."""
    processes = place.size if place is not None and place.size > 1 else None
    if mesh is None:
        return ranks, processes
    shape = mesh.shape if isinstance(mesh, Mesh) else mesh
    if ranks is not None and ranks != shape.pp:
        raise ConfigError(f"the mesh has {shape.pp} pipeline ranks, but ranks={ranks}; leave ranks out")
    if isinstance(mesh, Mesh):  # its processes are in torch.distributed
        return shape.pp, shape.pp if shape.ranks > 1 else None
    if processes is not None:
        require_fit(mesh, processes)
        return mesh.pp, mesh.pp
    require_threads(mesh, "SCRIPT")
    return mesh.pp, None


def local_device(device: object, in_processes: bool) -> torch.device | None:
    """Return the device of this process; in processes ``cuda`` without a number means the GPU LOCAL_RANK."""
    if device is None:
        return None
    try:
        chosen: torch.device = torch.device(device)  # type: ignore[call-overload]  # what a caller gives is looked at here
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"{device!r} is not a device: {first_line(error)}") from error
    if chosen.type == "meta":
        raise ConfigError(
            "device='meta' has no values to train; give 'cpu', or 'cuda' with or without a number"
        )
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                f"device={device!r}, but torch sees no GPU here; leave device out to stay on the CPU"
            )
        if in_processes and str(chosen) == "cuda":  # without an index
            chosen = torch.device("cuda", own_device(torch.cuda.device_count()))
        count = torch.cuda.device_count()
        if chosen.index is not None and chosen.index >= count and not in_processes:
            raise ConfigError(
                f"device={str(device)!r}, but torch sees {plural(count, 'GPU')} here, from cuda:0 on; give one of them, "
                "which a list of the ranks' devices may have several times"
            )
        if chosen.index is not None and chosen.index >= count:
            raise ConfigError(
                f"device={str(device)!r} is {chosen} for this process, by its LOCAL_RANK if no number was given, and torch "
                f"sees {plural(count, 'GPU')} here; start as many processes on a host as it has GPUs"
            )
        if in_processes:
            torch.cuda.set_device(chosen)
    return chosen


def device_type(device: torch.device | None, layers: Sequence[Layer]) -> str:
    """Return the type of the device that weights will be on: of the given one, or where they are or will be made."""
    if device is not None:
        return device.type
    made = (p for layer in layers if layer.module is not None for p in layer.module.parameters())
    return (place_of(made) or torch.get_default_device()).type


class LossScale(Protocol):
    """Factor of the loss before the backward, so that half precision does not underflow."""

    @property
    def scale(self) -> float:
        """The factor."""


def resolve_loss(
    loss_fn: LossFunction,
    own: Reduction,
    chosen: Reduction | None,
    mesh: MeshShape | None,
    dims: Mapping[str, object] | None,
) -> GivenLoss:
    """Return the loss function of a pipeline, and how the losses of microbatches are joined.

    Args:
        own: the reduction that comes with the function.
        chosen: the one that was given, or None.
    """
    # The count that comes with a loss also knows whether it shifts its targets.
    counts = callable(own) and chosen == "valid"
    reduction = require_reduction(own if chosen is None or counts else chosen)
    if isinstance(loss_fn, OutputLoss) and reduction not in ("mean", "sum"):
        raise ConfigError(
            f"reduction={chosen!r} counts targets, and the loss takes none; use 'mean', which counts rows, or 'sum'"
        )
    loss = GivenLoss(loss_fn, reduction)
    for axis in used_axes(mesh):
        assert mesh is not None, "it has axes"
        loss = axis.take_loss(mesh, loss, dims)
    return loss


def make_settings(
    recompute: object,
    autocast: object,
    options: ExecutionOptions,
    random: RandomState,
    mesh: MeshShape | None,
) -> Settings:
    """Return the settings of the stages' computation."""
    exchanges = any(axis.exchanges for axis in used_axes(mesh))
    policy, memory = require_policy(recompute), options.memory
    if policy == "auto":
        if exchanges:
            raise ConfigError(
                "recompute='auto' measures each process, and with divided experts (ep) or samples (cp) all must recompute "
                "the same layers; take 'full', 'none' or a number of layers"
            )
        if memory is None:
            raise ConfigError(
                "recompute='auto' needs memory, the bytes that a rank may hold: execution=ExecutionOptions(memory=...)"
            )
    elif memory is not None:
        raise ConfigError(f"memory={memory!r} is for recompute='auto', not for recompute={recompute!r}")
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise ConfigError(f"autocast must be torch.bfloat16, torch.float16 or None, got {autocast!r}")
    assert autocast is None or isinstance(autocast, torch.dtype)
    return Settings(policy, options.offload, autocast, random, options.strict, exchanges)


def require_seed(seed: object) -> int:
    """Return a random seed; raise a `ConfigError` unless it is a whole number."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ConfigError(f"seed must be a whole number, got {seed!r}")
    return seed
