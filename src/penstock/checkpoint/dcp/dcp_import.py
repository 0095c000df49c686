"""Import of a DCP folder, saved by any training loop of the same model, as a checkpoint of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.convert import open_sound, require_new, rewrite
from penstock.checkpoint.dcp.dcp_read import read_dcp
from penstock.checkpoint.find import is_checkpoint, step_of
from penstock.checkpoint.format.json_values import encode
from penstock.checkpoint.format.manifest import Manifest
from penstock.checkpoint.read import Reader
from penstock.errors import ConfigError, DataError
from penstock.tensor_file import DTYPES

OPTIMIZER_KEYS = ("optim", "optimizer")
"""Keys under which training loops save the optimizer's state, beside ``model``."""


def import_dcp(source: Path, target: Path, like: Path) -> None:
    """Write a DCP folder's weights and optimizer state as a checkpoint.

    Everything else (layers, parameter groups, learning-rate schedule, config) is copied from another checkpoint of the run
    that will continue from it, for example one of its first step. The schedule is moved to the new step, unless the folder
    has one of the same kind, as `penstock.checkpoint.dcp.dcp_export.export_dcp` writes it.

    Args:
        source: the DCP folder, with ``model``, or the weights themselves by name, and ``optim`` or ``optimizer`` with
            ``state`` by parameter name and ``param_groups``.
        target: checkpoint folder to create, ``step-NUMBER`` with the number of steps done; it must not exist.
        like: folder of a checkpoint of the run.

    Raises:
        ConfigError: if names, shapes or groups differ, the optimizer's state is missing, or `target` exists.
        DataError: if the folder, or the checkpoint `like`, is damaged.
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
        problems = [
            f"{problem} {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
            for problem, names in (("without", missing), ("with unknown", unknown))
            if names
        ]
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
            key: encode(value, f"optimizer/{key}/{name}", tensors.__setitem__)
            for key, value in values.items()
        }
    saved_main = state.get("main_weights")
    saved_main = saved_main if isinstance(saved_main, dict) else {}
    main = {}
    for name in ours["main_weights"]:
        value = saved_main[name] if name in saved_main else tensors[f"model/{name}"].float()
        main[name] = encode(value, f"main/{name}", tensors.__setitem__)
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
            {**options, **{k: encode(same[0][k], k, _refuse_tensor) for k in options if k in same[0]}}
        )
    return groups


def _refuse_tensor(name: str, tensor: Tensor) -> None:
    raise ConfigError(f"{name} of a group is a tensor; a checkpoint keeps it as a number")


def _schedule(ours: Any, theirs: Any, step: int) -> Any:
    if ours is None or (isinstance(theirs, dict) and theirs.keys() == ours.keys()):
        return None if ours is None else encode(theirs, "lr_scheduler", _refuse_tensor)
    moved = {"last_epoch": step, "_step_count": step + 1}
    if not isinstance(ours, dict) or not moved.keys() <= ours.keys():
        raise DataError(f"the run's schedule of learning rates cannot be moved to step {step}")
    return {**ours, **moved}
