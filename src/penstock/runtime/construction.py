"""The construction of a Pipeline: from what was given to stages on ranks, and what runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from penstock.base.counts import require_count
from penstock.forward.own_layers import ModelLayers
from penstock.parallel.axis import GivenLoss
from penstock.parallel.mesh import Mesh, MeshShape, given_mesh
from penstock.parallel.replicas.exchange import run_each
from penstock.parallel.sample_parts import SampleParts
from penstock.runtime.batch.arguments import BatchDims
from penstock.runtime.batch.loss_weights import Reduction, counted_by, ignore_index_of
from penstock.runtime.batch.splitter import BatchSplitter
from penstock.runtime.engine import Engine
from penstock.runtime.first_step import FirstStep
from penstock.runtime.health.hang import Timeout, require_timeout
from penstock.runtime.local_stages import LocalStages
from penstock.runtime.loop_report import LoopReport
from penstock.runtime.model.first_step import FirstStepCheck
from penstock.runtime.model.given_model import given_model
from penstock.runtime.model.measured_split import is_measured, resolve_split
from penstock.runtime.model.pipeline_model import PipelineModel
from penstock.runtime.model.rank_devices import given_devices, require_devices
from penstock.runtime.model.row_check import RowCheck
from penstock.runtime.model.torch_optimizers import watch_torch_optimizers
from penstock.runtime.options import ExecutionOptions, ParallelOptions
from penstock.runtime.start.cpu_threads import cpu_threads
from penstock.runtime.start.place import Place, current_place
from penstock.runtime.start.refusals import print_traceback_once
from penstock.runtime.validation import (
    LossScale,
    device_type,
    local_device,
    make_settings,
    program_for,
    require_loss_without_parameters,
    require_seed,
    resolve_loss,
    resolve_mesh,
    resolve_schedule,
)
from penstock.runtime.weights.grad_norm import GlobalNorm
from penstock.runtime.weights.parameters import LocalParameters
from penstock.runtime.workers.agreement import require_same_pipeline
from penstock.runtime.workers.world import World
from penstock.schedule.check import check
from penstock.schedule.program import Program
from penstock.schedule.residency import Sharding, make_residency
from penstock.schedule.schedule import Schedule
from penstock.stage.compute.output_loss import OutputLoss
from penstock.stage.compute.recompute import Policy
from penstock.stage.compute.runner import LossFunction, Settings
from penstock.stage.layers import Layer, require_values
from penstock.stage.rng.random_state import RandomState
from penstock.stage.split import Split, split_layers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class BuiltPipeline(PipelineModel):
    """A pipeline with all of its parts, which `penstock.Pipeline` calls; its arguments are described there."""

    def __init__(
        self,
        model: object,
        loss_fn: LossFunction | None = None,
        *,
        microbatches: int,
        schedule: str | Path | Schedule = "1f1b",
        ranks: int | None = None,
        virtual_stages: int | None = None,
        split: Split = "even",
        device: torch.device | str | Sequence[torch.device | str] | None = None,
        timeout: float = 60.0,
        mesh: MeshShape | Mesh | DeviceMesh | None = None,
        recompute: Policy = "none",
        autocast: torch.dtype | None = None,
        seed: int = 0,
        reduction: Reduction | None = None,
        dims: Mapping[str, object] | None = None,
        parallel: ParallelOptions = ParallelOptions(),
        execution: ExecutionOptions = ExecutionOptions(),
    ) -> None:
        print_traceback_once()
        # 1. What was given, as far as it can be judged in this process alone.
        require_count("microbatches", microbatches)
        require_count("virtual_stages", 1 if virtual_stages is None else virtual_stages)
        require_count("ranks", 1 if ranks is None else ranks)
        self.timeout, self.seed = require_timeout(timeout), require_seed(seed)
        given = given_model(model, loss_fn)
        self._loss_fn, self.layers = given.loss_fn, given.layers
        axes, self.mesh = given_mesh(mesh)
        self.parallel, self.execution = parallel, execution
        self._random = RandomState(self.seed)
        settings = make_settings(recompute, autocast, execution, self._random, self.mesh)
        loss = resolve_loss(given.loss_fn, given.reduction, reduction, self.mesh, dims)
        self.reduction = loss.reduction
        # 2. The schedule, which is proved here.
        place = current_place()
        self.devices = given_devices(device, self.layers, place is not None)
        if ranks is None and axes is None and self.devices:
            ranks = len(self.devices)
        ranks, processes = resolve_mesh(axes, ranks, place)
        self.schedule = resolve_schedule(schedule, ranks, microbatches, virtual_stages, processes)
        split = require_devices(self.devices, self.schedule, self.layers, split, device is not None)
        if len(set(self.devices)) == 1:
            device, self.devices = self.devices[0], ()
        require_loss_without_parameters(loss.function, self.schedule, self.mesh)
        program = check(self.schedule).program
        # What cannot be sharded is refused now; the executors make their Programs when the optimizer has sharded it.
        if parallel.sharding.comes_and_goes:
            make_residency(self.schedule, parallel.sharding)
        self.microbatches, self.ranks, self.steps = microbatches, self.schedule.ranks, 0
        self.tracing: bool | None = None
        self._report = LoopReport()
        self.reduce_gradients = True
        self.scaler: LossScale | None = None
        # 3. The processes meet, and compare what each was given.
        self.in_processes = processes is not None
        self.device = None if self.devices else local_device(device, self.in_processes)
        compared = {
            "microbatches": microbatches, "schedule": schedule, "mesh": self.mesh, "split": split, "timeout": timeout,
            "recompute": recompute, "autocast": autocast, "seed": seed, "reduction": reduction, "dims": dims,
            "parallel": parallel, "execution": execution, "device": None if self.device is None else self.device.type,
        }  # fmt: skip
        self.world = None if place is None or processes is None else self._meet(place, axes, compared)
        self._find_place()
        # 4. The stages of this process, and the engine that runs them.
        layers_of_stages = self._split(split, loss.function, autocast, recompute)
        layer_check = self._make_layer_check(layers_of_stages, loss.function, autocast)
        own_names = [] if given.module is None else [name for name, _ in given.module.named_parameters()]
        self._local = self._make_stages(program, layers_of_stages, loss.function, settings, own_names)
        self.stages, self.store = self._local.stages_by_number, self._local.store
        self.holds_first, self.holds_last = 0 in self.stages, self.schedule.stages - 1 in self.stages
        rank = self.rank if self.in_processes else None
        parameters = LocalParameters(
            self.layers, self.stages, self.schedule.placement, self._local.ties, rank, own_names
        )
        self._engine = self._make_engine(partial(program_for, self.schedule, schedule, virtual_stages))
        # 5. What cuts a batch, and what is left for the first step.
        self._splitter = self._make_splitter(loss, dims)
        self._local.wrap_loss(self._splitter.weight)
        self._container = given.container
        self._first_step: FirstStep | None = self._make_first_step(
            layer_check, loss.function, parameters, autocast
        )
        others = [loss.function] if isinstance(loss.function, nn.Module) else []
        # Last, since it takes the values of what this process does not hold.
        super().__init__(parameters, self._engine, given.module, self.world, others)
        if self._emptied:
            self._container.record()
        self.global_norm = GlobalNorm(parameters, self.world)
        if self.world is not None:
            watch_torch_optimizers(self._engine, parameters, self.ranks)

    def _meet(self, place: Place, axes: MeshShape | Mesh | None, given: Mapping[str, object]) -> World:
        """Meet the other processes of the run, and compare what each was given."""
        compare = partial(
            require_same_pipeline, schedule=self.schedule, layers=self.layers, given=dict(given)
        )
        return World(
            *place,
            self.timeout,
            axes,
            first=self.execution.first_timeout,
            compare=compare,
            device=device_type(self.device, self.layers),
        )

    def _find_place(self) -> None:
        """Find the place of this process among those that train the model."""
        world = self.world
        self.rank = world.rank if world is not None else 0
        self.local_ranks = [self.rank] if self.in_processes else list(range(self.ranks))
        mesh = MeshShape() if self.mesh is None else self.mesh
        self.replicas, self.tensor_ranks = mesh.replicas, mesh.tensor_ranks
        self._sample_parts = SampleParts() if world is None else world.sample_parts
        self.replica = self._sample_parts.replica
        self.is_first = world is None or world.is_first
        gather = None if world is None else partial(world.gather, over="run", action="share the cores")
        self.threads = cpu_threads(gather, self.ranks, self.execution.threads)

    def _split(
        self, split: Split, loss_fn: LossFunction, autocast: torch.dtype | None, recompute: Policy
    ) -> list[list[Layer]]:
        """Return the layers of each stage; those of this process must have values, and all if it measures them."""
        world, mesh = self.world, MeshShape() if self.mesh is None else self.mesh
        # Whether other processes, or the host, hold a part of what a stage has on its device.
        divided = mesh.tensor_ranks * mesh.ep > 1 or self.parallel.sharding != Sharding()
        divided |= self.execution.offload
        every = None if world is None else partial(world.gather, over="run")
        if is_measured(split):
            run_each(partial(_require_values, self.layers), every)
        split = resolve_split(
            split,
            self.layers,
            loss_fn,
            self.schedule,
            world=world,
            seed=self.seed,
            autocast=autocast,
            devices=self.devices or ([] if self.device is None else [self.device]),
            recompute=None if divided else recompute,
        )
        stages = split_layers(self.layers, self.schedule.stages, split)
        stages_of = self.schedule.placement.stages_of
        own = [layer for r in self.local_ranks for stage in stages_of[r] for layer in stages[stage]]
        run_each(partial(_require_values, own), every)
        return stages

    def _make_layer_check(
        self, layers_of_stages: Sequence[Sequence[Layer]], loss_fn: LossFunction, autocast: torch.dtype | None
    ) -> FirstStepCheck | None:
        """Return the check of layers that were not compared with their model; made before axes divide them."""
        layers = self.layers
        if not (self.execution.check_split and isinstance(layers, ModelLayers) and layers.unchecked):
            return None
        return FirstStepCheck(
            layers,
            loss_fn,
            stages=[s for s, stage in enumerate(layers_of_stages) for _ in stage],
            world=self.world,
            checker=self.schedule.placement.holders[-1][0],
            autocast=autocast,
        )

    def _make_stages(
        self,
        program: Program,
        layers_of_stages: Sequence[Sequence[Layer]],
        loss_fn: LossFunction,
        settings: Settings,
        own_names: Sequence[str],
    ) -> LocalStages:
        return LocalStages(
            program,
            layers_of_stages,
            local_ranks=self.local_ranks,
            device=self.device,
            devices=self.devices,
            loss_fn=loss_fn,
            settings=settings,
            compile=self.execution.compile,
            world=self.world,
            options=self.parallel,
            own_names=own_names,
        )

    def _make_engine(self, program_of: Callable[[int], Program]) -> Engine:
        return Engine(
            self._local,
            program_of,
            local_ranks=self.local_ranks,
            timeout=Timeout(self.timeout, self.execution.first_timeout),
            world=self.world,
            device=self.device,
            replicas=self.replicas,
            options=self.parallel,
            threads=self.threads,
        )

    def _make_splitter(self, loss: GivenLoss, dims: Mapping[str, object] | None) -> BatchSplitter:
        holders = self.schedule.placement.holders
        # No other process takes a part of it: with copies of stages, several have both ends.
        alone = {*holders[0], *holders[-1]} == {self.rank} and self.replicas * self.tensor_ranks == 1
        ignore_index = ignore_index_of(loss.function, self.reduction)
        return BatchSplitter(
            replicas=self.replicas,
            sample_parts=self._sample_parts,
            shifts=loss.shifts,
            device=self.device,
            reduction=self.reduction,
            ignore_index=ignore_index,
            counts=counted_by(loss.function, ignore_index),
            routes=self._local.routes,
            holds_first=self.holds_first,
            holds_last=self.holds_last,
            compares=self.in_processes and not alone,
            takes_target=not isinstance(loss.function, OutputLoss),
            dims=BatchDims.given(dims, self.layers[0].batch, self._local.routes),
        )

    def _make_first_step(
        self,
        of_layers: FirstStepCheck | None,
        loss_fn: LossFunction,
        parameters: LocalParameters,
        autocast: torch.dtype | None,
    ) -> FirstStep:
        of_rows = None
        if self.execution.check_split:
            dtypes = [autocast, *(p.dtype for m in self._local.modules.values() for p in m.parameters())]
            of_rows = RowCheck(
                self._local.modules,
                loss_fn,
                world=self.world,
                reduction=self.reduction,
                itemsize=min([4, *(d.itemsize for d in dtypes if d is not None and d.is_floating_point)]),
            )
        return FirstStep(
            self._engine,
            self._local,
            self._splitter,
            parameters=parameters,
            random=self._random,
            layers=of_layers,
            rows=of_rows,
            memory=self.execution.memory,
            replicas=self.replicas,
        )


def _require_values(layers: Iterable[Layer]) -> None:
    require_values((layer.name, layer.module) for layer in layers if layer.module is not None)
