"""State of a PipelineOptimizer by the parameters' whole-model names, so that it fits any split."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from penstock.base.errors import ConfigError
from penstock.parallel.dtensor import distribute_like, from_local_like, full_tensor, is_dtensor, local
from penstock.parallel.replicas.shard_slice import ShardSlice, ShardValues
from penstock.parallel.replicas.shards import ShardedParameter, Shards
from penstock.runtime.optim.factory import kind_of
from penstock.runtime.optim.grad_scaler import GradScaler
from penstock.runtime.optim.groups import Named
from penstock.runtime.optim.main_weights import MainWeights
from penstock.runtime.optim.shared_groups import numbers, options_of
from penstock.runtime.pipeline import Pipeline
from penstock.stage.layers import begins_in, prefixes

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
"""Key of a main weight among the entries of a torch optimizer, whose names have no spaces."""


class StatefulOptimizer(Protocol):
    """Attributes of a `PipelineOptimizer` that its state is made of, and its state."""

    pipe: Pipeline
    main_weights: dict[int, MainWeights]
    schedulers: list[LRScheduler]
    steps: int
    skipped: int

    @property
    def optimizers(self) -> dict[int, torch.optim.Optimizer]:
        """Torch optimizers by rank of this process."""

    @property
    def scaler(self) -> GradScaler | None:
        """Scaler of the loss."""

    @property
    def shards(self) -> Shards | None:
        """Shards of the parameters that this process updates, with ZeRO."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state by parameter name."""

    def sharded_state(self) -> dict[str, Any]:
        """Return `state_dict` with this process's shards of tensors, which `whole_value` makes whole."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state from `state_dict`."""

    def give_state(self) -> None:
        """Give this replica's shards of the state to the replicas that call `state_dict`."""

    def parts(self, rank: int) -> list[Named]:
        """Return a rank's (name, parameter) pairs by group."""


class _Member(NamedTuple):
    """A parameter in a rank's optimizer.

    Attributes:
        updated: tensor that the torch optimizer updates in its place; None if other replicas update all of it.
    """

    group: int
    name: str
    parameter: nn.Parameter
    updated: nn.Parameter | None
    shard: ShardSlice | None


def common(optimizer: StatefulOptimizer) -> dict[str, Any]:
    """Return the entries of `PipelineOptimizer.state_dict` that are the same on every rank; the others are empty."""
    first = next(iter(optimizer.optimizers.values()))
    return {
        "optimizer": kind_of(first),
        "steps": optimizer.steps,
        "skipped": optimizer.skipped,
        "groups": [numbers(options_of(group)) for group in first.param_groups],
        "parameters": {},
        "state": {},
        "main_weights": {},
        "lr_scheduler": numbers(optimizer.schedulers[0].state_dict()) if optimizer.schedulers else None,
        "scaler": optimizer.scaler.state_dict() if optimizer.scaler is not None else None,
    }


def _like(value: Any, current: Any) -> Any:
    """Return a saved option as the optimizer has it now: as a tensor if that is one."""
    if isinstance(current, Tensor):
        return torch.full_like(current, value)
    if isinstance(current, tuple) and isinstance(value, tuple) and len(current) == len(value):
        return tuple(_like(*pair) for pair in zip(value, current, strict=True))
    return value


def collect(optimizer: StatefulOptimizer, keep: bool = True, whole: bool = True) -> dict[str, Any]:
    """Return the result of `PipelineOptimizer.state_dict`.

    Args:
        keep: whether to keep the state that replicas join (default True); False only gives it to the other replicas.
        whole: whether to make sharded tensors whole (default True); else `whole_value` does.
    """
    state = common(optimizer)
    for rank, torch_optimizer in optimizer.optimizers.items():
        mains = optimizer.main_weights[rank].by_name
        members = list(_members(optimizer, rank))
        for member in members:
            name, parameter, updated = member.name, member.parameter, member.updated
            state["parameters"][name] = {"group": member.group, "shape": list(parameter.shape)}
            if member.shard is not None:
                continue
            if updated is not None and updated in torch_optimizer.state:
                state["state"][name] = dict(torch_optimizer.state[updated])
            if name in mains:
                state["main_weights"][name] = mains[name].detach()
        _collect_shards(optimizer, rank, members, state, keep)
        for _, name, parameter, _, _ in members if whole else ():
            if name in state["state"]:
                state["state"][name] = {k: whole_value(v, parameter) for k, v in state["state"][name].items()}
            if name in state["main_weights"]:
                state["main_weights"][name] = whole_value(state["main_weights"][name], parameter)
    return state


def _collect_shards(
    optimizer: StatefulOptimizer, rank: int, members: list[_Member], state: dict[str, Any], keep: bool
) -> None:
    """Add the state that the replicas have divided with ZeRO; all of them call it."""
    if optimizer.shards is None:
        return
    states, mains = optimizer.optimizers[rank].state, optimizer.main_weights[rank].by_name
    by_parameter = {id(member.parameter): member for member in members}

    def entries_of(sharded: ShardedParameter) -> dict[str, Any] | None:
        member = by_parameter[id(sharded.entry.parameter)]
        updated = member.updated
        entries = dict(states[updated]) if updated is not None and updated in states else {}
        if member.name in mains:
            entries[_MAIN] = mains[member.name]
        return entries or None

    for parameter, entries in optimizer.shards.join(entries_of, keep):
        name = by_parameter[id(parameter)].name
        main = entries.pop(_MAIN, None)
        if main is not None:
            state["main_weights"][name] = main
        if entries:
            state["state"][name] = entries


def _members(optimizer: StatefulOptimizer, rank: int) -> Iterator[_Member]:
    main = optimizer.main_weights[rank]
    for n, pairs in enumerate(optimizer.parts(rank)):
        for name, parameter in pairs:
            sharded = optimizer.shards.find(parameter) if optimizer.shards is not None else None
            here = parameter if sharded is None else sharded.shard
            updated = None if here is None else main.of(name, here)
            yield _Member(n, name, parameter, updated, None if sharded is None else sharded.slice)


def whole_value(value: Any, parameter: Tensor) -> Any:
    """Return a value of a parameter's state for the full parameter; if that is sharded, all its processes call this.

    A `PipelineOptimizer` keeps it for this process's shard, a torch optimizer over DTensors as DTensors.
    """
    if isinstance(value, Tensor) and is_dtensor(value):
        return full_tensor(value)
    shard = local(parameter)
    if not is_dtensor(parameter) or not isinstance(value, Tensor) or value.shape != shard.shape:
        return value
    return full_tensor(from_local_like(value.to(shard.device), parameter)).to(value.device)


def _local_entries(entries: Mapping[str, Any], member: _Member, whole: bool) -> Mapping[str, Any]:
    """Return the state of this process's shard of a parameter; the reverse of `whole_value`."""
    parameter, shard = member.parameter, member.shard
    if shard is None and not is_dtensor(parameter):
        return entries
    if member.updated is parameter:
        return {
            key: distribute_like(value, parameter)
            if isinstance(value, Tensor) and value.shape == parameter.shape
            else value
            for key, value in entries.items()
        }
    if whole:
        return {
            key: full_tensor(value) if isinstance(value, Tensor) else value for key, value in entries.items()
        }
    local_entries = {key: _local_value(value, parameter) for key, value in entries.items()}
    if shard is None:
        return local_entries
    return {key: _shard_value(key, value, shard) for key, value in local_entries.items()}


def _local_value(value: Any, parameter: Tensor) -> Any:
    if isinstance(value, Tensor) and value.shape == parameter.shape:
        return local(distribute_like(value, parameter))
    return value


def _shard_value(key: str, value: Any, shard: ShardSlice) -> Any:
    if isinstance(value, ShardValues):
        return value.values
    return shard.of(value) if shard.covers(key, value) else value


def restore(optimizer: StatefulOptimizer, state: Mapping[str, Any]) -> None:
    """Load a state into an optimizer, after checking all of it."""
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
    kind = kind_of(first)
    problems = []
    if state["optimizer"] != kind:
        problems.append(f"it is of {state['optimizer']}, not {kind}")
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
    problems, names = [], set()
    for rank in optimizer.optimizers:
        for n, name, parameter, _, _ in _members(optimizer, rank):
            has_main = optimizer.main_weights[rank].wants_copy(parameter)
            names.add(name)
            if name not in saved:
                problems.append(f"{name} is missing")
                continue
            group, shape = saved[name]["group"], tuple(saved[name]["shape"])
            if shape != tuple(parameter.shape):
                problems.append(f"{name} has shape {shape}, not {tuple(parameter.shape)}")
            if group != n:
                problems.append(f"{name} is in group {group}, not {n}")
            if (name in mains) != has_main:
                saved_main, main_here = ("no", "one") if has_main else ("a", "none")
                problems.append(f"{name} has {saved_main} main weight, and has {main_here} here")
            elif (
                has_main and not isinstance(mains[name], ShardValues) and mains[name].shape != parameter.shape
            ):
                problems.append(f"the main weight of {name} has shape {tuple(mains[name].shape)}")
    here = {p for stage in optimizer.pipe.stages.values() for n in stage.module.names for p in prefixes(n)}
    layers = {p for layer in optimizer.pipe.layers for p in prefixes(layer.name)}

    def elsewhere(name: str) -> bool:
        return begins_in(name, layers) and not begins_in(name, here)

    return problems + [f"{name} is unknown" for name in saved if name not in names and not elsewhere(name)]


def _restore_rank(
    optimizer: StatefulOptimizer, rank: int, torch_optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    """Load the state of a rank's parameters, which torch optimizers number in the order of their groups."""
    main = optimizer.main_weights[rank]
    members = [member for member in _members(optimizer, rank) if member.updated is not None]
    numbers: list[list[int]] = [[] for _ in torch_optimizer.param_groups]
    for number, member in enumerate(members):
        numbers[member.group].append(number)
    local_state = {
        number: _local_entries(state["state"][member.name], member, member.name in main.whole)
        for number, member in enumerate(members)
        if member.name in state["state"]
    }
    groups = [
        {**{key: _like(value, current.get(key)) for key, value in group.items()}, "params": ids}
        for group, current, ids in zip(state["groups"], torch_optimizer.param_groups, numbers, strict=True)
    ]
    try:
        torch_optimizer.load_state_dict(
            {"state": {n: _copied(entries) for n, entries in local_state.items()}, "param_groups": groups}
        )
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        kind = kind_of(torch_optimizer)
        raise ConfigError(
            f"torch's {kind} cannot load the state ({type(error).__name__}: {error}); load one that a {kind} has saved"
        ) from error
    for number, entries in local_state.items():
        updated = members[number].updated
        assert updated is not None
        loaded = torch_optimizer.state[updated]
        for key, value in entries.items():
            # torch casts state to the parameter's dtype, though some optimizers keep it in fp32 for bf16 parameters.
            if isinstance(value, Tensor) and loaded[key].dtype != value.dtype:
                loaded[key] = value.to(loaded[key].device, copy=True)
    for _, name, parameter, _, shard in members:
        if name in main.by_name:
            value = state["main_weights"][name]
            if shard is None or shard.whole:
                value = main.part(name, distribute_like(value, parameter))
            else:
                value = _shard_value(_MAIN, _local_value(value, parameter), shard)
            main.load(name, value)
    if optimizer.shards is not None and main.copies:  # each replica rounded only its shards
        optimizer.shards.collect()
        optimizer.shards.wait_all()


def _copied(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy that shares no memory; deepcopy cannot copy a DTensor."""
    return {
        key: value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for key, value in entries.items()
    }
