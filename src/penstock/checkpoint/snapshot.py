"""A copy of a run's state between two steps, so that it can be written while training continues."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.base.errors import ConfigError
from penstock.base.tensor_file import dtype_name
from penstock.checkpoint.frozen_weights import KEY, FrozenDigests
from penstock.checkpoint.manifest import encode_value
from penstock.parallel.dtensor import full_tensor
from penstock.runtime.optim.state import StatefulOptimizer, whole_value
from penstock.runtime.pipeline import Pipeline
from penstock.stage.layers import prefixes

BY_NAME = ("parameters", "state", "main_weights")
"""Keys of an optimizer's state that are by parameter; the others are the same on every rank."""


@dataclass(frozen=True)
class Snapshot:
    """One process's part of a checkpoint: tensors copied to the CPU, by stage and name, and all other values, encoded."""

    step: int
    tensors: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    layers: dict[int, tuple[str, ...]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


class HostBuffers:
    """Memory for the copies, reused by every save: an allocation costs several times a copy.

    The previous copies must no longer be read when new ones are taken.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, tensor: Tensor) -> Tensor:
        """Return a copy on the CPU; one from a GPU is complete only after `wait`."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
        return buffer.copy_(tensor.detach(), non_blocking=True)

    def wait(self) -> None:
        """Wait until all copies are complete."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()


def take_snapshot(
    pipe: Pipeline,
    optimizer: StatefulOptimizer | None,
    extra: Mapping[str, Any],
    copies: HostBuffers,
    frozen: FrozenDigests | None = None,
) -> Snapshot:
    """Copy this process's part of the state; sharded tensors are gathered.

    Args:
        copies: memory for the copies; its previous copies are overwritten.
        frozen: digests to keep in place of parameters that are not trained (default None, keep these, too).
    """
    # Experts are divided over replicas, which then all take part until their tensors are whole.
    if pipe.replica and (pipe.mesh is None or pipe.mesh.ep == 1):
        if optimizer is not None:
            optimizer.give_state()
        pipe.gather_weights()
        return Snapshot(pipe.steps)
    # Of sharded tensors the shards: each is made whole when its turn comes, and only processes that write keep it.
    state = optimizer.sharded_state() if optimizer is not None else None
    model = pipe.sharded_state()
    held = _own_layers(pipe)
    stage_of = {start: s for s, names in held.items() for name in names for start in prefixes(name)}
    tensors: dict[int, dict[str, Tensor]] = {s: {} for s in held}
    failed: list[Exception] = []
    keeps = pipe.is_first  # of several processes with the same state, the first writes it

    def put_for(stage: int | None, parameter: Tensor | None = None) -> Callable[[str, Tensor], None]:
        """Every process with a shard calls this, to gather the tensor, even if it does not write it."""

        def put(name: str, tensor: Tensor) -> None:
            dtype_name(name, tensor)  # refuses unknown dtypes, on all processes alike
            gathered = full_tensor(tensor) if parameter is None else whole_value(tensor, parameter)
            if keeps and stage is not None and not failed:
                try:
                    tensors[stage][name] = copies.take(name, gathered)
                except Exception as error:  # the others are about to gather the next tensor with this process
                    failed.append(error)

        return put

    def stage_for(name: str) -> int | None:
        return stage_of.get(layer_of(name, stage_of))

    values: dict[str, Any] = {"model": {}, "optimizer": None, "extra": {}, "tied": pipe.tied_names}
    parameters = dict(pipe.named_parameters())
    if frozen is not None:
        values[KEY] = {}
    for name, value in model.items():
        stage = stage_for(name)
        parameter = parameters.get(name)
        if frozen is not None and parameter is not None and not parameter.requires_grad:
            whole = full_tensor(value)
            if keeps and stage is not None:
                values[KEY][name] = frozen.of(name, parameter, whole)
            continue
        encoded = encode_value(value, f"model/{name}", put_for(stage))
        if not isinstance(value, Tensor) and stage is not None:
            values["model"][name] = encoded
    first_stage = next(iter(held), None)  # its file has what belongs to no stage
    values["extra"] = encode_value(dict(extra), "extra", put_for(first_stage))
    if state is not None:
        values["optimizer"] = _optimizer(
            state, stage_for, lambda name: put_for(stage_for(name), parameters.get(name))
        )
    if keeps and first_stage is not None:
        for device, generator in _generators().items():
            put_for(first_stage)(f"generators/{pipe.rank}/{device}", generator)
    if failed:
        raise failed[0]
    copies.wait()
    return Snapshot(pipe.steps, tensors if keeps else {}, held if keeps else {}, values if keeps else {})


def _optimizer(
    state: dict[str, Any],
    stage_for: Callable[[str], int | None],
    put_for: Callable[[str], Callable[[str, Tensor], None]],
) -> dict[str, Any]:
    def refuse(name: str, tensor: Tensor) -> None:
        raise ConfigError(
            f"{name} is a tensor; a checkpoint keeps learning rates and schedules as numbers, so give them as such"
        )

    values = {
        key: encode_value(value, f"optimizer/{key}", refuse)
        for key, value in state.items()
        if key not in BY_NAME
    }
    values |= {key: {} for key in BY_NAME}
    for name, parameter in state["parameters"].items():
        stage = stage_for(name)
        put = put_for(name)
        entries = {
            key: encode_value(value, f"optimizer/{key}/{name}", put)
            for key, value in state["state"].get(name, {}).items()
        }
        main = state["main_weights"].get(name)
        if main is not None:
            main = encode_value(main, f"main/{name}", put)
        if stage is None:
            continue
        values["parameters"][name] = parameter
        if name in state["state"]:
            values["state"][name] = entries
        if main is not None:
            values["main_weights"][name] = main
    return values


def join_values(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the values of all processes to those that a single process would have."""
    first = parts[0]
    joined = {**first, "model": {name: v for part in parts for name, v in part["model"].items()}}
    if first["optimizer"] is not None:
        by_name = {
            key: {name: v for part in parts for name, v in part["optimizer"][key].items()} for key in BY_NAME
        }
        joined["optimizer"] = {**first["optimizer"], **by_name}
    if KEY in first:
        joined[KEY] = {name: v for part in parts for name, v in part[KEY].items()}
    return joined


def _own_layers(pipe: Pipeline) -> dict[int, tuple[str, ...]]:
    """Return the names of the layers that this process is the first to hold, by stage."""
    holders = pipe.schedule.placement.holders
    return {
        s: pipe.stages[s].module.names
        for s in sorted(pipe.stages)
        if not pipe.in_processes or holders[s][0] == pipe.rank
    }


def layer_of(name: str, layers: Mapping[str, Any]) -> str:
    """Return the beginning of a parameter's name that is a key of `layers`; empty if there is none."""
    beginnings = (name[:at] for at, letter in enumerate(f"{name}.") if letter == ".")
    return next((beginning for beginning in beginnings if beginning in layers), "")


def _generators() -> dict[str, Tensor]:
    """Return the states of torch's default generators, by device."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states |= {f"cuda:{n}": state for n, state in enumerate(torch.cuda.get_rng_state_all())}
    return states
