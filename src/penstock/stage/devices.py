"""GPUs that modules are on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import nn


def device_of(modules: Sequence[nn.Module]) -> torch.device | None:
    """Return the CUDA device of the first parameter or buffer on one; None if all are on the CPU."""
    return next(devices_of(modules), None)


def devices_of(modules: Sequence[nn.Module]) -> Iterator[torch.device]:
    """Yield the CUDA device of every parameter and buffer on one."""
    for module in modules:
        for tensor in chain(module.parameters(), module.buffers()):
            if tensor.is_cuda:
                yield tensor.device
