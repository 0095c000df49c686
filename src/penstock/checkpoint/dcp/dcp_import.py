"""A DCP folder, of whatever trained the same model, becomes a checkpoint of a run here."""

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

OPTIMIZERS = ("optim", "optimizer")
"""What others call the optimizer's state, beside ``model``."""


def bring_in(source: Path, target: Path, like: Path) -> None:
    """Write a DCP folder's weights and optimizer state as a checkpoint.

    Everything else (layers, groups of the optimizer, the learning rates' schedule, config) is as in another checkpoint of
    the run that is to go on from it, one of a first step for example; the schedule is moved to the new step, unless the
    folder has one of the same kind, as `penstock.checkpoint.dcp.dcp.export` writes it.

    Args:
        source: the folder: ``model``, or the weights themselves by name, and ``optim`` or ``optimizer`` with ``state`` by
            parameter name and ``param_groups``.
        target: of the run's checkpoints, not there yet: ``step-NUMBER`` says how many steps are done.
        like: a checkpoint of the run.

    Raises:
        ConfigError: names, shapes or groups differ, there is no optimizer's state, or something is in the way.
        DataError: the folder, or the checkpoint `like`, is damaged.
    """
    require_new(target)
    if not is_checkpoint(target):
        raise ConfigError(f"{target} must be called step-NUMBER, with how many steps are done")
    manifest, state = open_sound(like), read_dcp(source)
    step = step_of(target)
    told = state.get("step")
    if isinstance(told, int) and told != step:
        raise ConfigError(f"{source} is of step {told}, so {target} must be called step-{told:08d}")
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
    others = () if "model" in state else (*OPTIMIZERS, "step", "main_weights", "lr_scheduler")
    names = [name.removeprefix("model/") for name in manifest.tensors if name.startswith("model/")]
    given = [n for n in theirs if n not in others and (n in names or not _is_tied(theirs[n], theirs, names))]
    _same_names(source, "weights", given, names)
    found = {}
    for name in names:
        stored, tensor = manifest.tensors[f"model/{name}"], theirs[name]
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != stored.shape:
            what = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ConfigError(f"{source}: {name} is {what}, not of shape {list(stored.shape)}")
        found[f"model/{name}"] = _as_stored(source, name, tensor, stored.dtype)
    return found


def _is_tied(tensor: Any, theirs: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Whether it is one of the run's weights once more; a tied weight has several names, and one in a checkpoint."""
    alike = [one for name in names if isinstance(one := theirs.get(name), Tensor)]
    return isinstance(tensor, Tensor) and any(
        one.dtype == tensor.dtype and one.shape == tensor.shape and torch.equal(one, tensor) for one in alike
    )


def _as_stored(source: Path, name: str, tensor: Tensor, stored: str) -> Tensor:
    """In the dtype that the run keeps it in, if no digit is lost."""
    wanted = next(dtype for dtype, text in DTYPES.items() if text == stored)
    if torch.promote_types(tensor.dtype, wanted) != wanted:
        raise ConfigError(
            f"{source}: {name} is of {tensor.dtype}, which {wanted}, as the run has it, cannot hold"
        )
    return tensor.to(wanted)


def _same_names(source: Path, what: str, theirs: Iterable[str], ours: Iterable[str]) -> None:
    missing, unknown = sorted({*ours} - {*theirs}), sorted({*theirs} - {*ours})
    if missing or unknown:
        said = [
            f"{kind} {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
            for kind, names in (("without", missing), ("with unknown", unknown))
            if names
        ]
        raise ConfigError(f"{source} has other {what} than the run: {'; '.join(said)}")


def _optimizer(
    ours: Mapping[str, Any], state: Mapping[str, Any], tensors: dict[str, Tensor], step: int, source: Path
) -> dict[str, Any]:
    """Our optimizer's values with their numbers; its tensors are added to `tensors`."""
    theirs = next((state[key] for key in OPTIMIZERS if isinstance(state.get(key), dict)), None)
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
    _same_names(source, "optimizer states", theirs["state"], ours["state"] or parameters)
    entries = {}
    for name, values in theirs["state"].items():
        if not isinstance(values, dict):
            raise ConfigError(f"{source}: the optimizer's state of {name} is a {type(values).__name__}")
        if name in ours["state"]:
            _same_names(source, f"optimizer states of {name}", values, ours["state"][name])
        for key, value in values.items():
            if isinstance(value, Tensor) and value.dim() and list(value.shape) != parameters[name]["shape"]:
                raise ConfigError(
                    f"{source}: {key} of {name} is of shape {list(value.shape)}, not {parameters[name]['shape']}"
                )
        entries[name] = {
            key: encode(value, f"optimizer/{key}/{name}", tensors.__setitem__)
            for key, value in values.items()
        }
    main = {}
    for name in ours["main_weights"]:
        given = state.get("main_weights")
        value = given[name] if isinstance(given, dict) and name in given else tensors[f"model/{name}"].float()
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
    """The options of our groups, as theirs of the same parameters have them; theirs may be in another order."""
    own: list[set[str]] = [set() for _ in ours["groups"]]
    for name, place in ours["parameters"].items():
        own[place["group"]].add(name)
    alike = [group for group in theirs if isinstance(group, dict) and isinstance(group.get("params"), list)]
    found = []
    for options, names in zip(ours["groups"], own, strict=True):
        same = [group for group in alike if set(map(str, group["params"])) == names]
        if not same or len(theirs) != len(own):
            raise ConfigError(
                f"{source} has {len(theirs)} groups of parameters, none of which has the {len(names)} of the run's with "
                f"{min(names, default='no parameter')}: group them there as the run does"
            )
        taken = {key: encode(same[0][key], key, _no_tensor) for key in options if key in same[0]}
        found.append({**options, **taken})
    return found


def _no_tensor(name: str, tensor: Tensor) -> None:
    raise ConfigError(f"{name} of a group is a tensor; a checkpoint keeps it as a number")


def _schedule(ours: Any, theirs: Any, step: int) -> Any:
    if ours is None or (isinstance(theirs, dict) and theirs.keys() == ours.keys()):
        return None if ours is None else encode(theirs, "lr_scheduler", _no_tensor)
    moved = {"last_epoch": step, "_step_count": step + 1}
    if not isinstance(ours, dict) or not moved.keys() <= ours.keys():
        raise DataError(f"the run's schedule of learning rates cannot be moved to step {step}")
    return {**ours, **moved}
