"""Engine of a Pipeline: runs steps on the ranks' executors, in threads or over connections to other processes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial, reduce
from operator import or_
from typing import Literal, TypeVar

import torch
from torch import distributed as dist
from torch import nn

from penstock.base.counts import require_count
from penstock.base.errors import CallOrderError, PenstockError, TransportError
from penstock.parallel.participant import require_same_number
from penstock.parallel.replicas.exchange import run_each
from penstock.parallel.replicas.shards import Shards
from penstock.runtime.batch.work import LocalBatch, Refused, StepOptions, Work
from penstock.runtime.consensus import require_graph
from penstock.runtime.copies.copies import Copies
from penstock.runtime.executor import Executor
from penstock.runtime.gather_trace import gather_trace, measured_trace
from penstock.runtime.gradient_scale import GradientScale
from penstock.runtime.health.hang import HangDetector, Timeout, Watchdog
from penstock.runtime.health.rank_progress import END, ROW, WAITS, rows_of
from penstock.runtime.local_stages import LocalStages
from penstock.runtime.options import ParallelOptions
from penstock.runtime.transport.channel import Channel, Failure
from penstock.runtime.transport.streams import Streams
from penstock.runtime.transport.threads import thread_channels
from penstock.runtime.weights.shared import broadcast_shared
from penstock.runtime.workers.rank_threads import RankThreads
from penstock.runtime.workers.world import World
from penstock.schedule.ops import Kind, Op
from penstock.schedule.program import Program
from penstock.stage.module import StageModule
from penstock.trace.events import Trace
from penstock.trace.expert_load import ExpertLoad, join_loads

T = TypeVar("T")

Probe = Callable[[int, Op, Callable[[], None]], Callable[[], None]]
"""Function from a rank, one of its ops and the function that runs it to the function that runs instead."""

KEPT = 4
"""Numbers of microbatches whose programs and executors are kept."""


class Engine:
    """The part of a pipeline that runs the steps of this process's ranks.

    Args:
        program_of: function from another number of microbatches to its checked program.
        timeout: longest wait between threads; between processes the timeout of `world` counts.
    """

    def __init__(
        self,
        local_stages: LocalStages,
        program_of: Callable[[int], Program],
        *,
        local_ranks: Sequence[int],
        timeout: Timeout,
        world: World | None,
        device: torch.device | None,
        replicas: int,
        options: ParallelOptions,
        threads: int,
    ) -> None:
        self.local_stages = local_stages
        self.local_ranks = local_ranks
        self.timeout = world.timeout if world is not None else timeout
        self.closed = False
        self._world = world
        self._rank_threads: RankThreads | None = None
        self._watch: Watchdog | None = None
        self._streams: Streams | None = None
        self._program_of = program_of
        self._first = local_stages.schedule.microbatches
        # By number of microbatches, the one that was used last at the end.
        self._programs = {self._first: local_stages.programs}
        self._wraps: list[Callable[[int, Callable[[], None]], Callable[[], None]]] = []
        self._step = 0
        self._status: Literal["idle", "stepping", "failed"] = "idle"
        self._late = LateRanks()
        self._traced: list[Executor] | None = None
        if world is not None:
            self._connect(world, device)
        elif local_stages.schedule.ranks > 1:
            self._start_threads(threads)
        # Once connected, holders of one stage have the first holder's values, which `Copies` notes as equal.
        self._lending = local_stages.lending
        with self._lending.in_place():
            self._copies = Copies(local_stages, world, replicas, options)
        local_stages.watch_copies(replicas)
        self._fixed = local_stages.fixed_modules(replicas)
        # Of all executors that train: the last step may have been another one's.
        self._scale = GradientScale(p for module in self.stage_modules() for p in module.parameters())

    def stage_modules(self) -> list[StageModule]:
        """Return the modules of all stages of this process, copies included."""
        return list(self.local_stages.modules.values())

    def _connect(self, world: World, device: torch.device | None) -> None:
        local_stages, rank = self.local_stages, world.rank
        gpu = None if device is None or device.type == "cpu" else device
        program = local_stages.programs.train
        channel = world.connect(program, local_stages.holders, gpu)
        detector = HangDetector(self.timeout, [channel.progress], [f"rank {rank}"], program)
        self._watch = Watchdog(world.peer_registry, detector)
        modules = {s: stage.module for s, stage in local_stages.stages_by_number.items()}
        broadcast_shared(local_stages.shared_groups[rank], modules, rank, channel)
        self.make_buckets()

    def _start_threads(self, threads: int) -> None:
        local_stages = self.local_stages
        stages_of = local_stages.schedule.placement.stages_of
        self._streams = Streams.of(
            [[local_stages.modules[rank, s] for s in stages_of[rank]] for rank in self.local_ranks],
            local_stages.devices,
        )
        self._rank_threads = RankThreads(len(self.local_ranks), self.timeout, self._streams, threads)
        if local_stages.random is not None:
            local_stages.random.in_threads = True

    @contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """Return a context for a call that all ranks make together, so that another call of one is named."""
        if self._world is None:
            yield
            return
        try:
            with self._world.peer_registry.calling(name), self.naming(name):
                yield
        except CallOrderError as error:
            if self._status == "idle":  # a step that runs tells them itself
                self._status = "failed"
                for executor in self._prepare(True, self._first):
                    executor.refuse(self._step + 1, error)
            raise
        except TransportError:
            if self._status == "idle":
                self._status = "failed"  # so that close does not wait again
            raise

    @contextmanager
    def naming(self, call: str) -> Iterator[None]:
        """Return a context in which the error of a connection that ends names the process that is gone.

        Torch makes some collectives itself, as where a tensor that is sharded becomes whole.
        """
        try:
            yield
        except RuntimeError as error:
            if self._world is None or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise
            raise self._world.collectives.connection_error(f"call {call}", error) from error

    def run_step(
        self, options: StepOptions, batch: LocalBatch | Refused, probe: Probe | None = None
    ) -> list[Work]:
        """Run one step on this process's ranks, and return their work with its results.

        Args:
            batch: this pipeline's share of the batch; or why this process has none, which the others are told.
            probe: ``probe(rank, op, run)`` returns what runs in place of ``run()``; the step is then of forwards of the
                first microbatches of the one before, and leaves its trace (default None).
        """
        trains, call = options.trains, options.call.value
        if self._status == "stepping":
            raise PenstockError(
                f"Pipeline.{call} was called while a step of the same pipeline is under way, by a layer, a hook, "
                "the loss function or another thread; call it between two steps"
            )
        with self.calling(f"pipe.{call}()"):
            # 1. May a step run, and are the copies of modules and parameters the same?
            self._require_idle(trains)
            self._copies.sync_parameters()
            # The forwards of a check are a part of the step that has just ended.
            self._step += probe is None
            self._status = "stepping"
            executors: Sequence[Executor] = ()
            try:
                with self._timeout_of_step(trains or options.probes):
                    self._copies.before_step(trains, self.shards)
                    # 2. The program for this number of microbatches, and each rank's share of the work.
                    executors = self._executors_for(options, batch, probe)
                    assert isinstance(batch, LocalBatch), "an error was raised"
                    batches = [self._batch_for(rank, batch) for rank in self.local_ranks]
                    works = [Work(batch=each, options=options) for each in batches]
                    # 3. The ops, the sums of gradients, and the agreement of all ranks on the outcome.
                    with self._lending.in_place():
                        self._run_ranks(executors, works)
                    # 4. What the step did to buffers reaches all copies.
                    self._copies.after_step(trains)
            except BaseException:
                self._step += probe is not None  # what its messages left is of an earlier step
                if trains and self._rank_threads is not None:
                    self._late.note(executors, self._rank_threads.at_work)
                self._copies.restore()
                if self._world is None:
                    # Half-delivered messages of the failed step stay in its channels; the next step gets new ones.
                    self._drop_executors()
                raise
            finally:
                self._status = "failed"  # a step that succeeded continues with the next line
            self._status = "idle"
            # 5. Did anything train?
            require_graph(reduce(or_, (work.flags for work in works)), self._step)
            if probe is None:
                self._traced = executors
            return works

    def _batch_for(self, rank: int, batch: LocalBatch) -> LocalBatch:
        """Return a batch with what a rank takes of it on its device, where threads have different ones."""
        devices, schedule = self.local_stages.devices, self.local_stages.schedule
        if not devices:
            return batch
        stages = schedule.placement.stages_of[rank]
        return batch.on_device(devices[rank], 0 in stages, schedule.stages - 1 in stages)

    def _executors_for(
        self, options: StepOptions, batch: LocalBatch | Refused, probe: Probe | None
    ) -> list[Executor]:
        """Return the executors of a step, or raise why this process cannot run it, and tell the others, who wait for it."""
        executors: list[Executor] = []
        try:
            self._require_same_number(options.microbatches)
            with self._lending.in_place():
                executors = (
                    self._prepare(options.trains, options.microbatches)
                    if probe is None
                    else self._prepare_probe(probe, options.microbatches)
                )
            self.take_written_parameters()
            if isinstance(batch, Refused):
                raise batch.take()
        except Exception as error:
            if self._world is not None:
                for executor in executors or self._prepare(options.trains, self._first):
                    executor.refuse(self._step, error, options.trains and options.reduces)
            raise
        return executors

    def _require_idle(self, trains: bool) -> None:
        if self._rank_threads is not None:
            self._rank_threads.wait_stopped()
        if trains:
            self._late.require_no_gradients()
        if self._world is None and self._fixed is not None:
            self._fixed.check(trains)  # in processes the executors check, and send a failure to the others

    def _run_ranks(self, executors: Sequence[Executor], works: Sequence[Work]) -> None:
        if self._rank_threads is None:
            executors[0].run(self._step, works[0])
            return

        def stop(why: str) -> None:
            for executor in executors:
                if executor.channel is not None:
                    executor.channel.fail(Failure(executor.rank, self._step, why))

        names = [f"rank {e.rank}" for e in executors]
        detector = HangDetector(self.timeout, [e.progress for e in executors], names, executors[0].program)
        jobs = [partial(e.run, self._step, w) for e, w in zip(executors, works, strict=True)]
        try:
            self._rank_threads.run(jobs, stop, detector)
        finally:
            self._copies.record_parameters()
            self._copies.record_modules()

    def sync_modules(self) -> None:
        """Apply changes of modules to their copies in other threads; see `ModuleCopies`."""
        self._copies.sync_modules()

    def record_modules(self) -> None:
        """Take modules as they are now for what their copies in other threads have; see `ModuleCopies`."""
        if self._rank_threads is not None:
            with self._lending.in_place():
                self._copies.record_modules()

    @contextmanager
    def _timeout_of_step(self, trains: bool) -> Iterator[None]:
        try:
            with self.timeout.step(trains):
                self._apply_timeout()
                yield
        finally:
            self._apply_timeout()

    def _apply_timeout(self) -> None:
        if self._world is not None:
            self._world.apply_timeout()
        if self.local_stages.replica_reduction is not None:
            self.local_stages.replica_reduction.set_timeout(self.timeout.seconds)

    def _require_same_number(self, microbatches: int) -> None:
        """Compare the number with the processes whose layers wait for this one's."""
        if self._world is not None and self._world.layers_wait:
            action = "compare their numbers of microbatches"
            require_same_number(self._world.gather(str(microbatches), "stage", action))

    def _prepare(self, trains: bool, microbatches: int) -> list[Executor]:
        """Return the executors for a number of microbatches, the same ones as the last time if they are still kept."""
        # Only whole numbers are looked up, since 4.0 and True equal some.
        programs = self._programs.pop(microbatches, None) if type(microbatches) is int else None
        if programs is None:
            require_count("microbatches", microbatches)
            programs = self.local_stages.programs_for(self._program_of(microbatches))
            if self._world is not None:
                self._world.widen(programs.train, self.local_stages.holders)
        self._programs[microbatches] = programs
        if len(self._programs) > KEPT:
            del self._programs[next(iter(self._programs))]
        if trains not in programs.executors:
            program = programs.train if trains else programs.evaluate
            programs.executors[trains] = self._make_executors(program, trains)
        return self._watched(programs.executors[trains])

    def _prepare_probe(self, probe: Probe, microbatches: int) -> list[Executor]:
        """Return executors of the first microbatches' forwards, which are not kept."""
        last_used = next(reversed(self._programs.values()))
        executors = self._make_executors(last_used.forwards(microbatches), False)
        for executor in executors:
            op = executor.program.schedule.op
            executor.ops = [(row, probe(executor.rank, op(row), run)) for row, run in executor.ops]
        return self._watched(executors)

    def _watched(self, executors: list[Executor]) -> list[Executor]:
        # An evaluation has rows of its own, by which the watchdog describes where the rank is.
        if self._watch is not None:
            self._watch.detector.program = executors[0].program
        return executors

    def _drop_executors(self) -> None:
        for programs in self._programs.values():
            programs.executors.clear()

    def _make_executors(self, program: Program, trains: bool) -> list[Executor]:
        local_stages = self.local_stages
        channels: Sequence[Channel | None] = [None]
        if self._world is not None:
            channels = [self._world.channel]
        elif local_stages.schedule.ranks > 1:
            channels = thread_channels(
                program, self.timeout, local_stages.holders, self._streams, local_stages.devices
            )
        fixed, scale = (None, None) if self._world is None else (self._fixed, self._scale)
        executors = [
            local_stages.executor(program, trains, rank, channel, fixed, scale)
            for rank, channel in zip(self.local_ranks, channels, strict=True)
        ]
        for executor in executors if trains else ():
            for wrap in self._wraps:
                executor.ops = [(row, wrap(executor.rank, op)) for row, op in executor.ops]
        return executors

    def make_buckets(self, zero: bool = False, whole: Collection[nn.Parameter] = ()) -> None:
        """Make the gradient buckets, or make them again; see `Pipeline.make_buckets`."""
        if self._world is not None and self._world.mesh is not None:
            # Their compiled ops refer to the reduction that is replaced.
            self._drop_executors()
            # Replicas compare their models, which the other ranks of each pipeline do not see.
            run_each(
                partial(self.local_stages.make_buckets, self._world, zero, whole),
                partial(self._world.gather, over="run", action="make buckets"),
            )

    @property
    def shards(self) -> Shards | None:
        """Shards of the parameters that this process updates, if replicas divide the update; otherwise None."""
        reduction = self.local_stages.replica_reduction
        return reduction.shards if reduction is not None else None

    def wait_for_parameters(self, whole: bool) -> None:
        """Wait for parameters that are being collected.

        Args:
            whole: have all of them in memory, also with sharded weights; every replica calls it then.
        """
        if self.shards is None:
            return
        if not whole or not self.sharded_weights:
            self.shards.wait_all()
            return
        with self.calling("pipe.gather_weights()"):
            self.shards.gather_all()

    def take_written_parameters(self) -> None:
        """Take over values that were written into parameters."""
        if self.shards is not None:
            self.shards.written()

    @property
    def sharded_weights(self) -> bool:
        """True if this process keeps a part of its weights between steps."""
        return self.shards is not None and self.shards.sharded_weights

    def drop_gradients(self) -> None:
        """Drop the gradients that replicas have divided."""
        if self.shards is not None:
            self.shards.drop()

    def on_ranks(self, job: Callable[[int], T]) -> list[T]:
        """Call ``job(rank)`` for each local rank, on its own thread; see `Pipeline.on_ranks`."""
        if self._rank_threads is None:
            return [job(rank) for rank in self.local_ranks]
        results: dict[int, T] = {}

        def run(rank: int) -> None:
            results[rank] = job(rank)

        # Such jobs send no messages, so there is no wait to end.
        self._rank_threads.run([partial(run, rank) for rank in self.local_ranks], lambda why: None)
        return [results[rank] for rank in self.local_ranks]

    def wrap_ops(self, wrap: Callable[[int, Callable[[], None]], Callable[[], None]]) -> Callable[[], None]:
        """Replace every op of a training step; see `Pipeline.wrap_ops`."""
        self._wraps.append(wrap)
        self._drop_executors()

        def undo() -> None:
            self._wraps.remove(wrap)
            self._drop_executors()

        return undo

    def choose_recompute(self, memory: int) -> None:
        """Choose the layers to recompute from now on, after the first step has measured all; every process calls it."""
        choose, world = partial(self.local_stages.choose_recompute, memory), self._world
        run_each(
            choose, partial(world.gather, over="run", action="choose what to recompute") if world else None
        )

    def trace(self) -> Trace | None:
        """Return the trace of the last step of this process's ranks; None before the first."""
        if not self._traced:
            return None
        if not all(executor.records.timed for executor in self._traced):
            raise PenstockError(
                "the last step was not timed, so it has no trace; set pipe.tracing = True before a step to look at, since "
                "on a GPU it costs each op two events"
            )
        trace, stages = measured_trace(self._traced), self.local_stages
        return replace(trace, info={**trace.info, "split": stages.split, "blocks": stages.blocks})

    def gather_trace(self, local: Trace | None) -> Trace | None:
        """Return the trace of all ranks in the last step; see `Pipeline.gather_trace`."""
        return local if local is None or self._world is None else gather_trace(self._world, local)

    def gather_expert_load(self) -> ExpertLoad | None:
        """Return the work of divided experts in the last step; see `Pipeline.gather_expert_load`."""
        if self._world is None or not self._traced:
            return None
        loads = [load for axis in self.local_stages.axes if (load := axis.load()) is not None]
        return (
            join_loads(self._world.gather(loads[0], "run", "count the tokens of experts")) if loads else None
        )

    def close(self, gathers: bool = True) -> None:
        """End the threads or the connections; may be called twice.

        Args:
            gathers: whether this process's weights are made whole if they are sharded, which all ranks do together
                (default True).
        """
        if self.closed:
            return
        self.closed = True
        try:
            if self._status == "idle":
                self.wait_for_parameters(whole=False)
        finally:
            # A rank in another call is told so, and this one does not wait for it.
            together = self._status == "idle"
            try:
                with self.calling("pipe.close()") if together else nullcontext():
                    # The communicators of replicas have no names for their calls: another one there would end the process.
                    if together and gathers and self.sharded_weights and self._world is not None:
                        self._world.gather(None, "run", "close the pipeline")
            except CallOrderError:
                together = False
            together = together and (gathers or not self.sharded_weights)
            self._end(together)

    def _end(self, together: bool) -> None:
        self._drop_executors()
        self.local_stages.undo()
        # Hooks on the parameters would keep the reducers, and with them the communicators, as long as the model.
        if self.local_stages.replica_reduction is not None:
            self.local_stages.replica_reduction.detach(wait=together)
        if self._rank_threads is not None:
            self._rank_threads.close()
        # Before the registry closes the descriptors that the watchdog polls.
        if self._watch is not None:
            self._watch.close()
        if self._world is not None:
            self._world.disconnect(failed=self._status != "idle")


class LateRanks:
    """The ranks that were at work when the last training step failed, and the op each was in.

    They may still change gradients after the failed step has returned to the caller.
    """

    def __init__(self) -> None:
        self._late: list[tuple[Executor, int]] = []

    def note(self, executors: Sequence[Executor], ranks: Iterable[int]) -> None:
        """Remember the ops that ranks are in, before the caller can zero their gradients."""
        self._late += [(executors[n], executors[n].progress[ROW]) for n in ranks]

    def require_no_gradients(self) -> None:
        """Refuse one step if a late rank has run a backward since; call it once all of them have ended."""
        late, self._late = self._late, []
        if ranks := sorted({executor.rank for executor, row in late if _changed_gradients(executor, row)}):
            raise PenstockError(
                f"rank {', '.join(map(str, ranks))} was still in the backward when an earlier step had failed or was "
                "interrupted, and added to gradients after that; it has ended now. Call zero_grad() and repeat the step"
            )


def _changed_gradients(executor: Executor, row: int) -> bool:
    """Return whether a rank has added to gradients since the op at `row`."""
    progress, program = executor.progress, executor.program
    last = progress[ROW]
    if last == END:
        if executor.sums_at_the_end:
            return True
        stop = program.schedule.rows(executor.rank).stop
    else:  # a rank that waits has not begun its op
        stop = last if progress[WAITS] else rows_of(program, last).stop
    kinds = program.schedule.kind[row:stop] if row != END else ()
    return any(kind not in (Kind.F, Kind.R) for kind in kinds)
