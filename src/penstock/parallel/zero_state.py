"""The state of a divided optimizer by parameter name: a replica's pieces, the whole made of them, and cut again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError

ONE_A_PARAMETER = frozenset({"step", "mu_product", "eta", "mu"})
"""What torch's elementwise optimizers keep once for a whole parameter (torch/optim/nadam.py, asgd.py)."""


@dataclass(frozen=True)
class Piece:
    """Which elements of a parameter are in a replica's part of its bucket, in the order in which memory has them.

    Attributes:
        shape, stride: of the parameter.
        first: the first of its elements that is in the part.
        count: how many are.
        offset: where they begin in the part.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    first: int
    count: int
    offset: int

    @staticmethod
    def of(view: Tensor, start: int, size: int) -> Piece:
        """For a parameter like `view` that begins `start` elements after the part does, which has `size`."""
        offset = min(max(0, start), size)
        count = max(0, min(size, start + view.numel()) - offset)
        return Piece(tuple(view.shape), view.stride(), max(0, -start) if count else 0, count, offset)

    def state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Its share of an optimizer's state of the part, with what is needed to join it with the others."""
        values = {
            key: value if key in ONE_A_PARAMETER else value[self.offset : self.offset + self.count].clone()
            for key, value in state.items()
            if value is not None
        }
        return {"shape": self.shape, "stride": self.stride, "first": self.first, "state": values}


def join_state_dicts(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The whole state of all replicas' parts, as `ShardedOptimizer.local_state_dict` gives them.

    Raises:
        ConfigError: a replica's part is not there.
    """
    state: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(name for part in parts for name in part["state"]):
        pieces = [part["state"][name] for part in parts if name in part["state"]]
        shape, stride = pieces[0]["shape"], pieces[0]["stride"]
        state[name] = {}
        for key, sample in pieces[0]["state"].items():
            if key in ONE_A_PARAMETER:
                state[name][key] = sample
                continue
            elements = sum(piece["state"][key].numel() for piece in pieces)
            if elements != torch.Size(shape).numel():
                raise ConfigError(
                    f"the parts have {elements} elements of {key!r} of parameter {name!r}, which has "
                    f"{torch.Size(shape).numel()}; give the part of every replica, each once"
                )
            flat = torch.empty(elements, dtype=sample.dtype, device=sample.device)
            for piece in pieces:
                values = piece["state"][key]
                flat[piece["first"] : piece["first"] + values.numel()] = values
            state[name][key] = flat.as_strided(shape, stride)
    return {"state": state, "param_groups": parts[0]["param_groups"]}


def cut(
    state: Mapping[str, Mapping[str, Any]], members: Sequence[tuple[str, Piece]], shard: Tensor
) -> dict[str, Any]:
    """An optimizer's state for a replica's part of a bucket, out of the whole state.

    Raises:
        ConfigError: a parameter is missing, or has another shape, or its count of steps is not its neighbours'.
    """
    found: dict[str, Any] = {}
    for name, piece in members:
        if name not in state:
            raise ConfigError(f"the state has nothing for parameter {name!r}; it has {', '.join(state)}")
        for key, value in state[name].items():
            if key in ONE_A_PARAMETER:
                value = value.clone() if isinstance(value, Tensor) else value
                if found.setdefault(key, value) != value:
                    raise ConfigError(
                        f"{key!r} is {value} for parameter {name!r}, but {found[key]} for others in its bucket"
                    )
                continue
            if tuple(value.shape) != piece.shape:
                raise ConfigError(
                    f"{key!r} of parameter {name!r} has shape {tuple(value.shape)} in the state, but the parameter has "
                    f"{piece.shape}"
                )
            whole = found.setdefault(key, torch.zeros(shard.shape, dtype=value.dtype, device=shard.device))
            flat = torch.empty(value.numel(), dtype=value.dtype, device=shard.device)
            flat.as_strided(piece.shape, piece.stride).copy_(value)
            whole[piece.offset : piece.offset + piece.count] = flat[piece.first : piece.first + piece.count]
    return found
