"""A checkpoint's way back into a pipeline and its optimizer, whatever the split; only what is held here is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from penstock.checkpoint.find import differs
from penstock.checkpoint.format.json_values import decode
from penstock.checkpoint.format.manifest import Manifest
from penstock.errors import ConfigError, DataError
from penstock.parallel.data.shard_slice import ONE_A_PARAMETER, ShardValues
from penstock.parallel.data.shards import ShardedParameter
from penstock.parallel.dtensor import from_local_like, is_dtensor, is_sharded, local, local_slices
from penstock.runtime.optim import state as optimizer_state
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.pipeline import Pipeline
from penstock.tensor_file import TensorFile


class Reader:
    """The tensors of a checkpoint, by name; a context manager, within which its files are open.

    Args:
        path: of the checkpoint.
        manifest: its own; what a file says otherwise is refused.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._open: dict[str, TensorFile] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._open.clear()
        self._stack.close()

    def tensor(self, name: str) -> Tensor:
        """A whole tensor.

        Raises:
            DataError: it is not there, or its file says otherwise than the manifest.
        """
        return self._run(name, 0, None)

    def piece(self, key: str, name: str, part: ShardedParameter) -> Tensor | ShardValues:
        """A tensor whole, or of an optimizer's entry `key` for every element the piece that this process updates.

        Of a piece the rows are read that it is in; elements that lie in memory otherwise are read whole.
        """
        piece, shape, parameter = part.slice, self._shape(name), part.entry.parameter
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
        """A tensor cut over the processes as `model` is, if it has its shape; of it this process reads its own part."""
        if not is_dtensor(model) or self._shape(name) != tuple(model.shape):
            return self.tensor(name)
        if not is_sharded(model):
            return from_local_like(self.tensor(name).to(model.device), model)
        dim, runs = local_slices(model)
        found = [self._run(name, dim, run) for run in runs]
        part = found[0] if len(found) == 1 else torch.cat(found, dim)
        return from_local_like(part.to(model.device), model)

    def _run(self, name: str, dim: int, run: slice | None) -> Tensor:
        """A tensor, or a run of it along a dimension."""
        shape = self._shape(name)
        stored = self.manifest.tensors[name]
        try:
            file = self._file(stored.file)
            entry = file.entries.get(name)
            if entry is None or (entry.shape, entry.dtype) != (shape, stored.dtype):
                raise DataError(f"{self.path / stored.file}: {differs(name, stored, entry)}")
            return file.read(name, dim, run)
        except (OSError, MemoryError) as error:
            why = error.strerror if isinstance(error, OSError) else "no memory"
            raise DataError(f"cannot read {name} in {self.path / stored.file}: {why}") from error

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
    """What this process holds of a checkpoint, read and looked through, but not loaded.

    Attributes:
        step: training steps done.
        weights: as `Pipeline.load_state_dict` takes them.
        state: of the optimizer; None without one.
        extra: the user's own values.
        generators: states of torch's default generators, by device.
    """

    step: int
    weights: dict[str, Any]
    state: dict[str, Any] | None
    extra: dict[str, Any]
    generators: dict[str, Tensor]


def prepare(path: Path, manifest: Manifest, pipe: Pipeline, optimizer: PipelineOptimizer | None) -> Prepared:
    """Read a checkpoint whose files have been found sound; nothing is loaded yet.

    Raises:
        ConfigError: it does not fit the model or the optimizer; says where.
        DataError: it cannot be read.
    """
    if manifest.seed != pipe.seed:
        raise ConfigError(
            f"{path} is of a run with seed {manifest.seed}, this pipeline has {pipe.seed}; the random numbers "
            "of its layers would be others"
        )
    with Reader(path, manifest) as reader:
        weights = _weights(reader, pipe)
        state = None if optimizer is None else _optimizer_state(reader, pipe, optimizer)
        extra = decode(manifest.values.get("extra"), reader.tensor)
        if not isinstance(extra, dict):
            raise DataError(f"{path}: 'extra' must be a dictionary, not {extra!r:.80}")
        generators = _generators(reader, pipe)
    return Prepared(manifest.step, weights, state, extra, generators)


def load_into(prepared: Prepared, pipe: Pipeline, optimizer: PipelineOptimizer | None) -> None:
    """Load what has been prepared; in processes every one calls it.

    Raises:
        ConfigError: it does not fit the model or the optimizer; says where.
    """
    pipe.load_state_dict(prepared.weights)
    if optimizer is not None and prepared.state is not None:
        optimizer.load_state_dict(prepared.state)
    pipe.steps = prepared.step
    for device, value in prepared.generators.items():
        _set_generator(device, value)


def _weights(reader: Reader, pipe: Pipeline) -> dict[str, Any]:
    """What `Pipeline.load_state_dict` wants here: what is held, and the names of all the rest of it."""
    own = dict(pipe.named_parameters())
    held = dict.fromkeys([*pipe.state_dict(), *own])
    values = reader.manifest.values.get("model")
    if not isinstance(values, dict):
        raise DataError(f"{reader.path}: 'model' must be a dictionary, not {values!r:.80}")
    found: dict[str, Any] = {}
    for name in held:
        key = f"model/{name}"
        if name in values:
            found[name] = decode(values[name], reader.tensor)
        elif key in reader.manifest.tensors:
            found[name] = reader.like(key, own[name]) if name in own else reader.tensor(key)
    names = [name.removeprefix("model/") for name in reader.manifest.tensors if name.startswith("model/")]
    # Entries of stages held elsewhere are only looked at by name, so that an unknown one is found.
    return {**dict.fromkeys(names, _ELSEWHERE), **found}


_ELSEWHERE = torch.empty(0)


def _optimizer_state(reader: Reader, pipe: Pipeline, optimizer: PipelineOptimizer) -> dict[str, Any]:
    values = reader.manifest.values.get("optimizer")
    if values is None:
        raise ConfigError(f"{reader.path} was saved without an optimizer; load it without one")
    _require_alike(reader, values, optimizer_state.common(optimizer))
    own = {name: p for rank in pipe.local_ranks for name, p in pipe.rank_parameters(rank)}
    plain = {k: decode(v, reader.tensor) for k, v in values.items() if k not in ("state", "main_weights")}
    parts = {
        name: optimizer.shards.find(p) if optimizer.shards is not None else None for name, p in own.items()
    }
    state = {
        name: {key: _entry(reader, key, value, own[name], parts[name]) for key, value in entries.items()}
        for name, entries in values["state"].items()
        if name in own
    }
    main = {
        name: _entry(reader, "", value, own[name], parts[name])
        for name, value in values["main_weights"].items()
        if name in own
    }
    return {**plain, "state": state, "main_weights": main}


def _entry(reader: Reader, key: str, value: Any, parameter: Tensor, part: ShardedParameter | None) -> Any:
    if isinstance(value, dict) and isinstance(value.get("$tensor"), str):
        if part is None:
            return reader.like(value["$tensor"], parameter)
        return (
            reader.piece(key, value["$tensor"], part) if part.shard is not None else ShardValues(_ELSEWHERE)
        )
    return decode(value, reader.tensor)


def _require_alike(reader: Reader, values: Any, fresh: Mapping[str, Any]) -> None:
    """Refuse what an optimizer's state cannot be: schedules and groups take over whatever names they are given."""
    wrong = ""
    if not isinstance(values, dict) or values.keys() != fresh.keys():
        wrong = f"it has {_keys(values)}, not {_keys(fresh)}"
    elif not all(isinstance(values[key], dict) for key in ("parameters", "state", "main_weights")):
        wrong = "what it has by parameter is no dictionary"
    elif not all(isinstance(entries, dict) for entries in values["state"].values()):
        wrong = "what it has of a parameter is no dictionary"
    elif not all(_is_place(place) for place in values["parameters"].values()):
        wrong = "a parameter has no group or no shape"
    elif not isinstance(values["groups"], list) or any(
        not isinstance(group, dict) or {k for k in group if k != "initial_lr"} != _options(fresh)
        for group in values["groups"]
    ):
        wrong = f"its groups do not have the options {', '.join(sorted(_options(fresh)))}"
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


def _options(fresh: Mapping[str, Any]) -> set[str]:
    return {key for key in fresh["groups"][0] if key != "initial_lr"}


def _names(scheduler: Any) -> Any:
    return set(scheduler) if isinstance(scheduler, Mapping) else scheduler


def _generators(reader: Reader, pipe: Pipeline) -> dict[str, Tensor]:
    """States of torch's default generators: those of this rank, or of rank 0 where there was none of that number."""
    found = {}
    for name in reader.manifest.tensors:
        if name.startswith("generators/"):
            _, rank, device = name.split("/", 2)
            found[rank, device] = name
    ranks = {rank for rank, _ in found}
    rank = str(pipe.rank) if str(pipe.rank) in ranks else "0"
    states = {device: reader.tensor(name) for (r, device), name in found.items() if r == rank}
    for device, state in states.items():
        generator = _generator(device)
        try:
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
    """The default generator of a device; None of a GPU that is not in use here, of which nobody draws."""
    if device == "cpu":
        return torch.default_generator
    number = device.removeprefix("cuda:")
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    generators = torch.cuda.default_generators
    return generators[int(number)] if number.isdecimal() and int(number) < len(generators) else None
