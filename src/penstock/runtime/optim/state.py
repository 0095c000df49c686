"""The state of a PipelineOptimizer by the parameters' whole-model names, so that it fits any split."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from penstock.errors import ConfigError
from penstock.parallel.data.shard_slice import ShardSlice, ShardValues
from penstock.parallel.data.shards import ShardedParameter, Shards
from penstock.parallel.dtensor import distribute_like, from_local_like, full_tensor, is_dtensor, local
from penstock.runtime.optim.grad_scaler import GradScaler
from penstock.runtime.optim.groups import Named
from penstock.runtime.optim.main_weights import MainWeights
from penstock.runtime.pipeline import Pipeline

_KEYS = {
    "optimizer": str,
    "steps": int,
    "skipped": int,
    "groups": list,
    "parameters": dict,
    "state": dict,
    "main_weights": dict,
    "lr_scheduler": dict | None,
    "scaler": dict | None,
}


_MAIN = "main weight"
"""Beside the entries of a torch optimizer, whose names have no spaces."""


class StatefulOptimizer(Protocol):
    """What a `PipelineOptimizer` has a state of; see its attributes."""

    pipe: Pipeline
    optimizers: dict[int, torch.optim.Optimizer]
    main_weights: dict[int, MainWeights]
    schedulers: list[LRScheduler]
    scaler: GradScaler | None
    shards: Shards | None
    steps: int
    skipped: int

    def parts(self, rank: int) -> list[Named]:
        """Return a rank's (name, parameter) pairs by group."""


class _Member(NamedTuple):
    """A parameter and its place in a rank's optimizer.

    Attributes:
        group: of the optimizer.
        name, parameter: which.
        updated: what the torch optimizer updates in its place; None if all of it is updated by other replicas.
        piece: what of it `updated` is, if the replicas have divided it.
    """

    group: int
    name: str
    parameter: nn.Parameter
    updated: nn.Parameter | None
    piece: ShardSlice | None


def common(optimizer: StatefulOptimizer) -> dict[str, Any]:
    """What of `PipelineOptimizer.state_dict` is the same on every rank; the rest of it is empty."""
    first = next(iter(optimizer.optimizers.values()))
    return {
        "optimizer": type(first).__name__,
        "steps": optimizer.steps,
        "skipped": optimizer.skipped,
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in first.param_groups],
        "parameters": {},
        "state": {},
        "main_weights": {},
        "lr_scheduler": optimizer.schedulers[0].state_dict() if optimizer.schedulers else None,
        "scaler": optimizer.scaler.state_dict() if optimizer.scaler is not None else None,
    }


def collect(optimizer: StatefulOptimizer, keep: bool = True) -> dict[str, Any]:
    """What `PipelineOptimizer.state_dict` returns.

    Args:
        optimizer: whose.
        keep: False only gives what is divided among replicas to the others.
    """
    state = common(optimizer)
    for rank, torch_optimizer in optimizer.optimizers.items():
        mains = optimizer.main_weights[rank].by_name
        members = list(_members(optimizer, rank))
        for member in members:
            name, parameter, updated = member.name, member.parameter, member.updated
            state["parameters"][name] = {"group": member.group, "shape": list(parameter.shape)}
            if member.piece is not None:
                continue
            if updated is not None and updated in torch_optimizer.state:
                state["state"][name] = _joined(torch_optimizer.state[updated], parameter)
            if name in mains:
                state["main_weights"][name] = full_tensor(from_local_like(mains[name].detach(), parameter))
        _collect_divided(optimizer, rank, members, state, keep)
    return state


def _collect_divided(
    optimizer: StatefulOptimizer, rank: int, members: list[_Member], state: dict[str, Any], keep: bool
) -> None:
    """Put together what the replicas have divided."""
    if optimizer.shards is None:
        return
    states, mains = optimizer.optimizers[rank].state, optimizer.main_weights[rank].by_name
    by_parameter = {id(member.parameter): member for member in members}

    def entries(part: ShardedParameter) -> dict[str, Any] | None:
        member = by_parameter[id(part.entry.parameter)]
        own = member.updated
        found = dict(states[own]) if own is not None and own in states else {}
        if member.name in mains:
            found[_MAIN] = mains[member.name]
        return found or None

    for parameter, found in optimizer.shards.join(entries, keep):
        name = by_parameter[id(parameter)].name
        main = found.pop(_MAIN, None)
        if main is not None:
            state["main_weights"][name] = _put_together(main, parameter)
        if found:
            state["state"][name] = {k: _put_together(v, parameter) for k, v in found.items()}


def _members(optimizer: StatefulOptimizer, rank: int) -> Iterator[_Member]:
    main = optimizer.main_weights[rank]
    for n, pairs in enumerate(optimizer.parts(rank)):
        for name, parameter in pairs:
            part = optimizer.shards.find(parameter) if optimizer.shards is not None else None
            own = parameter if part is None else part.shard
            updated = None if own is None else main.of(name, own)
            yield _Member(n, name, parameter, updated, None if part is None else part.slice)


def _joined(state: dict[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """A parameter's state, put together where tensor parallelism has cut it (its ranks all call it then)."""
    if not is_dtensor(parameter):
        return state
    return {key: _put_together(value, parameter) for key, value in state.items()}


def _put_together(value: Any, parameter: Tensor) -> Any:
    """What has a number for each element that this process holds of a parameter, for all of its elements."""
    part = local(parameter)
    if not is_dtensor(parameter) or not isinstance(value, Tensor) or value.shape != part.shape:
        return value
    return full_tensor(from_local_like(value.to(part.device), parameter)).to(value.device)


def _taken_apart(value: Any, parameter: Tensor) -> Any:
    """The reverse of `_put_together`."""
    if isinstance(value, Tensor) and value.shape == parameter.shape:
        return local(distribute_like(value, parameter))
    return value


def _parted(state: Mapping[str, Any], parameter: nn.Parameter, piece: ShardSlice | None) -> Mapping[str, Any]:
    """The state of this process's part of a parameter; the reverse of `_joined`."""
    if piece is not None:
        return {key: _run(key, _taken_apart(value, parameter), piece) for key, value in state.items()}
    if not is_dtensor(parameter):
        return state
    return {key: _taken_apart(value, parameter) for key, value in state.items()}


def _run(key: str, value: Any, piece: ShardSlice) -> Any:
    """A piece's values out of the parameter's, or as they were read."""
    if isinstance(value, ShardValues):
        return value.values
    return piece.of(value) if piece.covers(key, value) else value


def restore(optimizer: StatefulOptimizer, state: Mapping[str, Any]) -> None:
    """Check everything, then load.

    Raises:
        ConfigError: with all problems; nothing is loaded then.
    """
    problems = [
        f"{key!r} is {'missing' if key not in state else f'a {type(state[key]).__name__}'}"
        for key, kind in _KEYS.items()
        if key not in state or not isinstance(state[key], kind)
    ]
    problems = problems or _problems(optimizer, state)
    if problems:
        raise ConfigError("the state does not fit the optimizer: " + "; ".join(problems))
    for rank, torch_optimizer in optimizer.optimizers.items():
        _restore_rank(optimizer, rank, torch_optimizer, state)
    for scheduler in optimizer.schedulers:
        scheduler.load_state_dict(copy.deepcopy(state["lr_scheduler"]))
    if optimizer.scaler is not None:
        optimizer.scaler.load_state_dict(state["scaler"])
    optimizer.steps, optimizer.skipped = state["steps"], state["skipped"]


def _problems(optimizer: StatefulOptimizer, state: Mapping[str, Any]) -> list[str]:
    first = next(iter(optimizer.optimizers.values()))
    own = type(first).__name__
    problems = []
    if state["optimizer"] != own:
        problems.append(f"it is of {state['optimizer']}, not {own}")
    if len(state["groups"]) != len(first.param_groups):
        problems.append(f"it has {len(state['groups'])} groups, not {len(first.param_groups)}")
    for key, here in (("lr_scheduler", bool(optimizer.schedulers)), ("scaler", optimizer.scaler is not None)):
        if (state[key] is not None) != here:
            problems.append(
                f"it has {'no' if here else 'a'} {key}, and this optimizer has {'one' if here else 'none'}"
            )
    if state["scaler"] is not None and optimizer.scaler is not None:
        problems += [f"scaler: {problem}" for problem in optimizer.scaler.problems(state["scaler"])]
    return problems + _problems_by_name(optimizer, state)


def _problems_by_name(optimizer: StatefulOptimizer, state: Mapping[str, Any]) -> list[str]:
    saved, mains = state["parameters"], state["main_weights"]
    problems, own = [], set()
    for rank in optimizer.optimizers:
        for n, name, parameter, _, _ in _members(optimizer, rank):
            has_main = optimizer.main_weights[rank].wants_copy(parameter)
            own.add(name)
            if name not in saved:
                problems.append(f"{name} is missing")
                continue
            group, shape = saved[name]["group"], tuple(saved[name]["shape"])
            if shape != tuple(parameter.shape):
                problems.append(f"{name} has shape {shape}, not {tuple(parameter.shape)}")
            if group != n:
                problems.append(f"{name} is in group {group}, not {n}")
            if (name in mains) != has_main:
                saved_one = name in mains
                problems.append(
                    f"{name} has {'a' if saved_one else 'no'} main weight, and has {'none' if saved_one else 'one'} here"
                )
            elif (
                has_main and not isinstance(mains[name], ShardValues) and mains[name].shape != parameter.shape
            ):
                problems.append(f"the main weight of {name} has shape {tuple(mains[name].shape)}")
    here = {name for stage in optimizer.pipe.stages.values() for name in stage.module.names}
    layers = {layer.name for layer in optimizer.pipe.layers}

    def elsewhere(name: str) -> bool:
        prefixes = {name[:at] for at, letter in enumerate(name) if letter == "."}
        return bool(prefixes & layers) and not prefixes & here

    return problems + [f"{name} is unknown" for name in saved if name not in own and not elsewhere(name)]


def _restore_rank(
    optimizer: StatefulOptimizer, rank: int, own: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    """Hand a rank's part to its torch optimizer, which numbers parameters in the order of its groups."""
    members = [member for member in _members(optimizer, rank) if member.updated is not None]
    numbers: list[list[int]] = [[] for _ in own.param_groups]
    for number, member in enumerate(members):
        numbers[member.group].append(number)
    part = {
        number: _parted(state["state"][member.name], member.parameter, member.piece)
        for number, member in enumerate(members)
        if member.name in state["state"]
    }
    groups = [{**group, "params": ids} for group, ids in zip(state["groups"], numbers, strict=True)]
    try:
        own.load_state_dict(
            {"state": {n: _copied(entries) for n, entries in part.items()}, "param_groups": groups}
        )
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ConfigError(
            f"torch's {type(own).__name__} cannot take the state ({type(error).__name__}: {error}); it is not what such an "
            "optimizer saves"
        ) from error
    for number, entries in part.items():
        updated = members[number].updated
        assert updated is not None
        loaded = own.state[updated]
        for key, value in entries.items():
            # torch casts to the parameter's dtype what some optimizers keep in fp32 beside a bf16 parameter.
            if isinstance(value, Tensor) and loaded[key].dtype != value.dtype:
                loaded[key] = value.to(loaded[key].device, copy=True)
    for _, name, parameter, _, piece in members:
        if name in optimizer.main_weights[rank].by_name:
            main = state["main_weights"][name]
            main = _taken_apart(main, parameter)
            main = local(main) if piece is None else _run(_MAIN, main, piece)
            optimizer.main_weights[rank].load(name, main)
    if optimizer.shards is not None and optimizer.main_weights[rank].copies:  # each has rounded its own
        optimizer.shards.collect()
        optimizer.shards.wait_all()


def _copied(entries: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that shares no memory; deepcopy cannot copy a DTensor."""
    return {
        key: value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for key, value in entries.items()
    }
