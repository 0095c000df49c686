"""Initial weights that depend on a seed and a parameter's name, and on nothing else.

A model cut into any number of stages, built in any order, in any number of processes, starts from the same weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from threading import RLock
from typing import TypeVar

import torch
from torch import nn

from penstock.stage.rng.default_generators import cuda_generators
from penstock.stage.rng.seeds import seed_of

T = TypeVar("T")

Rule = Callable[[str, torch.Tensor, torch.Generator], None]


def generator_for(seed: int, name: str) -> torch.Generator:
    """A CPU generator of this seed and name alone."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))


def build_with_weights(build: Callable[[], nn.Module], prefix: str, seed: int, rule: Rule) -> nn.Module:
    """Build a module without drawing from torch's default generator, and fill its parameters by `rule`.

    Args:
        build: makes the module; it must be all parameters, for buffers are not filled.
        prefix: the layer's name; a parameter's whole name is ``prefix.name``.
        seed: of all the weights.
        rule: ``rule(name, parameter, generator)`` fills a parameter in place; `name` is within the layer.
    """
    with torch.device("meta"):
        module = build()
    module = module.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            rule(name, parameter, generator_for(seed, f"{prefix}.{name}"))
    return module


_BUILDING = RLock()  # the default generators are the process's, and so is the right to set them


def build_seeded(build: Callable[[], T], seed: int, name: str) -> T:
    """Build a layer whose initial weights depend on the seed and its name alone.

    torch's default generators (of the CPU and, where CUDA is in use, of every device) are seeded for the call, and set
    back after it. One thread at a time; nothing else should draw from them meanwhile.

    Args:
        build: makes the layer.
        seed: of the model.
        name: the layer's name in the whole model.
    """
    own = seed_of(seed, name)
    generators = cuda_generators()
    with _BUILDING, torch.random.fork_rng(range(len(generators))):
        # Not torch.manual_seed, which would also seed devices that are not in use yet, for good.
        for generator in (torch.default_generator, *generators):
            generator.manual_seed(own)
        return build()
