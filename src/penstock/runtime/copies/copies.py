"""Everything of which there are copies (replicas, stages that several ranks hold, tied weights), kept the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from penstock.parallel.dtensor import is_sharded
from penstock.runtime.copies.aliases import Aliases
from penstock.runtime.copies.buffers import BufferCopies, Values, is_batch_norm, places_of
from penstock.runtime.copies.module_copies import ModuleCopies
from penstock.runtime.copies.replica_check import CopiedTensor, ReplicaCheck, differs
from penstock.runtime.local_stages import LocalStages
from penstock.runtime.options import ParallelOptions
from penstock.runtime.workers.world import World
from penstock.stage.module import StageModule


class Copies:
    """The copies in this process and those in others.

    Args:
        parts: the stages of this process.
        thread_replicas: its other replicas, if they are threads.
        world: the other processes, joined; None if there are none.
        replicas: how many there are in all.
        options: how they are kept the same.
    """

    def __init__(
        self,
        parts: LocalStages,
        thread_replicas: Sequence[LocalStages],
        world: World | None,
        replicas: int,
        options: ParallelOptions,
    ) -> None:
        everyone = [parts, *thread_replicas]
        self._parts = parts
        self._world = world
        self._every = options.check_replicas
        self._trained = 0
        self._aliases = Aliases(
            (pair for part in everyone if world is None for pair in part.named_parameters()),
            parts.ties.over_stages,
        )
        self._module_copies = ModuleCopies((), ())
        holders = parts.schedule.placement.holders
        if world is None:
            modules = {
                s: [part.modules[rank, s] for part in everyone for rank in ranks]
                for s, ranks in enumerate(holders)
            }
            self._modules = {s: found for s, found in modules.items() if len(found) > 1}
            # The user sees both modules of a separated pair, so each follows the other.
            several = [(one, [other]) for pair in parts.separated for one, other in (pair, pair[::-1])]
            stages = [(first, others) for first, *others in self._modules.values()]
            self._module_copies = ModuleCopies(parts.modules.values(), [*several, *stages])
            self._buffers = BufferCopies(self._modules, options.buffers)
            self._check = None
            return
        own = {s: stage.module for s, stage in parts.own_stages.items()}
        self._modules = {s: [m] for s, m in own.items() if replicas > 1 or len(holders[s]) > 1}
        gather = _Gather(world, holders, replicas)
        kinds = world.gather_dict({s: _kinds(module) for s, module in own.items()})
        copied = [s for s in kinds if replicas > 1 or len(holders[s]) > 1]
        gather.over_ranks = any(kinds[s] for s in copied if len(holders[s]) > 1)
        asks = options.buffers == "refuse" and any("other" in kinds[s] for s in copied)
        self._buffers = BufferCopies(
            self._modules,
            options.buffers,
            gather if any(kinds[s] for s in copied) else None,
            (lambda problem: world.exchange_all(problem, "compare buffers")) if asks else None,
        )
        alone = replicas == 1 and all(len(ranks) == 1 for ranks in parts.holders)
        cut = world.mesh is not None and world.mesh.shape.tp > 1
        where = f"rank {world.rank}"
        if world.mesh is not None:
            where = ", ".join(f"{axis} {world.mesh.coordinate(axis)}" for axis in ("pp", "dp", "tp"))
        self._check = (
            ReplicaCheck(
                self._held, f"({where})", lambda value: world.exchange_all(value, "compare replicas")
            )
            if cut or not alone
            else None
        )

    def _held(self) -> Iterator[CopiedTensor]:
        """What this process holds; of tensors that are cut, copies are those of the same part."""
        world, ties = self._world, self._parts.ties
        tied = {name for names in ties.groups for name in names}
        part = "" if world is None or world.mesh is None else f" tp {world.mesh.coordinate('tp')}"
        for s, stage in sorted(self._parts.own_stages.items()):
            for own, p in stage.module.whole_model_parameters():
                name = ties.first.get(own, own)
                group = f"weight {name}" if own in tied else f"stage {s}"
                yield CopiedTensor(group + part if is_sharded(p) else group, name, "parameter", p)
            for place in places_of(stage.module):
                yield CopiedTensor(f"stage {s}", place.name, "buffer", place.value)

    def follow(self) -> bool:
        """Let what was changed of parameters hold for their copies in this process; see `Aliases.follow`."""
        return self._aliases.follow()

    def follow_modules(self) -> None:
        """Let what was changed on modules hold for their copies in this process; see `ModuleCopies.follow`."""
        self._module_copies.follow()

    def ran(self) -> None:
        """After any step, failed or not."""
        self._module_copies.ran()

    def before_step(self, trains: bool, wait_for_parameters: Callable[[], None]) -> None:
        """Level and, when it is due, compare; every process calls it.

        Args:
            trains: whether it is a training step.
            wait_for_parameters: waits for parameters that are being collected.

        Raises:
            ReplicaError: copies are no longer the same, or cannot follow what was changed on a module.
        """
        self.follow_modules()
        self._buffers.level()
        if not trains:
            return
        due = self._every > 0 and self._trained % self._every == 0
        self._trained += 1
        if due:
            wait_for_parameters()
        if due and self._check is not None:
            self._check.run()
        elif due and self._world is None:
            self._compare()
        self._buffers.begin()

    def after_step(self, trains: bool) -> None:
        """After a step: let the buffers of all copies be the same, if it was a training step.

        Raises:
            ReplicaError: nobody can say what they should be.
        """
        self._buffers.ran()
        if trains:
            self._buffers.finish()

    def failed(self) -> None:
        """A training step failed: the buffers of all copies are as before it."""
        self._buffers.ran()
        self._buffers.restore()

    def _compare(self) -> None:
        """In threads: copies share their memory, or have the same values."""
        for s, (first, *others) in self._modules.items():
            for n, other in enumerate(others, 1):
                for kind, a, b in _pairs(first, other):
                    if not _same(a[1], b[1]):
                        where = {0: [f"stage {s}, copy 0"], 1: [f"copy {n}"]}
                        raise differs({a[0]: kind}, {a[0]: where})


class _Gather:
    """What the copies of this process's stages have changed, brought together from other processes."""

    def __init__(self, world: World, holders: Sequence[Sequence[int]], replicas: int) -> None:
        self.over_ranks = False
        self._world, self._holders, self._replicas = world, holders, replicas

    def __call__(self, own: dict[int, Values]) -> dict[int, list[Values]]:
        mine = {s: {n: t.cpu() for n, t in values.items()} for s, values in own.items()}
        found = {s: [values] for s, values in mine.items()}
        if self.over_ranks:
            rows = self._world.exchange(mine)
            found = {s: [rows[rank][s] for rank in self._holders[s]] for s in mine}
        if self._replicas > 1 and own:
            told = self._world.exchange_replicas(found, "compare buffers")
            found = {s: [values for row in told for values in row[s]] for s in mine}
        return found


def _kinds(module: StageModule) -> list[str]:
    """What kinds of persistent buffers a stage has."""
    return sorted({"statistics" if is_batch_norm(p.owner) else "other" for p in places_of(module)})


def _pairs(
    one: StageModule, other: StageModule
) -> Iterator[tuple[str, tuple[str, Tensor], tuple[str, Tensor]]]:
    for a, b in zip(one.whole_model_parameters(), other.whole_model_parameters(), strict=True):
        yield "parameter", a, b
    for p, q in zip(places_of(one), places_of(other), strict=True):
        yield "buffer", (p.name, p.value), (q.name, q.value)


def _same(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.data_ptr() == other.data_ptr() or torch.equal(one.detach(), other.detach()):
        return True
    return bool(torch.isclose(one.detach(), other.detach(), 0, 0, equal_nan=True).all())
