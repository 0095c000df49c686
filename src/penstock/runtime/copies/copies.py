"""Copies of modules, parameters and buffers (replicas, stages that several ranks hold, tied weights), kept the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from penstock.parallel.dtensor import is_sharded
from penstock.runtime.copies.aliases import Aliases
from penstock.runtime.copies.buffers import BufferCopies, Rule, Values, is_batch_norm, stage_buffers
from penstock.runtime.copies.module_copies import ModuleCopies
from penstock.runtime.copies.replica_check import CopiedTensor, ReplicaCheck, difference_error
from penstock.runtime.local_stages import LocalStages
from penstock.runtime.options import ParallelOptions
from penstock.runtime.workers.world import World
from penstock.stage.module import StageModule
from penstock.stage.values import same_values


class Copies:
    """Copies in this process and in others."""

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
        if world is None:
            self._init_threads(options.buffers)
        else:
            self._init_processes(world, replicas, options.buffers)
        named = local_stages.named_parameters() if world is None else ()
        self._aliases = Aliases(named, local_stages.ties.over_stages)

    def _init_threads(self, rule: Rule) -> None:
        local_stages = self._local_stages
        modules = {
            s: [local_stages.modules[rank, s] for rank in ranks]
            for s, ranks in enumerate(local_stages.schedule.placement.holders)
        }
        self._modules = {s: copies for s, copies in modules.items() if len(copies) > 1}
        # The user sees both modules of a separate pair, so changes go both ways.
        pairs = [
            (one, [other]) for pair in local_stages.separate_modules for one, other in (pair, pair[::-1])
        ]
        stages = [(one, others) for one, *others in self._modules.values()]
        self._module_copies = ModuleCopies(local_stages.modules.values(), [*pairs, *stages])
        self._buffers = BufferCopies(self._modules, rule)

    def _init_processes(self, world: World, replicas: int, rule: Rule) -> None:
        local_stages = self._local_stages
        holders = local_stages.schedule.placement.holders
        modules = {s: stage.module for s, stage in local_stages.stages_by_number.items()}
        self._modules = {s: [m] for s, m in modules.items() if replicas > 1 or len(holders[s]) > 1}
        self._module_copies = ModuleCopies((), ())
        kinds = world.gather_dict({s: _buffer_kinds(module) for s, module in modules.items()})
        copied = [s for s in kinds if replicas > 1 or len(holders[s]) > 1]
        over_ranks = any(kinds[s] for s in copied if len(holders[s]) > 1)
        may_refuse = rule == "refuse" and any("other" in kinds[s] for s in copied)
        self._buffers = BufferCopies(
            self._modules,
            rule,
            _Gather(world, holders, replicas, over_ranks) if any(kinds[s] for s in copied) else None,
            (lambda problem: world.all_gather_run(problem, "compare buffers")) if may_refuse else None,
        )
        shards = world.mesh is not None and world.mesh.shape.tp > 1
        if shards or replicas > 1 or any(len(ranks) > 1 for ranks in local_stages.holders):
            where = f"rank {world.rank}"
            if world.mesh is not None:
                where = ", ".join(f"{axis} {world.mesh.coordinate(axis)}" for axis in ("pp", "dp", "tp"))
            self._check = ReplicaCheck(
                self._copied_tensors,
                f"({where})",
                lambda value: world.all_gather_run(value, "compare replicas"),
            )

    def _copied_tensors(self) -> Iterator[CopiedTensor]:
        """Yield this process's tensors; shards are copies only of the same shard."""
        world, ties = self._world, self._local_stages.ties
        tied = {name for names in ties.groups for name in names}
        shard = "" if world is None or world.mesh is None else f" tp {world.mesh.coordinate('tp')}"
        for s, stage in sorted(self._local_stages.stages_by_number.items()):
            for _, name, kind, tensor in _tensors_of(stage.module):
                first = ties.first.get(name, name)
                group = f"weight {first}" if name in tied else f"stage {s}"
                yield CopiedTensor(group + shard if is_sharded(tensor) else group, first, kind, tensor)

    def sync_parameters(self) -> None:
        """Apply changes of parameters to their copies in this process; see `Aliases.sync`."""
        self._aliases.sync()

    def sync_modules(self) -> None:
        """Apply changes of modules to their copies in this process; see `ModuleCopies.sync`."""
        self._module_copies.sync()

    def record_modules(self) -> None:
        """Record the modules after any step, failed or not; see `ModuleCopies.record`."""
        self._module_copies.record()

    def before_step(self, trains: bool, wait_for_parameters: Callable[[], None]) -> None:
        """Synchronize modules and buffers and, if it is time, compare the copies; every process calls it.

        Raises:
            ReplicaError: if copies differ, or cannot get a change of a module.
        """
        self.sync_modules()
        self._buffers.sync()
        if not trains:
            return
        due = self._check_every > 0 and self._trained % self._check_every == 0
        self._trained += 1
        if due:
            wait_for_parameters()
        if due and self._check is not None:
            self._check.run()
        elif due and self._world is None:
            self._compare_threads()
        self._buffers.begin()

    def after_step(self, trains: bool) -> None:
        """Give the buffers of all copies the same values, after a training step.

        Raises:
            ReplicaError: if they differ, and the rule is to refuse.
        """
        self._buffers.record_scratch()
        if trains:
            self._buffers.finish()

    def restore(self) -> None:
        """Restore the buffers of all copies after a failed step."""
        self._buffers.record_scratch()
        self._buffers.restore()

    def _compare_threads(self) -> None:
        for s, (first, *others) in self._modules.items():
            for n, other in enumerate(others, 1):
                for one, copy in zip(_tensors_of(first), _tensors_of(other), strict=True):
                    a, b = one.tensor.detach(), copy.tensor.detach()
                    shared = (a.data_ptr(), a.shape, a.dtype) == (b.data_ptr(), b.shape, b.dtype)
                    if not shared and not same_values(a, b, True):
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
            ranks = self._world.all_gather(on_cpu)
            gathered = {s: [ranks[rank][s] for rank in self._holders[s]] for s in on_cpu}
        if self._replicas > 1 and changes:
            replicas = self._world.all_gather_replicas(gathered, "compare buffers")
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
