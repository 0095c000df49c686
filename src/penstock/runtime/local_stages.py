"""Stages of a process: built, copied, tied, sharded and compiled, with the routes of their values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from penstock.base.errors import ConfigError
from penstock.parallel.axis import AxisOptions
from penstock.parallel.dtensor import is_dtensor
from penstock.parallel.fully_sharded import FullyShardedLayers
from penstock.parallel.host_store.store import open_store
from penstock.parallel.participant import Losses, Participant
from penstock.parallel.replicas.exchange import run_each
from penstock.parallel.replicas.reduction import BucketReduction, ReplicaReduction
from penstock.parallel.replicas.resident import ResidentReduction, require_divisible
from penstock.parallel.sample_parts import SampleParts
from penstock.runtime.batch.work import Work
from penstock.runtime.executor import Executor
from penstock.runtime.gradient_scale import GradientScale
from penstock.runtime.options import ParallelOptions
from penstock.runtime.routing import ValueRoutes, gathered, names_of
from penstock.runtime.transport.channel import Channel
from penstock.runtime.weights.fixed import FixedModules
from penstock.runtime.weights.lending import Lending
from penstock.runtime.weights.separate import Isolations, SeparateModules, alias
from penstock.runtime.weights.shared import SharedGradients, SharedGroup, group_holders, shared_groups
from penstock.runtime.weights.ties import Ties
from penstock.runtime.workers.world import World
from penstock.schedule.check import check
from penstock.schedule.memory import peak
from penstock.schedule.ops import Kind
from penstock.schedule.placement import Placement
from penstock.schedule.program import Program
from penstock.schedule.residency import make_residency
from penstock.schedule.schedule import Schedule
from penstock.stage.compute.runner import LossFunction, Settings
from penstock.stage.compute.stage import Stage
from penstock.stage.devices import device_of
from penstock.stage.layers import Layer
from penstock.stage.module import StageModule
from penstock.stage.rng.random_state import RandomState

Modules = dict[tuple[int, int], StageModule]
"""Stage modules by (rank, stage)."""


class Programs:
    """Programs of a step and of an evaluation for one number of microbatches, and their executors.

    Attributes:
        executors: executors of this process's ranks, by whether they train; made when a step first needs them.
    """

    def __init__(self, program: Program, skips: tuple[tuple[int, int], ...]) -> None:
        self.train = replace(program, skips=skips)
        self.executors: dict[bool, list[Executor]] = {}

    @cached_property
    def evaluate(self) -> Program:
        """Program of a step of forwards only."""
        return self.forwards(self.train.schedule.microbatches)

    def forwards(self, microbatches: int) -> Program:
        """Return the program of the forwards of the first microbatches."""
        forwards = check(self.train.schedule.forwards(microbatches), forward_only=True).program
        return replace(forwards, skips=self.train.skips)


class LocalStages:
    """Stages of this process's ranks, and the weights that they share with other ranks.

    Args:
        device: device of all ranks; None leaves modules where they are.
        devices: device of each rank, where threads have different ones.

    Attributes:
        separate: copies of the modules that several ranks of this process use.
        lending: what ranks use during a step in place of the user's parameters and modules.
    """

    def __init__(
        self,
        program: Program,
        layers_of_stages: Sequence[Sequence[Layer]],
        *,
        local_ranks: Sequence[int],
        device: torch.device | None,
        devices: Sequence[torch.device],
        loss_fn: LossFunction,
        settings: Settings,
        compile: str,
        world: World | None,
        options: ParallelOptions,
        own_names: Collection[str],
    ) -> None:
        self.schedule = program.schedule
        self.split = [[layer.name for layer in layers] for layers in layers_of_stages]
        self.blocks = [sum(layer.role == "block" for layer in layers) for layers in layers_of_stages]
        self._world = world
        self._options = options
        self._loss_fn = loss_fn
        self._settings = settings
        placement = self.schedule.placement
        self.ties = Ties(layers_of_stages, placement, own_names)
        seed = settings.random.seed if settings.random is not None else 0
        modules: Modules = {}
        mesh = None if world is None or world.mesh is None else world.mesh.shape
        if options.sharding.stored and devices:
            raise ConfigError(
                f"store={options.sharding.store!r} copies weights to one device, and the ranks have "
                f"{', '.join(map(str, devices))}; start one process for each GPU, or keep the weights on the devices"
            )
        self.store = open_store(options.sharding, mesh, settings, compile, self.ties.over_stages)
        make = StageModule if self.store is None else self.store.build

        def build() -> None:
            of_ranks = dict.fromkeys(local_ranks, device) | dict(enumerate(devices))
            modules.update(build_modules(layers_of_stages, placement, of_ranks, seed, make))
            require_own_axes(modules, world, self.schedule)

        run_each(build, partial(world.gather, over="run") if world is not None else None)
        # Before modules are replaced by copies, whose buffers are separate.
        isolation = Isolations(layers_of_stages, placement)
        self.devices = devices
        self.separate = SeparateModules(modules, devices)
        self.lending = Lending()
        self.lending.add(self.separate.lent)
        with self.lending.in_place():
            own_of_ranks = self.ties.apply(modules, devices)
        self.lending.add(own_of_ranks)
        self.axes = () if world is None else world.axes
        for axis in self.axes:
            axis.prepare(
                _named_layers(modules), AxisOptions(options.family, options.sequence_parallel, compile)
            )
        if compile == "stage" and settings.recompute != "none":
            raise ConfigError(
                "compile='stage' compiles a stage's layers as one, so none can be recomputed alone; use compile='block'"
            )
        compile_modules(modules, compile)
        names = {s: names_of(module) for (_, s), module in modules.items()}
        self.routes = ValueRoutes(gathered(world.gather_dict(names) if world else names))
        self.programs = Programs(program, self.routes.skips)
        last = self.schedule.stages - 1
        self.modules = modules
        with self.lending.in_place():
            isolations = isolation.of(modules)
            self.stages = {
                (rank, s): Stage(
                    s,
                    module,
                    loss_fn if s == last else None,
                    settings,
                    self.routes.stages[s],
                    isolations[rank, s],
                )
                for (rank, s), module in modules.items()
            }
            self.shared_groups: dict[int, list[SharedGroup]] = {
                rank: shared_groups(placement, self.ties, self._of_rank(rank), rank)
                for rank in dict.fromkeys(rank for rank, _ in modules)
            }
            if self.store is not None:
                for rank in self.shared_groups:
                    self.store.add_rank(rank, self._of_rank(rank))
        self.replica_reduction: ReplicaReduction | None = None

    def require_known(self) -> None:
        """Raise ConfigError if the forwards so far have shown that layers do not know their part; see `Axis`."""
        for axis in self.axes:
            axis.require_known(_named_layers(self.modules))

    def join(self, works: Sequence[Work], parts: SampleParts, sums: bool) -> None:
        """Join the losses of parts of microbatches, in place; see `SampleParts.join`."""
        losses = Losses()
        for work in works:
            losses.update(work.losses)
            work.losses = Losses()
        replicas = 1 if self._world is None else self._world.replica_count
        works[0].losses = parts.join(losses, works[0].options.microbatches, replicas, sums)

    def wrap_loss(self, weight: Callable[[Any], object] | None) -> None:
        """Have the axes compute the loss of this process's part; see `Axis.wrap_loss`."""
        for axis in self.axes:
            for stage in self.stages.values():
                stage.wrap_loss(partial(axis.wrap_loss, weight=weight))

    def programs_for(self, program: Program) -> Programs:
        """Return what another number of microbatches needs; its schedule may split backwards where the first does not."""
        if self._world is None or not self._world.shards_matrices:
            require_own_axes(self.modules, self._world, program.schedule)
        return Programs(program, self.routes.skips)

    @contextmanager
    def records_kept(self) -> Iterator[None]:
        """Return a context with other steps, after which what is recorded of collectives is of the step before it."""
        with ExitStack() as stack:
            for axis in self.axes:
                stack.enter_context(axis.record_kept())
            if isinstance(self.replica_reduction, ResidentReduction):
                stack.enter_context(self.replica_reduction.records_kept())
            yield

    def _of_rank(self, rank: int) -> dict[int, StageModule]:
        return {s: module for (r, s), module in self.modules.items() if r == rank}

    @property
    def random(self) -> RandomState | None:
        """Random state of the layers."""
        return self._settings.random

    def watch_copies(self, replicas: int) -> None:
        """Have the stages refuse forwards that write into parameters with copies, or into the loss function's buffers."""
        for (rank, _), stage in self.stages.items():
            shared = {id(p) for group in self.shared_groups[rank] for p in group.parameters}
            with self.lending.in_place():
                named = list(stage.module.whole_model_parameters())
            stage.isolation.copied = [(name, p) for name, p in named if replicas > 1 or id(p) in shared]
        last, loss = self.schedule.stages - 1, self._loss_fn
        if isinstance(loss, nn.Module) and (replicas > 1 or len(self.schedule.placement.holders[last]) > 1):
            buffers = [
                (f"{name}.{inner}", owner, inner)
                for name, owner in loss.named_modules(prefix="loss_fn")
                for inner, _ in owner.named_buffers(recurse=False)
            ]
            for (_, s), stage in self.stages.items():
                if s == last:
                    stage.isolation.loss = buffers

    def undo(self) -> None:
        """Give the user's modules back the parameters and forwards that were replaced."""
        for axis in self.axes:
            axis.undo(_named_layers(self.modules))
        self.ties.undo()

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return (name in the whole model, parameter) pairs of all ranks; copies and tied weights have the same name."""
        with self.lending.in_place():
            named = [pair for module in self.modules.values() for pair in module.whole_model_parameters()]
        return [(self.ties.first.get(name, name), p) for name, p in named]

    def make_buckets(self, world: World, zero: bool, whole: Collection[nn.Parameter]) -> None:
        """Make the buckets of this process's gradients, or make them again; every replica calls it."""
        of_divided = next((each for axis in self.axes if (each := axis.open_reducer()) is not None), None)
        reducer = world.replicas(of_divided is not None)
        resident = zero and self._options.sharding.comes_and_goes
        if resident and reducer is not None:  # before the reduction that is replaced ends
            require_divisible(self._of_rank(world.rank).values(), whole, self._options.sharding)
        if self.replica_reduction is not None:
            self.replica_reduction.detach()
        modules, options = self._of_rank(world.rank), self._options
        shared = {group.number: group.parameters for group in self.shared_groups[world.rank]}
        exchange = partial(world.gather, over="stage", action="end the step on all replicas")
        if reducer is None or not any(True for module in modules.values() for _ in module.parameters()):
            self.replica_reduction = ReplicaReduction(exchange, modules, shared)
        elif resident:
            self.replica_reduction = ResidentReduction(
                reducer,
                exchange,
                modules,
                shared,
                options.bucket_bytes,
                options.sharding,
                device=device_of([*modules.values()]),
            )
        else:
            self.replica_reduction = BucketReduction(
                reducer,
                exchange,
                modules,
                shared,
                options.bucket_bytes,
                zero,
                whole=whole,
                divided_reducer=of_divided,
            )

    @cached_property
    def stages_by_number(self) -> dict[int, Stage]:
        """Stages by number; of several copies in this process, the first holder's."""
        return {s: self.stages[rank, s] for rank, s in reversed(self.stages)}

    @property
    def holders(self) -> list[tuple[int, ...]]:
        """Ranks that hold the same parameters, by number of the group; see `group_holders`."""
        return group_holders(self.schedule.placement, self.ties)

    def fixed_modules(self, replicas: int) -> FixedModules | None:
        """Return a check that modules with copies are unchanged; None if there are no copies."""
        if replicas == 1 and not self.ties and not any(self.shared_groups.values()):
            return None
        return FixedModules(self.modules.values(), self.ties.over_stages)

    def choose_recompute(self, memory: int) -> None:
        """Choose the layers of each rank to recompute; see `choose_recompute`."""
        for rank, stages_of_rank in enumerate(self.schedule.placement.stages_of):
            stages = {s: self.stages[rank, s] for s in stages_of_rank if (rank, s) in self.stages}
            if stages:
                choose_recompute(self.schedule, rank, stages, memory)

    def executor(
        self,
        program: Program,
        trains: bool,
        rank: int,
        channel: Channel | None,
        fixed: FixedModules | None,
        scale: GradientScale | None,
    ) -> Executor:
        """Return a rank's executor."""
        if self.store is not None or isinstance(self.replica_reduction, ResidentReduction):
            program = replace(program, residency=make_residency(program.schedule, self._options.sharding))
        stages = {s: self.stages[rank, s] for s in self.schedule.placement.stages_of[rank]}
        # See `Executor` for the reasons of the order.
        around: list[Participant] = [] if scale is None or not trains else [scale]
        around += [] if self.replica_reduction is None else [self.replica_reduction]
        within: list[Participant] = []
        if trains and self.shared_groups[rank] and channel is not None:
            tags = program.tags + 1  # the tag before belongs to the end of the step
            one_memory, stored = self._world is None, self.store is not None
            shared = SharedGradients(self.shared_groups[rank], rank, tags, channel, one_memory, stored)
            (around if stored else within).append(shared)
        around += [] if self.store is None else [self.store.participants[rank]]
        within += [each for axis in self.axes for each in axis.participants]
        sharded = FullyShardedLayers(stages.values())
        within += [sharded] if sharded.layers else []
        within += [] if fixed is None else [fixed]
        return Executor(program, rank, stages, channel, around, within)


def build_modules(
    layers_of_stages: Sequence[Sequence[Layer]],
    placement: Placement,
    devices: Mapping[int, torch.device | None],
    seed: int,
    make: Callable[[Sequence[Layer], torch.device | None, int], StageModule],
) -> Modules:
    """Build the stages of this process's ranks, each once.

    A stage that several of them hold is built for the first holder; the other holders get modules that share its memory.

    Args:
        devices: devices of this process's ranks.
    """
    modules: Modules = {}
    for stage, holders in enumerate(placement.holders):
        here = [rank for rank in holders if rank in devices]
        for rank in here:
            first = modules.get((here[0], stage))
            modules[rank, stage] = (
                make(layers_of_stages[stage], devices[rank], seed) if first is None else alias(first)
            )
    return modules


def require_own_axes(modules: Modules, world: World | None, schedule: Schedule) -> None:
    """Check that no layer was parallelised by torch's wrappers in a way that steps of microbatches cannot keep."""
    layers = [(name, layer) for module in modules.values() for name, layer in module.named_layers()]
    wrapped = [(n, type(m).__name__) for n, layer in layers for m in layer.modules() if _is_wrapper(m)]
    if wrapped:
        name, kind = wrapped[0]
        raise ConfigError(
            f"layer {name} has a {kind}, which expects one backward for each forward; take MeshShape(pp=..., dp=...) for "
            "replicas, or fully_shard (FSDP2) on the mesh's other dimension"
        )
    tensors = (
        f"{n}.{p}" for n, layer in layers for p, tensor in layer.named_parameters() if is_dtensor(tensor)
    )
    if (parameter := next(tensors, None)) is None:
        return
    if (schedule.kind == Kind.W).any():
        raise ConfigError(
            f"{parameter} is a DTensor, whose gradient torch sums by itself, but the schedule {schedule.name} "
            "splits backwards; take one without W ops, such as 1f1b or interleaved-1f1b"
        )
    if world is not None and world.mesh is not None:
        raise ConfigError(
            f"{parameter} is a DTensor already, but the mesh ({world.mesh.shape}) has replicas or shards of its own; give "
            "the pipeline the slice mesh['pp'], and leave the other dimensions to torch, or do not shard the layers "
            "yourself"
        )


def _is_wrapper(module: nn.Module) -> bool:
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    return kind.startswith(
        ("torch.nn.parallel.distributed.", "torch.distributed.fsdp.fully_sharded_data_parallel.")
    )


def _named_layers(modules: Modules) -> list[tuple[str, nn.Module]]:
    return [pair for module in modules.values() for pair in module.named_layers()]


def compile_modules(modules: Mapping[tuple[int, int], StageModule], granularity: str) -> None:
    """Give the modules to ``torch.compile``."""
    for module in modules.values():
        if granularity == "block":
            for layer in module.layers:
                layer.compile()
        elif granularity == "stage":
            module.compile_run()


def choose_recompute(schedule: Schedule, rank: int, stages: Mapping[int, Stage], limit: int) -> None:
    """Let a rank's stages recompute as few layers as the limit allows, those first that free the most bytes.

    The rank's peak memory is the one that the checker predicts (`penstock.schedule.memory.peak`), plus the largest
    recomputed layer, which is back in memory during its backward.

    Args:
        stages: stages of the rank by number, after a step in which every layer was recomputed and measured.
        limit: bytes of activations that the rank may hold.
    """
    kept = {s: [layer.kept for layer in stage.layer_bytes()] for s, stage in stages.items()}
    inputs = {s: [layer.inputs for layer in stage.layer_bytes()] for s, stage in stages.items()}
    recomputed = {s: [False] * len(kept[s]) for s in stages}

    def peak_bytes() -> int:
        saved = [0] * schedule.stages
        largest = 0
        for s in stages:
            for full, few, again in zip(kept[s], inputs[s], recomputed[s], strict=True):
                saved[s] += few if again else full
                largest = max(largest, full if again else 0)
        return int(peak(schedule, saved)[rank]) + largest

    order = sorted((inputs[s][n] - kept[s][n], s, n) for s in stages for n in range(len(kept[s])))
    for _, s, n in order:
        if peak_bytes() <= limit:
            break
        recomputed[s][n] = True
    if (needed := peak_bytes()) > limit:
        raise ConfigError(
            f"rank {rank} holds {needed} bytes of activations even with every layer recomputed, and may hold {limit}; "
            "use smaller microbatches, more ranks, or a schedule that holds fewer"
        )
    for s, stage in stages.items():
        stage.set_recompute(recomputed[s])
