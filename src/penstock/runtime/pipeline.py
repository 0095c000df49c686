"""The user's object: a model, a loss and a schedule become a pipeline that takes whole batches.

This is the one place where the three foundations meet: `schedule` (order), `stage` (work), `parallel` (copies).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from penstock.errors import PenstockError
from penstock.parallel.data.layout import BUCKET_BYTES
from penstock.parallel.mesh import MeshShape
from penstock.runtime.batch.result import StepResult, step_result
from penstock.runtime.batch.splitter import Cut, Cutter, Reduction, require_no_graph, require_reduction
from penstock.runtime.copies.buffers import Rule
from penstock.runtime.engine import Engine
from penstock.runtime.local_stages import LocalStages, TensorOptions
from penstock.runtime.optim import grad_norm as norms
from penstock.runtime.validation import (
    LossScale,
    local_device,
    make_copy_options,
    make_settings,
    require_bucket_bytes,
    require_count,
    require_loss,
    require_loss_without_parameters,
    require_seed,
    require_timeout,
    resolve_mesh,
    resolve_schedule,
)
from penstock.runtime.weights.parameters import LocalParameters
from penstock.runtime.weights.replicas import BucketBytes
from penstock.runtime.workers.timeout import FIRST_TIMEOUT, Timeout
from penstock.runtime.workers.world import current_world
from penstock.schedule.check import check
from penstock.schedule.schedule import Schedule
from penstock.stage.compute.recompute import Policy
from penstock.stage.compute.runner import LossFunction
from penstock.stage.layers import Container, as_layers
from penstock.stage.module import StageModule
from penstock.stage.rng.random_state import RandomState
from penstock.stage.split import Split, split_layers
from penstock.trace.events import Trace

T = TypeVar("T")


class Pipeline:
    """A model cut into stages and trained by a schedule.

    In one process the ranks are threads and use the model's own parameters. Where RANK and WORLD_SIZE are set
    (torchrun, Slurm), or ``torch.distributed`` is initialised, every process is a rank and builds and holds its own
    stages only.

    Args:
        model: an ``nn.Sequential``; or a list of layers, as `penstock.stage.layers.as_layers` takes it.
        loss_fn: ``loss_fn(output, target)``: a scalar tensor, the mean over its microbatch; or a dictionary of several.
        microbatches: into how many the batch is cut along dimension 0.
        schedule: a family of the catalogue, a `Schedule`, or the path of a CSV file.
        ranks: pipeline ranks. By default the schedule's own, the number of processes, or 1.
        virtual_stages: stages a rank, for the families that let one choose; V-shaped ones always have two.
        split: which layers make up which stage; see `penstock.stage.split.split_layers`.
        device: where the stages, and each batch, are moved; by default nothing is. In processes "cuda" is LOCAL_RANK's GPU.
        timeout: the longest any wait between ranks may last, in seconds; a rank that hangs is found by it.
        first_timeout: the same until the first training step is done, and in the first evaluation: they compile and import.
        reduction: how the microbatches' losses make the step's, and with it the gradients: "mean" weighs each by its
            rows, "sum" adds them, and a function of a microbatch's target weighs each by what it counts (valid tokens),
            so that the gradient is that of the whole batch however uneven the microbatches are.
        recompute: which layers keep only their inputs and run again before their backward: "none", "full" (every one),
            k (every k-th of a stage), or "auto": as few as `memory` allows, found on the first step.
        memory: with "auto", bytes of activations a rank may hold.
        offload: keep what is saved for the backward in host memory (for stages on a GPU).
        autocast: torch.bfloat16 or torch.float16 for mixed precision in the stages and the loss.
        seed: of layers given as functions, and of the random numbers that layers draw (dropout): both depend on it, on the
            layer's name, and the latter on step and microbatch, and not on the split.
        check_finite: refuse a step in which a loss or a gradient is NaN or infinite; on a GPU a step then ends by waiting.
        compile: "block" gives every layer to ``torch.compile``, "stage" every stage's layers together.
        mesh: several such pipelines side by side (dp), each with matrices cut over processes (tp); a step then takes the
            global batch, dp * microbatches microbatches, on every process, and each pipeline does its part.
        family, sequence_parallel: which model it is that is cut, and whether also along the sequence; see
            `penstock.parallel.tensor.plan.tensor_parallel`.
        bucket_bytes: gradients are reduced over the pipelines in buckets of so many bytes, while the backward runs. "auto"
            chooses for each stage after the second step: one bucket where the reduction hides, more where it shows.
        buffers: what to do where copies of a stage change a persistent buffer differently, other than the statistics of
            batch normalisation, which are joined: "refuse", or take the "mean" or the "first"; see `BufferCopies`.
        check_replicas: every so many steps the copies' parameters and buffers are compared; 0 never.
        strict: refuse a layer whose backward cannot be split with the same gradients, instead of running its full backward.

    Attributes:
        replicas, replica: how many pipelines share the batch, and which this is.
        world: the processes it is one of; None for threads of a single one.
        tensor_ranks: how many processes share this one's matrices.
        is_first: whether this is the mesh's first pipeline, with the first parts of cut matrices.
        reduce_gradients: set to False, steps leave their gradients to be reduced with those of a later one.
        steps: training steps done; random numbers in layers depend on it, so set it when a run continues.
        scaler: a `GradScaler` for float16, or None; its ``scale`` multiplies the loss, and it looks for NaN and infinity.

    Raises:
        ConfigError: something that cannot be used; the subclass says what (`ScheduleError`, `SplitError`).
    """

    def __init__(
        self,
        model: object,
        loss_fn: LossFunction,
        *,
        microbatches: int,
        schedule: str | Path | Schedule = "1f1b",
        ranks: int | None = None,
        virtual_stages: int = 1,
        split: Split = "even",
        device: torch.device | str | None = None,
        timeout: float = 60.0,
        first_timeout: float = FIRST_TIMEOUT,
        reduction: Reduction = "mean",
        recompute: Policy = "none",
        memory: int | None = None,
        offload: bool = False,
        autocast: torch.dtype | None = None,
        compile: str = "none",
        seed: int = 0,
        check_finite: bool = True,
        mesh: MeshShape | None = None,
        family: str = "penstock",
        sequence_parallel: bool = False,
        bucket_bytes: BucketBytes = BUCKET_BYTES,
        buffers: Rule = "refuse",
        check_replicas: int = 100,
        strict: bool = False,
    ) -> None:
        require_count("microbatches", microbatches)
        require_count("virtual_stages", virtual_stages)
        require_count("ranks", 1 if ranks is None else ranks)
        self.bucket_bytes = require_bucket_bytes(bucket_bytes)
        self.timeout = require_timeout(timeout)
        waits = Timeout(self.timeout, require_timeout(first_timeout, "first_timeout"))
        require_loss(loss_fn)
        self._random = RandomState(require_seed(seed))
        self.seed = self._random.seed
        self.mesh = mesh
        settings = make_settings(recompute, memory, offload, autocast, self._random, strict)
        copy_options = make_copy_options(buffers, check_replicas)
        self.reduction = require_reduction(reduction)
        world = current_world()
        ranks, processes = resolve_mesh(mesh, ranks, world)
        self.schedule = resolve_schedule(schedule, ranks, microbatches, virtual_stages, processes)
        require_loss_without_parameters(loss_fn, self.schedule, mesh)
        self.microbatches = microbatches
        self.ranks = self.schedule.ranks
        self.steps = 0
        self._check_finite = check_finite
        self.scaler: LossScale | None = None
        program = check(self.schedule).program
        self.layers = as_layers(model)
        runs = split_layers(self.layers, self.schedule.stages, split)
        self.in_processes = processes is not None
        self.device = local_device(device, self.in_processes)
        self.world = (
            world.join(self.timeout, mesh, waits.first) if world is not None and self.in_processes else None
        )
        self.rank = self.world.rank if self.world is not None else 0
        self.local_ranks = [self.rank] if self.in_processes else list(range(self.ranks))
        self.replicas, self.tensor_ranks = (1, 1) if mesh is None else (mesh.dp, mesh.tp)
        self.replica = 0
        if self.world is not None and self.world.mesh is not None:
            self.replica = self.world.mesh.coordinate("dp")
        self.is_first = self.world is None or self.world.is_first
        self.reduce_gradients = True
        self._parts = LocalStages(
            self.schedule,
            program,
            runs,
            self.local_ranks,
            self.device,
            loss_fn,
            settings,
            compile,
            self.world,
            TensorOptions(family, sequence_parallel),
            self.bucket_bytes,
        )
        self.stages = self._parts.own_stages
        self.holds_first, self.holds_last = 0 in self.stages, self.schedule.stages - 1 in self.stages
        self._holdings = LocalParameters(
            self.layers,
            self.stages,
            self.schedule.placement,
            self._parts.ties,
            self.rank if self.in_processes else None,
        )
        self._engine = Engine(
            self._parts, self.local_ranks, waits, self.world, self.device, self.replicas, copy_options
        )
        self._container = Container(model)
        self._memory = memory if recompute == "auto" else None
        self._places: tuple[dict[str, int], int] | None = None

    def step(
        self,
        x: object,
        y: object = None,
        *,
        outputs: bool = False,
        input_grads: bool = False,
        **named: object,
    ) -> StepResult:
        """Forward and backward of every microbatch of a batch; gradients accumulate in ``.grad``.

        Gradients are those of the mean over microbatches of `loss_fn` (or as `reduction` says), and bit-identical (fp32,
        CPU, equal thread count) to plain PyTorch running ``(loss_fn(model(x_i), y_i) / microbatches).backward()`` in order.

        Args:
            x: the model's input: a tensor, or tensors in tuples, lists and dicts, batch first; or `Microbatches`. In
                processes only the first stage's rank needs it.
            y: the target, likewise; in processes only the last stage's rank needs it.
            outputs: also return the last stage's outputs.
            input_grads: also return the gradients of the floating-point inputs.
            named: keyword inputs, cut like `x`: each goes to the layers whose forward has a parameter of that name.

        Raises:
            BatchError: the batch cannot be cut, does not fit the layers, or requires a gradient; nothing has run.
            NonFiniteError: a loss or a gradient is NaN or infinite; names stage and microbatch.
            StageError: a stage's own code failed, here or on another rank (then a `PeerError`).
        """
        return self._run(True, x, y, outputs, input_grads, named)

    def evaluate(self, x: object, y: object = None, *, outputs: bool = False, **named: object) -> StepResult:
        """Forward only, in eval mode and without gradients. Arguments as for `step`; without `y` there is no loss."""
        self._require_open()
        self._engine.follow_modules()
        modes = [(module, module.training) for part in self._modules() for module in part.modules()]
        for module, _ in modes:
            module.training = False
        try:
            return self._run(False, x, y, outputs, False, named)
        finally:
            for module, mode in modes:
                module.training = mode

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name in the whole model, parameter), in model order; in processes this rank's own."""
        self._engine.wait_for_parameters()
        return self._holdings.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters this process holds: in threads all of the model's."""
        for _, parameter in self.named_parameters():
            yield parameter

    def rank_parameters(self, rank: int) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter) of those that one of the `local_ranks` updates: each of the model's on exactly one."""
        self._engine.wait_for_parameters()
        return self._holdings.of_rank(rank)

    def updated(self, rank: int) -> list[nn.Parameter]:
        """What has the gradients of a rank's parameters after a step: they themselves, or pieces of them (ZeRO)."""
        shards = self._engine.shards
        return shards.owned() if shards is not None else [p for _, p in self._holdings.of_rank(rank)]

    def state_dict(self) -> dict[str, Any]:
        """Parameters and buffers by their names in the whole model; in processes this rank's own."""
        self._engine.wait_for_parameters()
        return self._holdings.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load parameters and buffers by whole-model name; entries of stages held elsewhere are left alone.

        Raises:
            ConfigError: an entry of a stage held here is missing or has another shape, or no layer has the name. Nothing
                is loaded then.
        """
        self._engine.wait_for_parameters()
        self._holdings.load_state_dict(state)

    def train(self, mode: bool = True) -> Pipeline:
        """Set the stages' training mode, as ``nn.Module.train`` does."""
        for module in self._modules():
            module.train(mode)
        return self

    def eval(self) -> Pipeline:
        """Set evaluation mode, as ``nn.Module.eval`` does."""
        return self.train(False)

    def _modules(self) -> list[StageModule]:
        """Every stage's module that runs in this process, copies included."""
        return [
            s.module for part in (self._parts, *self._engine.thread_replicas) for s in part.stages.values()
        ]

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their global 2-norm is at most `max_norm`.

        Returns:
            The norm over all stages before scaling: the same number on every rank, whatever the split, and what
            ``torch.nn.utils.clip_grad_norm_`` gives for the unsplit model.
        """
        if self._places is None:
            self._places = self._holdings.places(self.world)
        places, count = self._places
        shards = self._engine.shards
        held = norms.held(self._holdings, shards, places)
        return norms.clip_(held, max_norm, count, self.world, divided=shards is not None)

    def on_ranks(self, job: Callable[[int], T]) -> list[T]:
        """Call ``job(rank)`` once for each of the `local_ranks`, on that rank's own thread, and wait for all.

        Returns:
            What the calls returned, in the order of the ranks. What one of them raised is raised here.
        """
        self._require_open()
        return self._engine.on_ranks(job)

    def sum_over_ranks(self, values: Tensor, replicas: bool = False) -> Tensor:
        """The sum of a float64 tensor over the processes of this pipeline, or those of all replicas, which all call it.

        The tensor itself if there is one process.
        """
        if self.world is None:
            return values
        total = values.clone()
        self.world.add_up_tensor_parallel(total)
        self.world.add_up(total)
        if replicas:
            self.world.add_up_replicas(total)
        return total

    def trace(self) -> Trace | None:
        """What the last step did and when: all ranks in threads, this rank's part in processes; None before the first."""
        return self._engine.trace()

    def gather_trace(self) -> Trace | None:
        """What all ranks did in the last step; in processes every one of the pipeline calls it, between two steps.

        Returns:
            The same on every process: what each recorded, on one clock; ``info["clock_error"]`` is how far the times of two
            ranks can be off, in seconds. In threads what `trace` returns; None before the first step.
        """
        self._require_open()
        return self._engine.gather_trace()

    def close(self) -> None:
        """End the threads or the connections; may be called twice. The model stays as it is.

        A pipeline that is dropped without it ends its threads, too; connections to other processes end with this one.
        """
        self._engine.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._engine.closed:
            raise PenstockError("this pipeline is closed; build a new one")

    def _run(
        self,
        trains: bool,
        x: object,
        y: object,
        outputs: bool,
        input_grads: bool,
        named: Mapping[str, object],
    ) -> StepResult:
        self._require_open()
        if trains and self._engine.shards is not None:
            self._engine.shards.require_used()
        finite, reduces = self._check_finite and self.scaler is None, self.reduce_gradients
        with self._random.watching():
            works = self._engine.run(
                trains,
                lambda n: self._cut(trains, x, y, named, self.replica + n, input_grads),
                lambda cut: cut.work(outputs, input_grads, finite, self.steps, reduces),
            )
        self.steps += trains
        if trains and self._memory is not None:
            self._engine.choose_recompute(self._memory)
            self._memory = None
        return step_result(works, self.microbatches * self.replicas)

    def _cut(
        self, trains: bool, x: object, y: object, named: Mapping[str, object], replica: int, input_grads: bool
    ) -> Cut:
        if trains:
            self._container.require_unchanged()
            require_no_graph({"y": y, **named} if input_grads else {"x": x, "y": y, **named})
        cutter = Cutter(
            self.microbatches, self.replicas, replica, self.device, self.reduction, self._parts.wires
        )
        scale = self.scaler.scale if self.scaler is not None and trains else 1.0
        return cutter.cut(x, y, named, self.holds_first, self.holds_last, trains, scale)
