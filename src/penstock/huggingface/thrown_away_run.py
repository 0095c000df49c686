"""Runs of a trainer's methods that are thrown away: they leave no metrics, and random generators as they were."""

from __future__ import annotations

import copy
import random
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.runtime.model.python_state import python_state_kept

_SMALL = 1000
"""Entries up to which a list or dict of a trainer counts as one of its metrics, and is copied; data sets are larger."""


@contextmanager
def thrown_away(trainer: Any, model: Any, modules: bool = True) -> Iterator[Any]:
    """Return a context with a trainer on which a run leaves nothing: no metrics, and no writes into its tensors.

    Args:
        model: the model that the pipeline trains, whose state the pipeline keeps.
        modules: whether the trainer's other modules, such as a teacher, may be called (default True).
    """
    made = copy.copy(trainer)
    for name, value in vars(made).items():
        vars(made)[name] = _copied(value)
    made.log = lambda *_, **__: None
    own = {id(module) for module in model.modules()}
    kept: list[Any] = [value for value in vars(made).values() if isinstance(value, Tensor)]
    for value in vars(made).values():
        if modules and isinstance(value, nn.Module):
            kept += [module for module in value.modules() if id(module) not in own]
    with python_state_kept(kept):
        yield made


def _copied(value: Any, depth: int = 3) -> Any:
    """Return a copy of small lists and dicts, such as metrics; other values themselves."""
    if not depth or type(value) not in (dict, list, set, deque, defaultdict) or len(value) > _SMALL:
        return value
    made = copy.copy(value)
    if isinstance(made, dict):
        made.update({key: _copied(inner, depth - 1) for key, inner in value.items()})
    elif isinstance(made, list | deque):
        for n, inner in enumerate(value):
            made[n] = _copied(inner, depth - 1)
    return made


RandomState = tuple[Tensor, Any, Any]


def random_state() -> RandomState:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def same_random_state(one: RandomState, other: RandomState) -> bool:
    arrays = zip(one[2], other[2], strict=True)
    return (
        torch.equal(one[0], other[0]) and one[1] == other[1] and all(np.array_equal(a, b) for a, b in arrays)
    )
