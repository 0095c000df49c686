"""The state of a run as it is between two steps, copied, so that it can be written while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.format.json_values import encode
from penstock.errors import ConfigError
from penstock.parallel.dtensor import full_tensor
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.pipeline import Pipeline
from penstock.tensor_file import dtype_name

BY_NAME = ("parameters", "state", "main_weights")
"""What of an optimizer's state is by parameter; the rest is the same on every rank."""


@dataclass(frozen=True)
class Snapshot:
    """What one process has to write.

    Attributes:
        step: training steps done.
        tensors: by stage and by name in the checkpoint; copies on the CPU.
        layers: by stage, names in the whole model.
        values: what is no tensor, encoded; those of all processes are joined by `join_values`.
    """

    step: int
    tensors: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    layers: dict[int, tuple[str, ...]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


class HostBuffers:
    """Memory for the copies, used again for every save: new memory costs several times a copy.

    Nothing may read the last copies any more when new ones are taken.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, tensor: Tensor) -> Tensor:
        """A copy on the CPU; from a GPU it is only begun (see `wait`)."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
        return buffer.copy_(tensor.detach(), non_blocking=True)

    def wait(self) -> None:
        """Wait until all copies are here."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()


def writes(pipe: Pipeline) -> bool:
    """Whether this process writes a part: of several that hold the same, the first does."""
    return pipe.is_first


def take_snapshot(
    pipe: Pipeline, optimizer: PipelineOptimizer | None, extra: Mapping[str, Any], copies: HostBuffers
) -> Snapshot:
    """Copy what this process has to write; what several processes have parts of, they put together.

    Args:
        pipe, optimizer: between two steps.
        extra: the user's own values.
        copies: whose last copies nobody reads any more.

    Raises:
        ConfigError: something that a checkpoint cannot keep, or gradients that are waiting for more of them.
    """
    if pipe.replica:
        if optimizer is not None:
            optimizer.give_state()
        return Snapshot(pipe.steps)
    state = optimizer.state_dict() if optimizer is not None else None
    model = pipe.state_dict()
    held = _own_layers(pipe)
    stage_of = {name: s for s, names in held.items() for name in names}
    tensors: dict[int, dict[str, Tensor]] = {s: {} for s in held}
    keeps = writes(pipe)

    def put_for(stage: int | None) -> Callable[[str, Tensor], None]:
        """Every process of a cut tensor gets here; those that do not write have then done their part."""

        def put(name: str, tensor: Tensor) -> None:
            put_together = full_tensor(tensor)
            if keeps and stage is not None:
                dtype_name(name, put_together)
                tensors[stage][name] = copies.take(name, put_together)

        return put

    def stage_for(name: str) -> int | None:
        return stage_of.get(_layer_of(name, stage_of))

    values: dict[str, Any] = {"model": {}, "optimizer": None, "extra": {}}
    for name, value in model.items():
        stage = stage_for(name)
        found = encode(value, f"model/{name}", put_for(stage))
        if not isinstance(value, Tensor) and stage is not None:
            values["model"][name] = found
    anywhere = next(iter(held), None)
    values["extra"] = encode(dict(extra), "extra", put_for(anywhere))
    if state is not None:
        values["optimizer"] = _optimizer(state, stage_for, put_for)
    if keeps and anywhere is not None:
        for device, generator in _generators().items():
            put_for(anywhere)(f"generators/{pipe.rank}/{device}", generator)
    copies.wait()
    return Snapshot(pipe.steps, tensors if keeps else {}, held if keeps else {}, values if keeps else {})


def _optimizer(
    state: dict[str, Any],
    stage_for: Callable[[str], int | None],
    put_for: Callable[[int | None], Callable[[str, Tensor], None]],
) -> dict[str, Any]:
    def refuse(name: str, tensor: Tensor) -> None:
        raise ConfigError(
            f"{name} is a tensor; a checkpoint keeps learning rates and schedules as numbers, so give them as such"
        )

    found = {
        key: encode(value, f"optimizer/{key}", refuse) for key, value in state.items() if key not in BY_NAME
    }
    found |= {key: {} for key in BY_NAME}
    for name, parameter in state["parameters"].items():
        stage = stage_for(name)
        put = put_for(stage)
        entries = {
            key: encode(value, f"optimizer/{key}/{name}", put)
            for key, value in state["state"].get(name, {}).items()
        }
        main = state["main_weights"].get(name)
        if main is not None:
            main = encode(main, f"main/{name}", put)
        if stage is None:
            continue
        found["parameters"][name] = parameter
        if name in state["state"]:
            found["state"][name] = entries
        if main is not None:
            found["main_weights"][name] = main
    return found


def join_values(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The values of all processes, as one process would have them."""
    first = parts[0]
    joined = {**first, "model": {name: v for part in parts for name, v in part["model"].items()}}
    if first["optimizer"] is not None:
        by_name = {
            key: {name: v for part in parts for name, v in part["optimizer"][key].items()} for key in BY_NAME
        }
        joined["optimizer"] = {**first["optimizer"], **by_name}
    return joined


def _own_layers(pipe: Pipeline) -> dict[int, tuple[str, ...]]:
    """The layers, by stage, whose parameters this process's copy counts of."""
    holders = pipe.schedule.placement.holders
    return {
        s: pipe.stages[s].module.names
        for s in sorted(pipe.stages)
        if not pipe.in_processes or holders[s][0] == pipe.rank
    }


def _layer_of(name: str, layers: Mapping[str, Any]) -> str:
    """The layer whose name begins a parameter's name."""
    prefixes = (name[:at] for at, letter in enumerate(name) if letter == ".")
    return next((prefix for prefix in prefixes if prefix in layers), "")


def _generators() -> dict[str, Tensor]:
    """The states of torch's default generators, by device."""
    found = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found |= {f"cuda:{n}": state for n, state in enumerate(torch.cuda.get_rng_state_all())}
    return found
