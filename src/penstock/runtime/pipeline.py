"""The user's object: a model, a loss and a schedule become a pipeline that takes whole batches.

This is the one place where the three foundations meet: `schedule` (order), `stage` (work), `parallel` (copies).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from penstock.errors import BatchError, ConfigError, PenstockError
from penstock.runtime import norms
from penstock.runtime.copies import Copies, alias, equalise
from penstock.runtime.crew import Crew
from penstock.runtime.executor import Executor, Work
from penstock.runtime.holdings import Holdings
from penstock.runtime.recorder import measured_trace
from penstock.runtime.setup import (
    local_device,
    require_count,
    require_runnable,
    require_untied,
    resolve_schedule,
)
from penstock.runtime.streams import Streams
from penstock.runtime.transport.base import Channel, Failure
from penstock.runtime.transport.threads import thread_channels
from penstock.runtime.world import World, current_world
from penstock.schedule.check import check
from penstock.schedule.program import Program
from penstock.schedule.schedule import Schedule
from penstock.stage.layers import as_layers
from penstock.stage.split import Split, split_layers
from penstock.stage.stage import LossFunction, Stage, StageModule
from penstock.stage.values import slices
from penstock.trace.events import Trace

T = TypeVar("T")


@dataclass(frozen=True)
class StepResult:
    """What a step gives back.

    Attributes:
        loss: 0-d tensor, the mean of the microbatches' losses; the same number on every rank. None from an
            evaluation without targets.
        losses: shape (microbatches,), by microbatch id; the same on every rank.
        outputs: the last stage's outputs by microbatch id, if asked for and this process holds the last stage.
        input_grads: the gradients of the inputs by microbatch id, if asked for and this process holds the first
            stage: a tensor, or a tuple with one for each floating-point leaf of the input.
    """

    loss: Tensor | None
    losses: Tensor | None
    outputs: tuple[Any, ...] | None = None
    input_grads: tuple[Any, ...] | None = None


class Pipeline:
    """A model cut into stages and trained by a schedule.

    In one process the ranks are threads and use the model's own parameters. Where RANK and WORLD_SIZE are set
    (torchrun, Slurm), or ``torch.distributed`` is initialised, every process is a rank and builds and holds its own
    stages only.

    Args:
        model: an ``nn.Sequential``; or a list of layers, of functions that build them, or of (name, layer) pairs.
        loss_fn: ``loss_fn(output, target)``, a scalar tensor, the mean over its microbatch.
        microbatches: into how many the batch is cut along dimension 0.
        schedule: a family of the catalogue, a `Schedule`, or the path of a CSV file.
        ranks: pipeline ranks. By default the schedule's own, the number of processes, or 1.
        virtual_stages: stages a rank, for the families that let one choose; families that always have two (V, waves)
            have two.
        split: which layers make up which stage; see `penstock.stage.split.split_layers`.
        device: where the stages, and each batch, are moved; by default everything stays where it is. In processes
            "cuda" is the GPU of LOCAL_RANK, and messages go through NCCL.
        timeout: the longest any wait between ranks may last, in seconds.

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
    ) -> None:
        require_count("microbatches", microbatches)
        require_count("virtual_stages", virtual_stages)
        if ranks is not None:
            require_count("ranks", ranks)
        if not (isinstance(timeout, int | float) and math.isfinite(timeout) and timeout > 0):
            raise ConfigError(f"timeout must be a positive number of seconds, not {timeout!r}")
        if not callable(loss_fn):
            raise ConfigError(f"loss_fn must be callable as loss_fn(output, target), not {loss_fn!r}")
        world = current_world()
        self.schedule = resolve_schedule(schedule, ranks, microbatches, virtual_stages, world)
        self.microbatches = microbatches
        self.timeout = float(timeout)
        self.ranks = self.schedule.ranks
        require_runnable(self.schedule)
        self._train_program = check(self.schedule).program
        self._evaluate_program: Program | None = None
        self.layers = as_layers(model)
        runs = split_layers(self.layers, self.schedule.stages, split)
        self.in_processes = world is not None and world.size > 1
        self.rank = world.rank if world is not None and self.in_processes else 0
        self.local_ranks = [self.rank] if self.in_processes else list(range(self.ranks))
        local = sorted({s for r in self.local_ranks for s in self.schedule.placement.stages_of[r]})
        self.device = local_device(device, self.in_processes)
        last = self.schedule.stages - 1
        holders = self.schedule.placement.holders

        def stage(s: int, module: StageModule) -> Stage:
            return Stage(s, module, loss_fn if s == last else None, microbatches)

        self.stages = {s: stage(s, StageModule(runs[s], self.device)) for s in local}
        # In threads a stage's further copies share the first one's memory; in processes each has its own.
        self._copies = {
            (rank, s): stage(s, alias(self.stages[s].module))
            for s in local
            for rank in ([] if self.in_processes else holders[s][1:])
        }
        self.holds_first, self.holds_last = 0 in self.stages, last in self.stages
        require_untied(self.stages)
        self._holdings = Holdings(
            self.layers, self.stages, self.schedule.placement, self.rank if self.in_processes else None
        )
        self._world: World | None = None
        self._crew: Crew | None = None
        self._streams: Streams | None = None
        if self.in_processes:
            assert world is not None
            on_cpu = self.device is None or self.device.type == "cpu"
            self._world = world.connect(self._train_program, self.timeout, None if on_cpu else self.device)
            assert self._world.channel is not None
            equalise(self.stages, self.schedule.placement, self.rank, self._world.channel)
        elif self.ranks > 1:
            of_rank = self.schedule.placement.stages_of
            self._streams = Streams.of(
                [[self.stages[s].module for s in of_rank[r]] for r in self.local_ranks]
            )
            self._crew = Crew(self.ranks, self.timeout, self._streams)
        self._executors: dict[bool, list[Executor]] = {}
        self._places: tuple[dict[str, int], int] | None = None
        self._step = 0
        self._closed = False
        self._failed = False
        self._traced: list[Executor] | None = None

    def step(
        self, x: object, y: object = None, *, outputs: bool = False, input_grads: bool = False
    ) -> StepResult:
        """Forward and backward of every microbatch of a batch; gradients accumulate in ``.grad``.

        Gradients are those of the mean over microbatches of `loss_fn`, and bit-identical (fp32, CPU, equal thread
        count) to plain PyTorch running ``(loss_fn(model(x_i), y_i) / microbatches).backward()`` in order.

        Args:
            x: the model's input: a tensor, or tensors in tuples, lists and dicts, batch first. In processes only the
                first stage's rank needs it.
            y: the target, likewise; in processes only the last stage's rank needs it.
            outputs: also return the last stage's outputs.
            input_grads: also return the gradients of the floating-point inputs.

        Raises:
            BatchError: a batch that does not divide into the microbatches; nothing has run.
            StageError: a stage's own code failed, here or on another rank (then a `PeerError`).
        """
        return self._run(True, x, y, outputs, input_grads)

    def evaluate(self, x: object, y: object = None, *, outputs: bool = False) -> StepResult:
        """Forward only, in eval mode and without gradients; modes are as before afterwards.

        Args:
            x, y, outputs: as for `step`; without `y` there is no loss.
        """
        modes = [(module, module.training) for part in self._modules() for module in part.modules()]
        for module, _ in modes:
            module.training = False
        try:
            return self._run(False, x, y, outputs, False)
        finally:
            for module, mode in modes:
                module.training = mode

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name in the whole model, parameter), in model order; in processes this rank's own."""
        return self._holdings.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters this process holds: in threads all of the model's."""
        for _, parameter in self.named_parameters():
            yield parameter

    def rank_parameters(self, rank: int) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter) of those that one of the `local_ranks` updates: each of the model's on exactly one."""
        return self._holdings.of_rank(rank)

    def state_dict(self) -> dict[str, Any]:
        """Parameters and buffers by their names in the whole model; in processes this rank's own."""
        return self._holdings.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load parameters and buffers by whole-model name; entries of stages held elsewhere are left alone.

        Raises:
            ConfigError: an entry of a stage held here is missing or has another shape, or no layer has the name. Nothing
                is loaded then.
        """
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
        return [stage.module for stage in (*self.stages.values(), *self._copies.values())]

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their global 2-norm is at most `max_norm`.

        Returns:
            The norm over all stages before scaling: the same number on every rank, whatever the split, and what
            ``torch.nn.utils.clip_grad_norm_`` gives for the unsplit model.
        """
        if self._places is None:
            self._places = self._holdings.places(self._world)
        places, count = self._places
        parameters = [(places[name], p, counts) for name, p, counts in self._holdings.counted()]
        return norms.clip_(parameters, max_norm, count, self._world)

    def on_ranks(self, job: Callable[[int], T]) -> list[T]:
        """Call ``job(rank)`` once for each of the `local_ranks`, on that rank's own thread, and wait for all.

        Returns:
            What the calls returned, in the order of the ranks. What one of them raised is raised here.
        """
        self._require_open()
        if self._crew is None:
            return [job(rank) for rank in self.local_ranks]
        found: dict[int, T] = {}
        jobs = [lambda r=r: found.__setitem__(r, job(r)) for r in self.local_ranks]
        self._crew.run(jobs, lambda: None)
        return [found[rank] for rank in self.local_ranks]

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """The sum of a float64 tensor over the processes, which all call it; the tensor itself if there is one."""
        if self._world is None:
            return values
        total = values.clone()
        self._world.add_up(total)
        return total

    def trace(self) -> Trace | None:
        """What the last step did and when: all ranks in threads, this rank's part in processes."""
        return measured_trace(self._traced) if self._traced else None

    def close(self) -> None:
        """End the threads or the connections; may be called twice. The model stays as it is."""
        if self._closed:
            return
        self._closed = True
        self._executors.clear()
        if self._crew is not None:
            self._crew.close()
        if self._world is not None:
            self._world.disconnect(failed=self._failed)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise PenstockError("this pipeline is closed; build a new one")

    def _run(self, trains: bool, x: object, y: object, outputs: bool, input_grads: bool) -> StepResult:
        self._require_open()
        self._step += 1
        self._failed = True
        executors = self._ready(trains)
        try:
            inputs, targets = self._cut(trains, x, y)
        except BatchError as error:
            for executor in executors if self.in_processes else ():
                if executor.channel is not None:
                    executor.channel.open(self._step)
                    executor.channel.fail(Failure(executor.rank, self._step, str(error)))
            raise
        works = [Work(inputs, targets, outputs, input_grads) for _ in executors]
        try:
            if self._crew is None:
                executors[0].run(self._step, works[0])
            else:
                step = self._step
                jobs = [lambda e=e, w=w: e.run(step, w) for e, w in zip(executors, works, strict=True)]
                self._crew.run(jobs, lambda: _interrupt(executors, step))
        except BaseException:
            if not self.in_processes:
                # Half-delivered messages of the failed step stay in its channels; the next step gets new ones.
                self._executors.clear()
            raise
        self._failed = False
        self._traced = executors
        return self._result(works)

    def _ready(self, trains: bool) -> list[Executor]:
        if trains not in self._executors:
            if trains:
                program = self._train_program
            else:
                if self._evaluate_program is None:
                    self._evaluate_program = check(self.schedule.forwards(), forward_only=True).program
                program = self._evaluate_program
            channels: list[Channel | None]
            if self._world is not None:
                channels = [self._world.channel]
            elif self.ranks > 1:
                channels = list(thread_channels(program, self.timeout, self._streams))
            else:
                channels = [None]
            self._executors[trains] = [
                self._executor(program, rank, channel)
                for rank, channel in zip(self.local_ranks, channels, strict=True)
            ]
        return self._executors[trains]

    def _executor(self, program: Program, rank: int, channel: Channel | None) -> Executor:
        placement = self.schedule.placement
        stages = {s: self._copies.get((rank, s), self.stages[s]) for s in placement.stages_of[rank]}
        copies = None
        if placement.has_copies and channel is not None and program is self._train_program:
            copies = Copies(program, rank, stages, channel, one_memory=not self.in_processes)
        return Executor(program, rank, stages, channel, copies)

    def _cut(self, trains: bool, x: object, y: object) -> tuple[list[object], list[object]]:
        m = self.microbatches
        inputs: list[object] = []
        targets: list[object] = []
        if self.holds_first:
            if x is None:
                raise BatchError("the rank of the first stage needs the input x")
            inputs = slices(x, m, "the input x", self.device)
        if self.holds_last:
            if y is None and trains:
                raise BatchError("the rank of the last stage needs the target y")
            targets = slices(y, m, "the target y", self.device) if y is not None else []
        return inputs, targets

    def _result(self, works: list[Work]) -> StepResult:
        losses: dict[int, Tensor] = {}
        outputs: dict[int, object] = {}
        grads: dict[int, Any] = {}
        for work in works:
            losses.update(work.losses)
            outputs.update(work.outputs)
            grads.update(work.grads)
        order = range(self.microbatches)
        values = torch.stack([losses[n] for n in order]) if losses else None
        return StepResult(
            values.mean() if values is not None else None,
            values,
            tuple(outputs[n] for n in order) if outputs else None,
            tuple(g[0] if len(g := grads[n].leaves) == 1 else g for n in order) if grads else None,
        )


def _interrupt(executors: list[Executor], step: int) -> None:
    for executor in executors:
        if executor.channel is not None:
            executor.channel.fail(Failure(executor.rank, step, "the step was interrupted"))
