"""Loading of a checkpoint into a pipeline and its optimizer at any split; each process reads only its own part."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from penstock.base.errors import ConfigError, DataError
from penstock.base.tensor_file import TensorFile
from penstock.checkpoint.find import difference
from penstock.checkpoint.frozen_weights import digests_in, require_same
from penstock.checkpoint.manifest import Manifest, decode_value
from penstock.parallel.dtensor import (
    from_local_like,
    full_tensor,
    is_dtensor,
    is_sharded,
    local,
    local_slices,
)
from penstock.parallel.replicas.shard_slice import ONE_A_PARAMETER, ShardValues
from penstock.parallel.replicas.shards import ShardedParameter
from penstock.runtime.optim import state as optimizer_state
from penstock.runtime.optim.state import StatefulOptimizer
from penstock.runtime.pipeline import Pipeline


class Reader:
    """The tensors of a checkpoint by name; a context manager that closes the files."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._open: dict[str, TensorFile] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()
        self._stack.close()

    def tensor(self, name: str) -> Tensor:
        return self._run(name, 0, None)

    def piece(self, key: str, name: str, part: ShardedParameter) -> Tensor | ShardValues:
        """Read a tensor of the optimizer's state: all of it, or the slice that this process updates.

        Of a contiguous slice only its rows are read; otherwise the tensor is read and sliced.
        """
        piece, shape, parameter = part.slice, self._shape(name), part.entry.parameter
        if piece.whole:
            return self.tensor(name)
        if is_sharded(parameter) and key not in ONE_A_PARAMETER and shape == tuple(parameter.shape):
            return ShardValues(piece.of(local(self.like(name, parameter))))
        if key in ONE_A_PARAMETER or shape != piece.shape:
            return self.tensor(name)
        if not shape or piece.stride != torch.empty(shape, device="meta").stride():
            return ShardValues(piece.of(self.tensor(name)))
        width = math.prod(shape[1:])
        begin, end = piece.first // width, -(-(piece.first + piece.count) // width)
        rows = self._run(name, 0, slice(begin, end)).reshape(-1)
        return ShardValues(rows[piece.first - begin * width :][: piece.count])

    def like(self, name: str, model: Tensor) -> Tensor:
        """Read a tensor sharded as `model` is, if the shapes are equal; this process reads only its own shard."""
        if not is_dtensor(model) or self._shape(name) != tuple(model.shape):
            return self.tensor(name)
        if not is_sharded(model):
            return from_local_like(self.tensor(name).to(model.device), model)
        dim, runs = local_slices(model)
        slices = [self._run(name, dim, run) for run in runs]
        shard = slices[0] if len(slices) == 1 else torch.cat(slices, dim)
        return from_local_like(shard.to(model.device), model)

    def _run(self, name: str, dim: int, run: slice | None) -> Tensor:
        """Read a tensor, or a slice of it along a dimension."""
        shape = self._shape(name)
        stored = self.manifest.tensors[name]
        try:
            file = self._file(stored.file)
            entry = file.entries.get(name)
            if entry is None or (entry.shape, entry.dtype) != (shape, stored.dtype):
                raise DataError(f"{self.path / stored.file}: {difference(name, stored, entry)}")
            return file.read(name, dim, run)
        except (OSError, MemoryError) as error:
            reason = error.strerror if isinstance(error, OSError) else "no memory"
            raise DataError(f"cannot read {name} in {self.path / stored.file}: {reason}") from error

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self.manifest.tensors:
            raise DataError(f"the checkpoint {self.path} has no tensor {name!r:.200}")
        return self.manifest.tensors[name].shape

    def _file(self, name: str) -> TensorFile:
        if name not in self._open:
            self._open[name] = self._stack.enter_context(TensorFile(self.path / name))
        return self._open[name]


@dataclass(frozen=True)
class Prepared:
    """This process's part of a checkpoint, read and checked but not loaded."""

    step: int
    weights: dict[str, Any]
    state: dict[str, Any] | None
    extra: dict[str, Any]
    generators: dict[str, Tensor]


def prepare(path: Path, manifest: Manifest, pipe: Pipeline, optimizer: StatefulOptimizer | None) -> Prepared:
    """Read a checkpoint whose files have been checked, without loading it."""
    if manifest.seed != pipe.seed:
        raise ConfigError(
            f"{path} is of a run with seed {manifest.seed}, this pipeline has {pipe.seed}; its layers "
            "would draw different random numbers"
        )
    with Reader(path, manifest) as reader:
        weights = _weights(reader, pipe)
        state = None if optimizer is None else _optimizer_state(reader, pipe, optimizer)
        extra = decode_value(manifest.values.get("extra"), reader.tensor)
        if not isinstance(extra, dict):
            raise DataError(f"{path}: 'extra' must be a dictionary, got {extra!r:.80}")
        generators = _generators(reader, pipe)
    return Prepared(manifest.step, weights, state, extra, generators)


def load_into(prepared: Prepared, pipe: Pipeline, optimizer: StatefulOptimizer | None) -> None:
    """Load a checkpoint that `prepare` has read; every process calls this."""
    pipe.load_state_dict(prepared.weights)
    if optimizer is not None and prepared.state is not None:
        optimizer.load_state_dict(prepared.state)
    pipe.steps = prepared.step
    for device, value in prepared.generators.items():
        _set_generator(device, value)


def _weights(reader: Reader, pipe: Pipeline) -> dict[str, Any]:
    """Return the argument of `Pipeline.load_state_dict`: this process's weights, and the names of all others."""
    parameters = dict(pipe.named_parameters())
    own = pipe.sharded_state()
    held = dict.fromkeys([*own, *parameters])
    digests = digests_in(reader.manifest.values, reader.path)
    values = reader.manifest.values.get("model")
    if not isinstance(values, dict):
        raise DataError(f"{reader.path}: 'model' must be a dictionary, got {values!r:.80}")
    kept = {name for name in held if name in values or f"model/{name}" in reader.manifest.tensors}
    frozen = {name: own[name] for name in held if name in digests and name in own and name not in kept}
    # Before the files are read, which may fail on one of the processes that make a tensor whole together.
    require_same(((name, full_tensor(value)) for name, value in frozen.items()), digests, reader.path)
    weights: dict[str, Any] = {}
    for name in held:
        key = f"model/{name}"
        if name in values:
            weights[name] = decode_value(values[name], reader.tensor)
        elif key in reader.manifest.tensors:
            parameter = parameters.get(name)
            weights[name] = reader.tensor(key) if parameter is None else reader.like(key, parameter)
    weights |= frozen
    names = [name.removeprefix("model/") for name in reader.manifest.tensors if name.startswith("model/")]
    # Of weights on other processes only the names matter, so that unknown names are refused.
    return {**dict.fromkeys([*names, *digests], _ELSEWHERE), **weights}


_ELSEWHERE = torch.empty(0)


def _optimizer_state(reader: Reader, pipe: Pipeline, optimizer: StatefulOptimizer) -> dict[str, Any]:
    values = reader.manifest.values.get("optimizer")
    if values is None:
        raise ConfigError(f"{reader.path} was saved without an optimizer; load it without one")
    _require_alike(reader, values, optimizer_state.common(optimizer))
    parameters = {name: p for rank in pipe.local_ranks for name, p in pipe.rank_parameters(rank)}
    plain = {
        k: decode_value(v, reader.tensor) for k, v in values.items() if k not in ("state", "main_weights")
    }
    parts = {
        name: optimizer.shards.find(p) if optimizer.shards is not None else None
        for name, p in parameters.items()
    }
    state = {
        name: {
            key: _entry(reader, key, value, parameters[name], parts[name]) for key, value in entries.items()
        }
        for name, entries in values["state"].items()
        if name in parameters
    }
    main = {
        name: _entry(reader, "", value, parameters[name], parts[name])
        for name, value in values["main_weights"].items()
        if name in parameters
    }
    return {**plain, "state": state, "main_weights": main}


def _entry(reader: Reader, key: str, value: Any, parameter: Tensor, part: ShardedParameter | None) -> Any:
    if isinstance(value, dict) and isinstance(value.get("$tensor"), str):
        if part is None:
            return reader.like(value["$tensor"], parameter)
        return (
            reader.piece(key, value["$tensor"], part) if part.shard is not None else ShardValues(_ELSEWHERE)
        )
    return decode_value(value, reader.tensor)


def _require_alike(reader: Reader, values: Any, fresh: Mapping[str, Any]) -> None:
    """Refuse a malformed optimizer state: torch's schedules and groups accept any names."""
    wrong = ""
    if not isinstance(values, dict) or values.keys() != fresh.keys():
        wrong = f"it has {_keys(values)}, not {_keys(fresh)}"
    elif not all(isinstance(values[key], dict) for key in ("parameters", "state", "main_weights")):
        wrong = "its parameters, state or main_weights is not a dictionary"
    elif not all(isinstance(entries, dict) for entries in values["state"].values()):
        wrong = "the state of a parameter is not a dictionary"
    elif not all(_is_place(place) for place in values["parameters"].values()):
        wrong = "a parameter has no group or no shape"
    elif not isinstance(values["groups"], list) or not all(isinstance(g, dict) for g in values["groups"]):
        wrong = "its groups are not a list of dictionaries"
    elif unlike := [
        (n, sorted(_options(here)))
        for n, (group, here) in enumerate(zip(values["groups"], fresh["groups"], strict=False))
        if _options(group) != _options(here)
    ]:
        wrong = f"its group {unlike[0][0]} does not have the options {', '.join(unlike[0][1])}"
    elif _names(values["lr_scheduler"]) != _names(fresh["lr_scheduler"]) and None not in (
        values["lr_scheduler"],
        fresh["lr_scheduler"],
    ):
        wrong = "its learning-rate schedule is of another kind"
    if wrong:
        raise DataError(f"the optimizer's state in {reader.path} does not fit: {wrong}")


def _is_place(place: Any) -> bool:
    return (
        isinstance(place, dict)
        and type(place.get("group")) is int
        and isinstance(place.get("shape"), list)
        and all(type(n) is int for n in place["shape"])
    )


def _keys(table: Any) -> str:
    return ", ".join(table) if isinstance(table, Mapping) else "nothing"


def _options(group: Mapping[str, Any]) -> set[str]:
    return {key for key in group if key != "initial_lr"}


def _names(scheduler: Any) -> Any:
    return set(scheduler) if isinstance(scheduler, Mapping) else scheduler


def _generators(reader: Reader, pipe: Pipeline) -> dict[str, Tensor]:
    """Return the states of torch's default generators for this rank; the states of rank 0 if the rank is new."""
    names = {}
    for name in reader.manifest.tensors:
        if name.startswith("generators/"):
            _, rank, device = name.split("/", 2)
            names[rank, device] = name
    ranks = {rank for rank, _ in names}
    rank = str(pipe.rank) if str(pipe.rank) in ranks else "0"
    states = {device: reader.tensor(name) for (r, device), name in names.items() if r == rank}
    for device, state in states.items():
        generator = _generator(device)
        try:
            # Tried on a new generator: the default ones must not change before everything is known to fit.
            if generator is not None:
                torch.Generator(generator.device).set_state(state)
        except (RuntimeError, TypeError, ValueError) as error:
            raise DataError(
                f"{reader.path} has no sound state of the generator of {device}: {error}"
            ) from error
    return states


def _set_generator(device: str, state: Tensor) -> None:
    generator = _generator(device)
    if generator is not None:
        generator.set_state(state)


def _generator(device: str) -> torch.Generator | None:
    """Return the default generator of a device; None for a GPU that this process does not use."""
    if device == "cpu":
        return torch.default_generator
    number = device.removeprefix("cuda:")
    if not torch.cuda.is_initialized():
        return None
    generators = torch.cuda.default_generators
    return generators[int(number)] if number.isdecimal() and int(number) < len(generators) else None
