"""torch's default generators, of the CPU and of the CUDA devices in use."""

from __future__ import annotations

from typing import Any

import torch


def default_states() -> tuple[Any, ...]:
    """Return the states of the CPU's default generator and, if CUDA is in use, of every device's."""
    return torch.get_rng_state().numpy().tobytes(), *cuda_states()


def cuda_states() -> tuple[Any, ...]:
    """Return the seeds and offsets of the CUDA devices' default generators, without a copy from a device."""
    return tuple((g.initial_seed(), g.get_offset()) for g in cuda_generators())


def cuda_generators() -> tuple[torch.Generator, ...]:
    """Return the default generators of the CUDA devices; none until CUDA is in use."""
    return torch.cuda.default_generators if cuda_in_use() else ()


def cuda_in_use() -> bool:
    """Return whether this process has initialized CUDA."""
    return bool(torch.cuda.is_initialized())
