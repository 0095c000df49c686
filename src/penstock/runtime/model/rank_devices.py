"""Devices of ranks that are threads of one process: given by rank, or where the model's layers are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from penstock.base.errors import ConfigError, first_line
from penstock.runtime.validation import local_device
from penstock.schedule.schedule import Schedule
from penstock.stage.devices import place_of
from penstock.stage.layers import Layer
from penstock.stage.split import Split

Device = torch.device | str


def given_devices(
    device: Device | Sequence[Device] | None, layers: Sequence[Layer], in_processes: bool
) -> tuple[torch.device, ...]:
    """Return the devices of the ranks in their order; none if they have one, or each process has its own.

    Args:
        device: device that was given for all ranks, or one for each; None takes those of the layers if they are on several.

    Raises:
        ConfigError: if they cannot be used; says why.
    """
    if device is None:
        found = _devices_of(layers)
        if len(found) > 1 and in_processes:
            raise ConfigError(
                f"the model's layers are on {len(found)} devices ({_names(found)}), and each process here computes on one; "
                "load the model in each process onto its own GPU, as with device_map={'': GPU}, or start one process: its "
                "ranks are then threads with a device each"
            )
        return found if len(found) > 1 else ()
    if isinstance(device, str | torch.device | int):
        return ()
    if not isinstance(device, Sequence) or not device:
        raise ConfigError(
            "device must be one device, or a list with one for each rank, as ['cuda:0', 'cuda:1'], got "
            f"{device!r:.80}"
        )
    listed = [*map(str, device)]
    if in_processes:
        raise ConfigError(
            f"device={listed} are those of ranks that are threads of one process; where each rank is a process, give "
            "device='cuda', which is the GPU of its LOCAL_RANK"
        )
    places = [local_device(each, False) for each in device]
    if None in places:
        raise ConfigError(f"device={listed} leaves a rank without a device; give one for each")
    try:
        # With its number, as the tensors on it have it.
        return tuple(torch.empty(0, device=each).device for each in places)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"device={listed} has one that torch cannot use here: {first_line(error)}"
        ) from error


def require_devices(
    devices: Sequence[torch.device], schedule: Schedule, layers: Sequence[Layer], split: Split, given: bool
) -> Split:
    """Require one device for each rank, and return the split that leaves layers where they are.

    Args:
        given: whether the devices were given by rank. Otherwise they are the layers'.

    Returns:
        `split`, unless it is "even" and the layers are on the devices, with a stage for each.

    Raises:
        ConfigError: if there are more or fewer of them, or the layers go back to one that they have left.
    """
    if devices and len(devices) != schedule.ranks:
        where = "device has" if given else "the model's layers are on"
        raise ConfigError(
            f"{where} {len(devices)} ({_names(devices)}), and the schedule has {schedule.ranks} ranks; give "
            f"ranks={len(devices)}, or as device a list with one for each rank, in which one may be several times"
        )
    if not devices or given:
        return split
    blocks = [place for layer in layers if layer.role == "block" and (place := _place(layer)) is not None]
    runs = [(place, len([*run])) for place, run in groupby(blocks)]
    if len(runs) > len(devices):
        raise ConfigError(
            f"the layers are on {_names([place for place, _ in runs])}, in this order, and go back to a device that they "
            "have left; a stage is a run of layers: load the model with a device_map that gives each device one run, or "
            "give as device a list with one for each rank"
        )
    counted = len(blocks) == sum(layer.role == "block" for layer in layers)
    fits = len(runs) == schedule.stages and counted
    return [count for _, count in runs] if split == "even" and fits else split


def _devices_of(layers: Sequence[Layer]) -> tuple[torch.device, ...]:
    """Return the devices of the blocks, each once; those of an embedding and a head are their neighbours'."""
    places = (_place(layer) for layer in layers if layer.role == "block")
    return tuple(dict.fromkeys(place for place in places if place is not None))


def _place(layer: Layer) -> torch.device | None:
    """Return the device of a layer's first parameter; None if it has none, or is not built."""
    return None if layer.module is None else place_of(layer.module.parameters())


def _names(devices: Sequence[object]) -> str:
    return ", ".join(map(str, devices[:8])) + (", ..." if len(devices) > 8 else "")
