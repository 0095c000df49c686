"""Folders of ``torch.distributed.checkpoint`` (DCP): read, imported as a checkpoint of a run, and exported.

torch's own reader reads a folder, with two changes, so that nothing in the folder can run code: its ``.metadata``, a pickle,
is unpickled with DCP's own classes and no others, and values that are not tensors are loaded with ``weights_only=True``.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from penstock.base.bounded_io import require_regular
from penstock.base.counts import few
from penstock.base.errors import ConfigError, DataError, os_errors_as
from penstock.base.tensor_file import DTYPES
from penstock.checkpoint.convert import model_weights, open_sound, require_new, rewrite
from penstock.checkpoint.find import is_checkpoint, step_of
from penstock.checkpoint.manifest import Manifest, decode_value, encode_value
from penstock.checkpoint.read import Reader

OPTIMIZER_KEYS = ("optim", "optimizer")
"""Keys under which training loops save the optimizer's state, next to ``model``."""

_CLASSES = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
            "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    *(("torch", str(dtype).removeprefix("torch.")) for dtype in DTYPES.values()),
}  # fmt: skip
"""Names that a ``.metadata`` may have, besides paths; calling any of these has no effect."""
_PATHS = re.compile(r"pathlib(\._local)?")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if _PATHS.fullmatch(module) and name in ("PosixPath", "WindowsPath"):
            return PurePath  # where the folder was written; a path of another system cannot be made here
        if (module, name) not in _CLASSES:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not among the classes of DCP")
        return super().find_class(module, name)


def read_dcp(folder: str | Path) -> dict[str, Any]:
    """Read the state in a DCP folder, nested as it was saved.

    Give its ``["model"]``, or the entry that has the weights there, to ``pipe.load_state_dict``.

    Args:
        folder: folder that ``torch.distributed.checkpoint.save`` wrote, from one process or several.

    Returns:
        Dictionaries and lists of tensors on the CPU, numbers, text and None.

    Raises:
        DataError: if the folder is not a DCP folder, is damaged, or has other values than these; names the file.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.planner import ReadItem
    from torch.distributed.checkpoint.state_dict_loader import load

    class Planner(DefaultLoadPlanner):
        def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
            self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    class MetadataReader(FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Any:
            return metadata

    path = Path(folder)
    metadata = _metadata(path)
    try:
        flat = _places(metadata, path)
        with warnings.catch_warnings():
            # torch warns that a single process loads, although no_dist asks for it.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load(
                flat,
                storage_reader=MetadataReader(path),
                planner=Planner(flatten_state_dict=False),
                no_dist=True,
            )
        paths = metadata.planner_data or {}
        state = _Branch()
        for key, value in flat.items():
            _insert(state, paths.get(key, (key,)), value)
    except (Exception, CheckpointException) as error:  # whatever torch raises at a damaged file
        raise DataError(f"{path}: cannot read it as a checkpoint of torch: {_cause(error)}") from error
    return {str(key): _lists(value) for key, value in state.items()}


def _metadata(path: Path) -> Any:
    where = path / ".metadata"
    try:
        require_regular(where)
        with where.open("rb") as file:
            metadata = _Unpickler(file).load()
    except FileNotFoundError as error:
        raise DataError(f"{path} is not a folder of torch.distributed.checkpoint: no .metadata") from error
    except Exception as error:  # an unpickler raises anything at a damaged pickle
        raise DataError(
            f"{where} does not describe a checkpoint: {type(error).__name__}: {str(error)[:200]}"
        ) from error
    if type(metadata).__name__ != "Metadata":
        raise DataError(f"{where} does not describe a checkpoint, but is a {type(metadata).__name__}")
    return metadata


def _places(metadata: Any, path: Path) -> dict[str, Any]:
    """Return the flat state that is to be filled: an empty tensor for each tensor, and None for other values."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    stored: dict[str, int] = {}
    for index, info in metadata.storage_data.items():
        if Path(info.relative_path).name != info.relative_path:
            raise ValueError(f"{str(info.relative_path)[:200]!r} is not a file of the folder")
        require_regular(path / info.relative_path)
        size = (path / info.relative_path).stat().st_size
        stored[index.fqn] = stored.get(index.fqn, 0) + min(int(info.length), size)
    state: dict[str, Any] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            state[key] = None
            continue
        count, dtype = math.prod(entry.size), entry.properties.dtype
        if count * dtype.itemsize > stored.get(key, 0):  # before the memory is allocated
            raise ValueError(
                f"{key[:200]!r} of {list(entry.size)} needs more than the bytes that are stored of it"
            )
        # torch's reader leaves what no chunk covers as it was in memory.
        covered = torch.zeros(entry.size, dtype=torch.bool)
        for chunk in entry.chunks:
            covered[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))] = True
        if not covered.all():
            raise ValueError(f"{key[:200]!r} has {int(covered.sum()):,} of {count:,} numbers")
        state[key] = torch.empty(entry.size, dtype=dtype)
    return state


def _cause(error: BaseException) -> str:
    """Return the reason in one line; torch's `CheckpointException` holds the error of each rank."""
    failures = getattr(error, "failures", None) or {}
    first = next((failure for failure, _ in failures.values()), error)
    lines = str(first).strip().splitlines() or [""]
    # The lines around this one tell how to load the file without weights_only.
    lines = [line.strip() for line in lines if "WeightsUnpickler error" in line] or lines
    return f"{type(first).__name__}: {lines[0][:300]}"


class _Branch(dict[str | int, Any]):
    """A node of the nested state; a plain dict is an entry's value."""


def _insert(state: _Branch, path: tuple[str | int, ...], value: Any) -> None:
    for key in path[:-1]:
        state = state.setdefault(key, _Branch())
        if not isinstance(state, _Branch):
            raise ValueError(f"{path!r:.200} lies within another entry's value")
    if path[-1] in state:
        raise ValueError(f"{path!r:.200} appears twice")
    state[path[-1]] = value


def _lists(state: Any) -> Any:
    """Replace branches by lists where all keys are numbers, and by dictionaries otherwise."""
    if not isinstance(state, _Branch):
        return state
    values = {key: _lists(value) for key, value in state.items()}
    if all(isinstance(key, int) for key in values):
        return [values[key] for key in sorted(values)]
    return values


def import_dcp(source: Path, target: Path, like: Path) -> None:
    """Write a DCP folder's weights and optimizer state as a checkpoint.

    Everything else (layers, parameter groups, learning-rate schedule, config) is copied from another checkpoint of the run
    that will continue from it, for example one of its first step. The schedule is moved to the new step, unless the folder
    has one of the same kind, as `export_dcp` writes it.

    Args:
        source: the DCP folder, with ``model``, or the weights themselves by name, and ``optim`` or ``optimizer`` with
            ``state`` by parameter name and ``param_groups``.
        target: checkpoint folder to create, ``step-NUMBER`` with the number of steps done; it must not exist.
    """
    require_new(target)
    if not is_checkpoint(target):
        raise ConfigError(f"{target} must be called step-NUMBER, with how many steps are done")
    manifest, state = open_sound(like), read_dcp(source)
    step = step_of(target)
    saved_step = state.get("step")
    if isinstance(saved_step, int) and saved_step != step:
        raise ConfigError(
            f"{source} is of step {saved_step}, so {target} must be called step-{saved_step:08d}"
        )
    tensors = _weights(manifest, state, source)
    optimizer = manifest.values.get("optimizer")
    if optimizer is not None:
        values = {**manifest.values, "optimizer": _optimizer(optimizer, state, tensors, step, source)}
        manifest = replace(manifest, values=values)
    kept = [n for n in manifest.tensors if not n.startswith(("model/", "optimizer/", "main/"))]
    with Reader(like, manifest) as reader:
        tensors |= {name: reader.tensor(name) for name in kept}
    rewrite(target, replace(manifest, step=step), list(tensors), tensors.__getitem__)


def _weights(manifest: Manifest, state: Mapping[str, Any], source: Path) -> dict[str, Tensor]:
    theirs = state.get("model", state)
    if not isinstance(theirs, dict):
        raise ConfigError(f"{source}: 'model' is a {type(theirs).__name__}, not weights by name")
    not_weights = () if "model" in state else (*OPTIMIZER_KEYS, "step", "main_weights", "lr_scheduler")
    names = [name.removeprefix("model/") for name in manifest.tensors if name.startswith("model/")]
    saved = [
        n for n in theirs if n not in not_weights and (n in names or not _is_tied(theirs[n], theirs, names))
    ]
    _require_same_names(source, "weights", saved, names)
    weights = {}
    for name in names:
        stored, tensor = manifest.tensors[f"model/{name}"], theirs[name]
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != stored.shape:
            actual = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ConfigError(f"{source}: {name} is {actual}, not of shape {list(stored.shape)}")
        weights[f"model/{name}"] = _as_stored(source, name, tensor, DTYPES[stored.dtype])
    return weights


def _is_tied(tensor: Any, theirs: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Return whether a tensor repeats one of the run's weights; a tied weight has one name in our checkpoints."""
    weights = [weight for name in names if isinstance(weight := theirs.get(name), Tensor)]
    return isinstance(tensor, Tensor) and any(
        weight.dtype == tensor.dtype and weight.shape == tensor.shape and torch.equal(weight, tensor)
        for weight in weights
    )


def _as_stored(source: Path, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a weight to the run's dtype; refuse a conversion that loses digits."""
    if torch.promote_types(tensor.dtype, dtype) != dtype:
        raise ConfigError(
            f"{source}: {name} is of {tensor.dtype}, which {dtype}, as the run has it, cannot hold"
        )
    return tensor.to(dtype)


def _require_same_names(source: Path, kind: str, theirs: Iterable[str], ours: Iterable[str]) -> None:
    missing, unknown = sorted({*ours} - {*theirs}), sorted({*theirs} - {*ours})
    if missing or unknown:
        named = (("without", missing), ("with unknown", unknown))
        problems = [f"{problem} {few(names, 3)}" for problem, names in named if names]
        raise ConfigError(f"{source} has other {kind} than the run: {'; '.join(problems)}")


def _optimizer(
    ours: Mapping[str, Any], state: Mapping[str, Any], tensors: dict[str, Tensor], step: int, source: Path
) -> dict[str, Any]:
    """Return our optimizer's values with their numbers; add its tensors to `tensors`."""
    theirs = next((state[key] for key in OPTIMIZER_KEYS if isinstance(state.get(key), dict)), None)
    if (
        theirs is None
        or not isinstance(theirs.get("state"), dict)
        or not isinstance(theirs.get("param_groups"), list)
    ):
        raise ConfigError(
            f"{source} has no optimizer's state (optim with state and param_groups); take its weights alone by "
            "pipe.load_state_dict(penstock.read_dcp(folder)['model'])"
        )
    parameters = ours["parameters"]
    _require_same_names(source, "optimizer states", theirs["state"], ours["state"] or parameters)
    entries = {}
    for name, values in theirs["state"].items():
        if not isinstance(values, dict):
            raise ConfigError(f"{source}: the optimizer's state of {name} is a {type(values).__name__}")
        if name in ours["state"]:
            _require_same_names(source, f"optimizer states of {name}", values, ours["state"][name])
        for key, value in values.items():
            if isinstance(value, Tensor) and value.dim() and list(value.shape) != parameters[name]["shape"]:
                raise ConfigError(
                    f"{source}: {key} of {name} is of shape {list(value.shape)}, not {parameters[name]['shape']}"
                )
        entries[name] = {
            key: encode_value(value, f"optimizer/{key}/{name}", tensors.__setitem__)
            for key, value in values.items()
        }
    saved_main = state.get("main_weights")
    saved_main = saved_main if isinstance(saved_main, dict) else {}
    main = {}
    for name in ours["main_weights"]:
        value = saved_main[name] if name in saved_main else tensors[f"model/{name}"].float()
        main[name] = encode_value(value, f"main/{name}", tensors.__setitem__)
    return {
        **ours,
        "steps": step,
        "state": entries,
        "main_weights": main,
        "groups": _groups(ours, theirs["param_groups"], source),
        "lr_scheduler": _schedule(ours["lr_scheduler"], state.get("lr_scheduler"), step),
    }


def _groups(ours: Mapping[str, Any], theirs: list[Any], source: Path) -> list[dict[str, Any]]:
    """Return our groups with the options of their groups of the same parameters, whose order may differ."""
    members: list[set[str]] = [set() for _ in ours["groups"]]
    for name, place in ours["parameters"].items():
        members[place["group"]].add(name)
    candidates = [g for g in theirs if isinstance(g, dict) and isinstance(g.get("params"), list)]
    groups = []
    for options, names in zip(ours["groups"], members, strict=True):
        same = [group for group in candidates if set(map(str, group["params"])) == names]
        if not same or len(theirs) != len(members):
            raise ConfigError(
                f"{source} has {len(theirs)} groups of parameters; none has the {len(names)} of the run's with "
                f"{min(names, default='no parameter')}: group them there as the run does"
            )
        groups.append(
            {**options, **{k: encode_value(same[0][k], k, _refuse_tensor) for k in options if k in same[0]}}
        )
    return groups


def _refuse_tensor(name: str, tensor: Tensor) -> None:
    raise ConfigError(f"{name} of a group is a tensor; a checkpoint keeps it as a number")


def _schedule(ours: Any, theirs: Any, step: int) -> Any:
    if ours is None or (isinstance(theirs, dict) and theirs.keys() == ours.keys()):
        return None if ours is None else encode_value(theirs, "lr_scheduler", _refuse_tensor)
    moved = {"last_epoch": step, "_step_count": step + 1}
    if not isinstance(ours, dict) or not moved.keys() <= ours.keys():
        raise DataError(f"the run's schedule of learning rates cannot be moved to step {step}")
    return {**ours, **moved}


def export_dcp(source: Path, target: Path) -> None:
    """Write a checkpoint as a DCP folder.

    The keys are those that ``torch.distributed.checkpoint.state_dict.get_state_dict`` gives a model and its optimizer:
    ``model`` by name; ``optim`` with ``state`` by parameter name and ``param_groups``, whose ``params`` are names. The
    folder also has ``step``, ``main_weights`` and ``lr_scheduler``.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    require_new(target)
    manifest = open_sound(source)
    with Reader(source, manifest) as reader:
        optimizer = decode_value(manifest.values.get("optimizer"), reader.tensor)
    state: dict[str, Any] = {"model": model_weights(source, manifest), "step": manifest.step}
    if optimizer is not None:
        groups = [{**group, "params": []} for group in optimizer["groups"]]
        for name, parameter in optimizer["parameters"].items():
            groups[parameter["group"]]["params"].append(name)
        state["optim"] = {"state": optimizer["state"], "param_groups": groups}
        state["main_weights"] = optimizer["main_weights"]
        state["lr_scheduler"] = optimizer["lr_scheduler"]
    with os_errors_as(ConfigError, f"cannot write {target}"), warnings.catch_warnings():
        # torch warns that a single process saves, although no_dist asks for it.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        save(state, checkpoint_id=str(target), no_dist=True)
