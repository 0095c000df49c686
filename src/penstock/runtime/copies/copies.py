"""Copies of modules, parameters and buffers (replicas, stages that several ranks hold, tied weights), kept the same."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from penstock.base.errors import ReplicaError
from penstock.parallel.dtensor import gradient_dtype, is_sharded
from penstock.parallel.replicas.shards import Shards
from penstock.runtime.copies.buffers import BufferCopies, Values, is_batch_norm, stage_buffers
from penstock.runtime.copies.replica_check import CopiedTensor, ReplicaCheck, difference_error
from penstock.runtime.local_stages import LocalStages
from penstock.runtime.options import BufferRule, ParallelOptions
from penstock.runtime.weights.fixed import require_no_late_hook, whole_model_modules
from penstock.runtime.workers.world import World
from penstock.stage.layers import INTERNAL
from penstock.stage.module import StageModule
from penstock.stage.same_values import same_values

_Memory = tuple[int, torch.dtype, torch.Size, tuple[int, ...]]

_VALUES = frozenset(
    [
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        types.NoneType,
        torch.dtype,
        types.FunctionType,
        types.BuiltinFunctionType,
    ]
)
"""Types of values that copies may share."""

_DEEPEST = 6
"""Nesting to which containers and objects are followed; a limit, since objects may refer to each other in a circle."""

_NAMES = frozenset(
    ["_buffers", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"]
)
_FIXED = _NAMES | {"class", "forward", "_parameters", "_modules"}
"""What copies cannot follow."""


class Copies:
    """Copies within this process, and copies that other processes hold."""

    def __init__(
        self,
        local_stages: LocalStages,
        world: World | None,
        replicas: int,
        options: ParallelOptions,
    ) -> None:
        self._local_stages = local_stages
        self._world = world
        self._check_every = options.check_replicas
        self._trained = 0
        self._check: ReplicaCheck | None = None
        self._buffers: BufferCopies | None = None  # if any are copied, on this process or another
        if world is None:
            self._init_threads(options.buffers)
        else:
            self._init_processes(world, replicas, options.buffers)
        named = local_stages.named_parameters() if world is None else ()
        self._aliases = Aliases(named, local_stages.ties.over_stages)

    def _init_threads(self, rule: BufferRule) -> None:
        local_stages = self._local_stages
        modules = {
            s: [local_stages.modules[rank, s] for rank in ranks]
            for s, ranks in enumerate(local_stages.schedule.placement.holders)
        }
        self._modules = {s: copies for s, copies in modules.items() if len(copies) > 1}
        pairs = [(one, [other]) for one, other in local_stages.separate.copied]
        stages = [(one, others) for one, *others in self._modules.values()]
        self._module_copies = ModuleCopies(local_stages.modules.values(), [*pairs, *stages])
        self._buffers = BufferCopies(self._modules, rule) if self._modules else None

    def _init_processes(self, world: World, replicas: int, rule: BufferRule) -> None:
        local_stages = self._local_stages
        holders = local_stages.schedule.placement.holders
        modules = {s: stage.module for s, stage in local_stages.stages_by_number.items()}
        self._modules = {s: [m] for s, m in modules.items() if replicas > 1 or len(holders[s]) > 1}
        self._module_copies = ModuleCopies((), ())
        kinds = world.gather_dict({s: _buffer_kinds(module) for s, module in modules.items()})
        copied = [s for s in kinds if replicas > 1 or len(holders[s]) > 1]
        over_ranks = any(kinds[s] for s in copied if len(holders[s]) > 1)
        may_refuse = rule == "refuse" and any("other" in kinds[s] for s in copied)
        if any(kinds[s] for s in copied):
            self._buffers = BufferCopies(
                self._modules,
                rule,
                _Gather(world, holders, replicas, over_ranks),
                (lambda problem: world.gather(problem, "run", "compare buffers")) if may_refuse else None,
            )
        if world.shards_matrices or replicas > 1 or any(len(ranks) > 1 for ranks in local_stages.holders):
            where = f"rank {world.rank}"
            if world.mesh is not None:
                where = ", ".join(f"{axis} {world.mesh.coordinate(axis)}" for axis in world.mesh.shape.axes)
            self._check = ReplicaCheck(
                self._copied_tensors,
                f"({where})",
                lambda value: world.gather(value, "run", "compare replicas"),
            )

    def _copied_tensors(self) -> Iterator[CopiedTensor]:
        """Yield this process's tensors; shards are copies only of the same shard."""
        ties = self._local_stages.ties
        tied = {name for names in ties.groups for name in names}
        reduction = self._local_stages.replica_reduction
        shards = reduction.shards if reduction is not None else None
        for s, stage in sorted(self._local_stages.stages_by_number.items()):
            for _, name, kind, tensor in _tensors_of(stage.module):
                if shards is not None and not shards.in_memory(tensor):
                    continue  # each replica has another part of it
                first = ties.first.get(name, name)
                group = f"weight {first}" if name in tied else f"stage {s}"
                yield CopiedTensor(group + self._shard_of(tensor), first, kind, tensor)

    def _shard_of(self, tensor: Tensor) -> str:
        """Return a text that is the same for the processes with the same shard of a tensor; empty for a whole one."""
        if self._world is None or self._world.mesh is None or not is_sharded(tensor):
            return ""
        return f" {tensor.device_mesh.mesh_dim_names} {tensor.device_mesh.get_coordinate()}"

    def sync_parameters(self) -> None:
        """Apply changes of parameters to their copies in this process; see `Aliases.sync`."""
        self._aliases.sync()

    def sync_modules(self) -> None:
        """Apply changes of modules and of their buffers to the copies in this process; see `ModuleCopies.sync`."""
        if self._local_stages.separate.copied:
            self._local_stages.separate.sync()
        with self._local_stages.lending.in_place():
            self._module_copies.sync()

    def record_parameters(self) -> None:
        """Record the memory of parameters after a step; see `Aliases.record`."""
        self._aliases.record()

    def record_modules(self) -> None:
        """Record the modules after any step, failed or not; see `ModuleCopies.record`."""
        if self._local_stages.separate.copied:
            self._local_stages.separate.record()
        self._module_copies.record()

    def before_step(self, trains: bool, shards: Shards | None) -> None:
        """Synchronize modules and buffers and, if it is time, compare the copies; every process calls it."""
        self.sync_modules()
        if self._buffers is not None:
            self._buffers.sync()
        if not trains:
            return
        # The first step is due, too: copies may differ from the start.
        due = self._check_every > 0 and self._trained % self._check_every == 0
        self._trained += 1
        if due and shards is not None:
            shards.wait_all()
        if due and self._check is not None:
            self._check.run()
        elif due and self._world is None:
            self._compare_threads()
        if self._buffers is not None:
            self._buffers.begin()

    def after_step(self, trains: bool) -> None:
        """Give the buffers of all copies the same values, after a training step."""
        if self._buffers is not None:
            self._buffers.record_scratch()
            if trains:
                self._buffers.finish()

    def restore(self) -> None:
        """Restore the buffers of all copies after a failed step."""
        if self._buffers is not None:
            self._buffers.record_scratch()
            self._buffers.restore()

    def _compare_threads(self) -> None:
        for s, (first, *others) in self._modules.items():
            for n, other in enumerate(others, 1):
                for one, second in zip(_tensors_of(first), _tensors_of(other), strict=True):
                    a, b = one.tensor.detach(), second.tensor.detach()
                    shared = (a.data_ptr(), a.shape, a.dtype) == (b.data_ptr(), b.shape, b.dtype)
                    if not shared and not same_values(a, b.to(a.device), True):
                        where = {0: [f"stage {s}, copy 0"], 1: [f"copy {n}"]}
                        raise difference_error({one.name: one.kind}, {one.name: where})


class _Gather:
    """Collective that gathers from other processes the buffers that copies of this process's stages have changed."""

    def __init__(
        self, world: World, holders: Sequence[Sequence[int]], replicas: int, over_ranks: bool
    ) -> None:
        self._world, self._holders = world, holders
        self._replicas, self._over_ranks = replicas, over_ranks

    def __call__(self, changes: dict[int, Values]) -> dict[int, list[Values]]:
        on_cpu = {s: {n: t.cpu() for n, t in values.items()} for s, values in changes.items()}
        gathered = {s: [values] for s, values in on_cpu.items()}
        if self._over_ranks:
            ranks = self._world.gather(on_cpu)
            gathered = {s: [ranks[rank][s] for rank in self._holders[s]] for s in on_cpu}
        if self._replicas > 1 and changes:
            replicas = self._world.gather(gathered, "replicas", "compare buffers")
            gathered = {s: [values for replica in replicas for values in replica[s]] for s in on_cpu}
        return gathered


def _buffer_kinds(module: StageModule) -> list[str]:
    """Return the kinds of a stage's persistent buffers: "statistics", "other"."""
    return sorted({"statistics" if is_batch_norm(b.owner) else "other" for b in stage_buffers(module)})


def _tensors_of(module: StageModule) -> Iterator[CopiedTensor]:
    for name, p in module.whole_model_parameters():
        yield CopiedTensor("", name, "parameter", p)
    for buffer in stage_buffers(module):
        yield CopiedTensor("", buffer.name, "buffer", buffer.value)


class ModuleCopies:
    """Modules that have copies in other threads, kept like the user's modules between two steps.

    Attributes with plain values are copied (``training``, the ``p`` of a dropout, an activation function), and so are
    containers and objects of such values (a config). A change that would reach one copy only, such as a new layer or a hook,
    is refused by name. What the forwards of a step change is not copied.
    """

    def __init__(
        self, stages: Iterable[StageModule], pairs: Iterable[tuple[nn.Module, Sequence[nn.Module]]]
    ) -> None:
        names: dict[int, str] = {}
        for name, module in whole_model_modules(stages):
            names.setdefault(id(module), name)
        self._modules = [
            (
                names.get(id(first), type(first).__name__),
                first,
                [other for other in others if other is not first],
            )
            for module, copies in pairs
            for first, *others in zip(module.modules(), *(c.modules() for c in copies), strict=True)
            if copies and not isinstance(first, StageModule)
        ]
        self.record()

    def record(self) -> None:
        """Record the modules after a step."""
        self._states = self._states_now()

    def _states_now(self) -> list[dict[str, Any]]:
        known: dict[int, Any] = {}
        return [_state(module, known) for _, module, _ in self._modules]

    def sync(self) -> None:
        """Copy changed attributes before a step; none of them if the copies cannot get one."""
        states = self._states_now()
        changes = [
            (module, key)
            for module, before, state in zip(self._modules, self._states, states, strict=True)
            for key in {**before, **state}
            if before.get(key) != state.get(key)
        ]
        for (name, first, _), key in changes:
            if key in _FIXED:
                raise ReplicaError(
                    f"module {name!r} ({type(first).__name__}) has another {key} than when the pipeline was built, "
                    "which its copies in other threads (stages that several ranks hold, a module used on several ranks) "
                    "cannot follow; undo the change, build a new Pipeline, or use one without copies",
                    name,
                )
        for (_, first, copies), key in changes:
            for other in copies if key in vars(first) else ():
                vars(other)[key] = copy.deepcopy(vars(first)[key])
        self._states = states


def _state(module: nn.Module, known: dict[int, Any]) -> dict[str, Any]:
    """Return what a user may change on a module, in a form that a change in place does not change."""
    values = vars(module)
    state: dict[str, Any] = {key: list(values[key]) for key in _NAMES}
    state |= {"class": type(module), "_modules": {**values["_modules"]}}
    state["_parameters"] = [(name, id(p)) for name, p in values["_parameters"].items()]
    for key, value in values.items():
        if key == "forward":
            state[key] = value
        elif key == "training" or key not in INTERNAL:
            if id(value) not in known:
                known[id(value)] = _frozen(value, 0)
            if known[id(value)] is not None:
                state[key] = known[id(value)]
    return state


def _frozen(value: Any, depth: int) -> Any:
    """Return a container or object of plain values as nested tuples; None if there is anything else in it."""
    kind = type(value)
    if kind in _VALUES or isinstance(value, Enum):
        return kind, value
    if depth > _DEEPEST:
        return None
    parts: Iterable[Any]
    if isinstance(value, list | tuple):
        parts = value
    elif isinstance(value, dict):
        parts = (part for item in value.items() for part in item)
    elif hasattr(value, "__dict__") and not isinstance(value, nn.Module | Tensor | type | types.ModuleType):
        parts = (part for item in vars(value).items() for part in item)
    else:
        return None
    frozen = [_frozen(part, depth + 1) for part in parts]
    return None if None in frozen else (kind, *frozen)


class _Group:
    """Parameters that are one parameter to the user; the first is the user's own.

    Attributes:
        hooked: whether hooks on the first are copied to the others. Not for tied weights: each of their uses has its own
            gradient, and a hook must see the sum (see `FixedModules`).
    """

    def __init__(self, name: str, members: tuple[nn.Parameter, ...], hooked: bool) -> None:
        self.name = name
        self.members = tuple(p for p in members if p.device == members[0].device)
        self.hooked = hooked
        # What shares no memory is copied before every step, since a write into ``p.data`` leaves no mark.
        self._elsewhere = tuple(p for p in members if p.device != members[0].device)
        self._handles: list[Any] = []
        # State of all members after the last `sync` or step.
        self._requires_grad = members[0].requires_grad
        self._memory = _memory(members[0])
        self._hooks: tuple[Callable[[Tensor], Tensor | None], ...] = ()

    def sync(self) -> None:
        """Apply a change of one member to all."""
        pointer, dtype, shape, strides = self._memory
        first, moved = self.members[0], False
        for p in self.members:
            if p.requires_grad != self._requires_grad:
                self._requires_grad = p.requires_grad
                for member in (*self.members, *self._elsewhere):
                    member.requires_grad_(self._requires_grad)
            if p.data_ptr() != pointer or p.dtype != dtype or p.shape != shape or p.stride() != strides:
                moved = True
        hooks = tuple((first._backward_hooks or {}).values())
        if self._requires_grad and self.hooked and hooks != self._hooks:
            self._copy_hooks(hooks)
        if getattr(first, "_post_accumulate_grad_hooks", None):
            require_no_late_hook(self.name, first)
        if moved:
            self._move()
        for p in self._elsewhere:
            _copy(p, first)

    def record(self) -> None:
        """Take memory that a step has given all members for theirs: a store's, in place of what the user gave before it."""
        memory = _memory(self.members[0])
        if memory != self._memory and all(_memory(p) == memory for p in self.members):
            self._memory = memory

    def _copy_hooks(self, hooks: tuple[Callable[[Tensor], Tensor | None], ...]) -> None:
        for handle in self._handles:
            handle.remove()
        self._hooks = hooks
        others = (*self.members[1:], *self._elsewhere)
        self._handles = [p.register_hook(hook) for p in others for hook in hooks]

    def _move(self) -> None:
        before = self._memory
        moved = [p for p in self.members if _memory(p) != before]
        source = moved[0]
        if any(not _same(p, source) for p in moved):
            raise ReplicaError(
                f"parameter {self.name!r} has several copies in this process, and they were given different values; set "
                "the data of one of them, and the others follow",
                self.name,
            )
        for p in self.members:
            if p is not source:
                _share(p, source)
        self._memory = _memory(source)


class Aliases:
    """Groups of a process's parameters that are one to the user: copies of a stage, and tied weights, in threads.

    Autograd sees separate parameters; they share memory, or are copies on the devices of other ranks. A change to one
    applies to all: ``requires_grad``, new memory (``p.data = ...``, ``model.double()``), and hooks on the gradient.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], tied: Iterable[str] = ()) -> None:
        by_name: dict[str, dict[int, nn.Parameter]] = {}
        for name, p in parameters:
            by_name.setdefault(name, {})[id(p)] = p
        unhooked = set(tied)
        several = {name: tuple(group.values()) for name, group in by_name.items() if len(group) > 1}
        self._groups = [
            _Group(name, members, name not in unhooked)
            for name, members in several.items()
            if not members[0].is_meta
        ]

    def sync(self) -> None:
        """Apply changes made since the last step to all parameters of a group."""
        for group in self._groups:
            group.sync()

    def record(self) -> None:
        """Record the memory that a step has left."""
        for group in self._groups:
            group.record()


def _memory(parameter: Tensor) -> _Memory:
    return parameter.data_ptr(), parameter.dtype, parameter.shape, parameter.stride()


def _same(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.device == other.device and same_values(one.detach(), other.detach(), True))


def _copy(parameter: nn.Parameter, source: nn.Parameter) -> None:
    """Give a parameter on another device the values of another one."""
    if parameter.shape == source.shape and parameter.dtype == source.dtype:
        with torch.no_grad():
            parameter.copy_(source)
    else:
        parameter.grad, parameter.data = None, source.data.to(parameter.device)


def _share(parameter: nn.Parameter, source: nn.Parameter) -> None:
    """Give a parameter another one's memory; convert its gradient, or drop it if the shape differs."""
    grad, parameter.grad = parameter.grad, None
    parameter.data = source.data
    if grad is not None and grad.shape == parameter.shape:
        parameter.grad = grad.to(parameter.device, gradient_dtype(parameter))
