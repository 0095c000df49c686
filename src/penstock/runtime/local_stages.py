"""A process's stages put together: built, copied, tied, compiled, and told what to hand on."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from penstock.errors import ConfigError
from penstock.parallel.data.exchange import run_each
from penstock.parallel.data.reducer import Reducer
from penstock.parallel.tensor.plan import tensor_parallel
from penstock.runtime.copies.fixed import FixedModules
from penstock.runtime.copies.separate import Isolations, Separated, alias
from penstock.runtime.executor import Executor
from penstock.runtime.options import ParallelOptions
from penstock.runtime.routing import ValueRoutes, gathered, names_of
from penstock.runtime.transport.channel import Channel
from penstock.runtime.weights.replicas import Exchange, Replicas
from penstock.runtime.weights.shared import SharedGradients, SharedGroup, groups_of_holders, shared_groups
from penstock.runtime.weights.ties import Ties
from penstock.runtime.workers.world import World
from penstock.schedule.check import check
from penstock.schedule.placement import Placement
from penstock.schedule.program import Program
from penstock.schedule.schedule import Schedule
from penstock.stage.compute.runner import LossFunction, Settings
from penstock.stage.compute.stage import Stage
from penstock.stage.layers import Layer
from penstock.stage.module import StageModule
from penstock.stage.rng.random_state import RandomState

Modules = dict[tuple[int, int], StageModule]
"""(rank, stage) → the stage's module on that rank."""


class LocalStages:
    """The stages of this process's ranks, and what they share with other ranks.

    Args:
        schedule: proved.
        program: it lowers to.
        runs: the layers of each stage.
        local_ranks: the ranks of this process.
        device: where the modules go; None leaves them where they are built.
        loss_fn: of the last stage.
        settings: how stages compute.
        compile: what ``torch.compile`` gets; see `compile_modules`.
        world: the other processes, joined; None if there are none.
        options: how weights are sharded, and gradients reduced.

    Attributes:
        split: the names of every stage's layers.
        ties: the tied weights.
        routes: the named values.
        program: of a training step, with the skips.
        modules: (rank, stage) → the stage's module there.
        stages: (rank, stage) → the stage at work.
        shared_groups: for each local rank the parameters it holds together with others.
    """

    def __init__(
        self,
        schedule: Schedule,
        program: Program,
        runs: Sequence[Sequence[Layer]],
        local_ranks: Sequence[int],
        device: torch.device | None,
        loss_fn: LossFunction,
        settings: Settings,
        compile: str,
        world: World | None,
        options: ParallelOptions,
    ) -> None:
        self.schedule = schedule
        self.split = [[layer.name for layer in run] for run in runs]
        placement = schedule.placement
        self.ties = Ties([layer for run in runs for layer in run], runs, placement)
        seed = settings.random.seed if settings.random is not None else 0
        modules: Modules = {}

        def build() -> None:
            modules.update(build_modules(runs, placement, local_ranks, device, seed))

        run_each(build, world.exchange if world is not None else None)
        self._isolations = Isolations(runs, placement)
        self._separated = Separated(modules)
        self.ties.apply(modules)
        if world is not None and world.mesh is not None and world.mesh.shape.tp > 1:
            cut_modules(modules, world, options)
        if compile == "stage" and settings.recompute != "none":
            raise ConfigError(
                "compile='stage' makes one of all layers, so none can be recomputed on its own; use compile='block'"
            )
        compile_modules(modules, compile)
        names = {s: names_of(module) for (_, s), module in modules.items()}
        self.routes = ValueRoutes(gathered(world.gather_dict(names) if world else names))
        self.program = replace(program, skips=self.routes.skips)
        self._world = world
        self._options = options
        self._loss_fn = loss_fn
        self._settings = settings
        self._hold(modules)

    def _hold(self, modules: Modules) -> None:
        last = self.schedule.stages - 1
        self.modules = modules
        isolations = self._isolations.of(modules)
        self.stages = {
            (rank, s): Stage(
                s,
                module,
                self._loss_fn if s == last else None,
                self._settings,
                self.routes.stages[s],
                isolations[rank, s],
            )
            for (rank, s), module in modules.items()
        }
        self.shared_groups: dict[int, list[SharedGroup]] = {
            rank: shared_groups(self.schedule.placement, self.ties, self._of_rank(rank), rank)
            for rank in dict.fromkeys(rank for rank, _ in modules)
        }
        self.replicas: dict[int, Replicas] = {}

    def _of_rank(self, rank: int) -> dict[int, StageModule]:
        return {s: module for (r, s), module in self.modules.items() if r == rank}

    def replica(self) -> LocalStages:
        """A replica for other threads of this process: the same parameters' memory, with gradients of its own."""
        found = copy.copy(self)
        found.__dict__.pop("own_stages", None)
        memos: dict[int, dict[int, Any]] = {}
        found._hold(
            {
                (rank, s): alias(module, memos.setdefault(rank, {}))
                for (rank, s), module in self.modules.items()
            }
        )
        return found

    @property
    def random(self) -> RandomState | None:
        """The layers' random numbers."""
        return self._settings.random

    def watch_copies(self, replicas: int) -> None:
        """Have the stages refuse forwards that write into what there are copies of: parameters, and the loss's buffers.

        Args:
            replicas: how many pipelines there are.
        """
        for (rank, _), stage in self.stages.items():
            shared = {id(p) for group in self.shared_groups[rank] for p in group.parameters}
            stage.isolation.copied = [
                (name, p)
                for name, p in stage.module.whole_model_parameters()
                if replicas > 1 or id(p) in shared
            ]
        last, loss = self.schedule.stages - 1, self._loss_fn
        if isinstance(loss, nn.Module) and (replicas > 1 or len(self.schedule.placement.holders[last]) > 1):
            buffers = [
                (f"loss_fn.{name}" if name else "loss_fn", owner) for name, owner in loss.named_modules()
            ]
            for (_, s), stage in self.stages.items():
                if s == last:
                    stage.isolation.loss = [
                        (f"{name}.{inner}", owner, inner)
                        for name, owner in buffers
                        for inner, _ in owner.named_buffers(recurse=False)
                    ]

    @property
    def separated(self) -> list[tuple[nn.Module, nn.Module]]:
        """(module, copy) of the modules that are used on several ranks of this process."""
        return self._separated.copied

    def undo(self) -> None:
        """Give the user's modules back the parts that were replaced."""
        self.ties.undo()
        self._separated.undo()

    def parameters(self) -> list[nn.Parameter]:
        """Of all stages of all local ranks, in a fixed order."""
        return [p for module in self.modules.values() for p in module.parameters()]

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The same with their names in the whole model, a tied weight's first one; copies have the same name."""
        named = [pair for module in self.modules.values() for pair in module.whole_model_parameters()]
        return [(self.ties.first.get(name, name), p) for name, p in named]

    def make_buckets(
        self, rank: int, reducer: Reducer | None, exchange: Exchange | None, zero: bool = False
    ) -> None:
        """Make the buckets of a rank's gradients, once all its parameters are as they are to be, or again.

        Args:
            rank: which.
            reducer, exchange, zero: as `Replicas` takes them.
        """
        if rank in self.replicas:
            self.replicas.pop(rank).detach()
        shared = {group.number: group.parameters for group in self.shared_groups[rank]}
        # In one memory only the first holder of a parameter has its gradient in the end.
        elsewhere = [p for b in self.shared_groups[rank] for p in b.parameters if b.holders[0] != rank]
        self.replicas[rank] = Replicas(
            reducer,
            exchange,
            self._of_rank(rank),
            shared,
            elsewhere if self._world is None else [],
            self._options.bucket_bytes,
            zero,
        )

    @cached_property
    def own_stages(self) -> dict[int, Stage]:
        """By number, the stage that counts: the one of its first holder in this process."""
        return {s: self.stages[rank, s] for rank, s in reversed(self.stages)}

    @property
    def holders(self) -> list[tuple[int, ...]]:
        """The ranks that hold the same parameters, by what they hold."""
        return groups_of_holders(self.schedule.placement, self.ties)

    @cached_property
    def evaluate_program(self) -> Program:
        """Of a step of forwards only."""
        forwards = check(self.schedule.forwards(), forward_only=True).program
        return replace(forwards, skips=self.routes.skips)

    def fixed(self, replicas: int) -> FixedModules | None:
        """What must stay as it is now, since there are copies of it; None if there are none.

        Args:
            replicas: how many there are.
        """
        if replicas == 1 and not self.ties and not any(self.shared_groups.values()):
            return None
        return FixedModules(self.modules.values(), self.ties.over_stages)

    def executor(
        self,
        trains: bool,
        rank: int,
        channel: Channel | None,
        one_memory: bool,
        fixed: FixedModules | None = None,
    ) -> Executor:
        """A rank's executor.

        Args:
            trains: of a training step; else of an evaluation.
            rank: which.
            channel: its end of the transport; None for a single rank.
            one_memory: the ranks are threads of one process.
            fixed: what it checks before every step.
        """
        program = self.program if trains else self.evaluate_program
        stages = {s: self.stages[rank, s] for s in self.schedule.placement.stages_of[rank]}
        shared = None
        if trains and self.shared_groups[rank] and channel is not None:
            tags = program.tags + 1  # the one before is that of the step's end
            shared = SharedGradients(self.shared_groups[rank], rank, tags, channel, one_memory)
        return Executor(program, rank, stages, channel, shared, self.replicas.get(rank), fixed)


def build_modules(
    runs: Sequence[Sequence[Layer]],
    placement: Placement,
    local_ranks: Sequence[int],
    device: torch.device | None,
    seed: int,
) -> Modules:
    """Build the stages of this process's ranks, each once.

    A stage that several of them hold is built for the first holder; the others get modules that share its memory.

    Args:
        runs: the layers of each stage.
        placement: which rank holds which stage.
        local_ranks: the ranks of this process.
        device: where the modules go; None leaves them where they are built.
        seed: of the layers that are given as functions: what they draw depends on it and on their names alone.
    """
    modules: Modules = {}
    for stage, holders in enumerate(placement.holders):
        here = [rank for rank in holders if rank in local_ranks]
        for rank in here:
            first = modules.get((here[0], stage))
            modules[rank, stage] = StageModule(runs[stage], device, seed) if first is None else alias(first)
    return modules


def cut_modules(modules: Modules, world: World, options: ParallelOptions) -> None:
    """Cut the matrices of this process's stages for tensor parallelism.

    Raises:
        ConfigError: a stage on any rank cannot be cut; every rank raises it, so that none waits.
    """
    assert world.mesh is not None
    axis = world.mesh.axis("tp")
    layers = [pair for module in modules.values() for pair in module.named_layers()]
    # All stages at once: a weight that is tied between two of them stays one.
    run_each(lambda: tensor_parallel(layers, axis, options.family, options.sequence_parallel), world.exchange)


def compile_modules(modules: Mapping[tuple[int, int], StageModule], what: str) -> None:
    """Give the modules to ``torch.compile``.

    Args:
        modules: of this process.
        what: "none", "block" (each layer on its own) or "stage" (each stage's layers together).
    """
    for module in modules.values():
        if what == "block":
            for layer in module.layers:
                layer.compile()
        elif what == "stage":
            module.compile_run()
