"""Initial weights that depend only on a seed and a name.

A model starts from the same weights with any number of stages, built in any order, in any number of processes.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import TypeVar

import torch
from torch import nn

from penstock.base.errors import ConfigError, first_line
from penstock.stage.rng.isolated_rng import digest_seed, seed_of
from penstock.stage.rng.random_state import cuda_generators

T = TypeVar("T")

Rule = Callable[[str, torch.Tensor, torch.Generator], None]


def generator_for(seed: int, name: str) -> torch.Generator:
    """Return a CPU generator that depends only on the seed and the name."""
    return torch.Generator().manual_seed(digest_seed(f"{seed}:{name}".encode()))


def build_with_weights(build: Callable[[], nn.Module], prefix: str, seed: int, rule: Rule) -> nn.Module:
    """Build a module without drawing from torch's default generator; `rule` fills its parameters, and buffers are zeros.

    Args:
        build: function that makes the module.
        rule: function ``rule(name, parameter, generator)`` that fills a parameter in place; `name` is within the layer.
    """
    with torch.device("meta"):
        module = build()
    module = module.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            rule(name, parameter, generator_for(seed, f"{prefix}.{name}"))
        for buffer in module.buffers():
            buffer.zero_()
    return module


_BUILDING = RLock()  # all threads share the default generators, so only one may seed them at a time


def build_seeded(build: Callable[[], T], seed: int, name: str) -> T:
    """Build a layer whose initial weights depend only on the seed and the layer's name.

    torch's default generators (of the CPU and, where CUDA is in use, of every device) are seeded for the call, and restored
    after it. Only one thread builds at a time; nothing else should draw from the default generators meanwhile.

    Raises:
        ConfigError: if the weights do not fit into memory.
    """
    layer_seed = seed_of(seed, name)
    generators = cuda_generators()
    with _BUILDING, torch.random.fork_rng(range(len(generators))):
        # torch.manual_seed would also seed devices that are not in use yet, and nothing would restore those.
        for generator in (torch.default_generator, *generators):
            generator.manual_seed(layer_seed)
        try:
            return build()
        except (RuntimeError, MemoryError) as error:
            if not _is_too_large(error):
                raise
            raise ConfigError(
                f"the weights of layer {name!r} do not fit into memory ({first_line(error)}); make the model's sizes "
                "smaller, or use a machine with more memory"
            ) from error


def _is_too_large(error: Exception) -> bool:
    """Return whether a tensor was too large for the memory; on the CPU, torch has no class of its own for it."""
    out_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return out_of_memory or any(text in str(error) for text in ("allocate memory", "calculation overflowed"))
