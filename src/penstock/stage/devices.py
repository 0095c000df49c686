"""Devices that modules are on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import methodcaller

import torch
from torch import Tensor, nn


def device_of(modules: Sequence[nn.Module]) -> torch.device | None:
    """Return the CUDA device of the first parameter or buffer on one; None if all are on the CPU."""
    return next(devices_of(modules), None)


def devices_of(modules: Sequence[nn.Module]) -> Iterator[torch.device]:
    """Yield the CUDA device of every parameter and buffer on one."""
    for module in modules:
        for tensor in chain(module.parameters(), module.buffers()):
            if tensor.is_cuda:
                yield tensor.device


def place_of(parameters: Iterable[Tensor]) -> torch.device | None:
    """Return the device of the first parameter with values; None if none has values."""
    return next((parameter.device for parameter in parameters if not parameter.is_meta), None)


def places_of(parameters: Iterable[Tensor]) -> set[torch.device]:
    """Return the devices that parameters with values are on."""
    return {parameter.device for parameter in parameters if not parameter.is_meta}


def move_own(module: nn.Module, device: torch.device) -> None:
    """Move a module's own parameters and buffers to a device, without those of the modules within it.

    What is there is not touched: quantised parameters make new ones of themselves when they are moved.
    """
    own = (*module._parameters.values(), *module._buffers.values())
    if any(tensor is not None and tensor.device != device for tensor in own):
        module._apply(methodcaller("to", device), recurse=False)
