"""The machinery under a Pipeline: its ranks' threads or connections, their executors, and the running of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, reduce
from operator import or_
from typing import TypeVar

import torch

from penstock.errors import ConfigError, PenstockError
from penstock.parallel.data.shards import Shards
from penstock.parallel.data.thread_reducer import thread_reducers
from penstock.runtime.batch.work import LocalBatch, StepOptions, Work
from penstock.runtime.consensus import require_graph
from penstock.runtime.copies.copies import Copies
from penstock.runtime.executor import Executor
from penstock.runtime.health.hang import HangDetector
from penstock.runtime.health.late import LateRanks
from penstock.runtime.health.watchdog import Watchdog
from penstock.runtime.local_stages import LocalStages
from penstock.runtime.options import ParallelOptions
from penstock.runtime.tracing.gather import gather_trace
from penstock.runtime.tracing.recorder import measured_trace
from penstock.runtime.transport.channel import Channel, Failure
from penstock.runtime.transport.threads import thread_channels
from penstock.runtime.weights.recompute_choice import choose_recompute
from penstock.runtime.weights.shared import equalise
from penstock.runtime.workers.rank_threads import RankThreads
from penstock.runtime.workers.streams import Streams
from penstock.runtime.workers.timeout import Timeout
from penstock.runtime.workers.world import World
from penstock.trace.events import Trace

T = TypeVar("T")


class Engine:
    """What runs the ranks of this process.

    Args:
        parts: their stages.
        local_ranks: the ranks of this process.
        timeout: of any wait.
        world: the other processes, joined; None if all ranks are threads of this process.
        device: where the stages are; None for the CPU.
        replicas: how many pipelines there are; without other processes, as threads of this one.
        options: how their copies of the model are kept the same.

    Raises:
        ConfigError: several pipelines of threads on a GPU.
    """

    def __init__(
        self,
        parts: LocalStages,
        local_ranks: Sequence[int],
        timeout: Timeout,
        world: World | None,
        device: torch.device | None,
        replicas: int,
        options: ParallelOptions,
    ) -> None:
        self.parts = parts
        self.thread_replicas = [parts.replica() for _ in range(replicas - 1)] if world is None else []
        self.local_ranks = local_ranks
        self.timeout = world.timeout if world is not None else timeout
        self.closed = False
        self._world = world
        self._rank_threads: RankThreads | None = None
        self._watch: Watchdog | None = None
        self._streams: Streams | None = None
        self._executors: dict[bool, list[Executor]] = {}
        self._reduced = False
        self._reductions = 0
        self._step = 0
        self._failed = self._busy = False
        self._works: list[Work] | None = None
        self._late = LateRanks()
        self._traced: list[Executor] | None = None
        schedule = parts.schedule
        if world is not None:
            on_cpu = device is None or device.type == "cpu"
            channel = world.connect(parts.program, parts.holders, None if on_cpu else device)
            modules = {s: stage.module for s, stage in parts.own_stages.items()}
            detector = HangDetector(self.timeout, [channel.words], [f"rank {world.rank}"], parts.program)
            self._watch = Watchdog(world.peer_registry, detector)
            equalise(parts.shared_groups[world.rank], modules, world.rank, channel, schedule.stages)
            self.make_buckets()
        elif schedule.ranks > 1 or self.thread_replicas:
            of_rank = schedule.placement.stages_of
            self._streams = Streams.of([[parts.stages[r, s].module for s in of_rank[r]] for r in local_ranks])
            if self._streams is not None and self.thread_replicas:
                raise ConfigError("several pipelines on GPUs need a process a rank; start them with torchrun")
            self._rank_threads = RankThreads(schedule.ranks * replicas, timeout, self._streams)
            if parts.random is not None:
                parts.random.in_threads = True
            if self.thread_replicas:
                self._make_thread_buckets(self._rank_threads)
        self._copies = Copies(parts, self.thread_replicas, world, replicas, options)
        for part in (parts, *self.thread_replicas):
            part.watch_copies(replicas)
        self._fixed = parts.fixed(replicas)

    def _make_thread_buckets(self, rank_threads: RankThreads) -> None:
        """Make the buckets of all ranks of all replicas, each on its own thread: they communicate while they are made."""
        everyone = [self.parts, *self.thread_replicas]
        ends = {rank: thread_reducers(len(everyone), self.timeout.seconds) for rank in self.local_ranks}
        jobs = [
            partial(part.make_buckets, rank, ends[rank][n], None)
            for n, part in enumerate(everyone)
            for rank in self.local_ranks
        ]
        rank_threads.run(jobs, _nothing)

    def _equalise_grads(self, reduces: bool) -> None:
        """Start the replicas' gradients from the first one's, unless they are still separate."""
        for replica in self.thread_replicas if self._reduced else ():
            for own, first in zip(replica.parameters(), self.parts.parameters(), strict=True):
                if first.grad is None or own.grad is None:
                    own.grad = None if first.grad is None else first.grad.clone()
                else:
                    own.grad.copy_(first.grad)
        self._reduced = reduces

    @contextmanager
    def step(self, trains: bool) -> Iterator[None]:
        """Return a context for one step: split the batch in it, then call `run`.

        An error raised in it before `run` is told to the other ranks, so that they do not wait.

        Args:
            trains: whether the step trains; otherwise it evaluates.

        Raises:
            PenstockError: if a step of this pipeline is under way, or a rank added to gradients after an earlier step had
                failed (`LateRanks`).
            ReplicaError: if copies of a parameter or buffer differ; every rank raises it.
            StageError: if no loss has a graph although there is something to train.
        """
        self._require_idle(trains)
        if self._copies.follow():
            self.make_buckets()
        self._step += 1
        self._failed = self._busy = True
        self._works = None
        executors = self._prepare(trains)
        splitting = False
        try:
            with self._timeout_of_step(trains):
                self._copies.before_step(trains, self.wait_for_parameters)
                splitting = True
                yield
        except BaseException as error:
            if splitting and self._works is None and self._world is not None and isinstance(error, Exception):
                for executor in executors:
                    executor.refuse(self._step, error)
            if trains and self._rank_threads is not None:
                self._late.note(executors, self._rank_threads.at_work)
            self._copies.failed()
            if self._world is None:
                # Half-delivered messages of the failed step stay in its channels; the next step gets new ones.
                self._executors.clear()
            self._works = None
            raise
        finally:
            self._busy = False
        self._failed = False
        self._conclude(trains, executors)

    def run(self, batches: Sequence[LocalBatch], options: StepOptions) -> list[Work]:
        """Run the step whose context is open.

        Args:
            batches: batch of each replica of this process.
            options: options of the step.

        Returns:
            The work of each rank of each replica, with its results.

        Raises:
            PenstockError: as `Executor.run`.
        """
        executors = self._executors[options.trains]
        self._works = works = [Work(batch, options) for batch in batches for _ in self.local_ranks]
        if options.trains:
            self._equalise_grads(options.reduces)
        self._run_step(executors, works)
        self._copies.after_step(options.trains)
        return works

    def _conclude(self, trains: bool, executors: list[Executor]) -> None:
        assert self._works is not None
        works, self._works = self._works, None
        require_graph(reduce(or_, (work.flags for work in works)), self._step)
        self._traced = executors[: len(self.local_ranks)]
        if trains and works[0].options.reduces:
            self._reductions += 1
            if self._reductions == 2:
                self._tune(executors)

    def _require_idle(self, trains: bool) -> None:
        if self._busy:
            raise PenstockError(
                "Pipeline.step or Pipeline.evaluate was called while a step of the same pipeline is under way, by a layer, "
                "a hook, the loss function or another thread; call it between two steps"
            )
        if self._rank_threads is not None:
            self._rank_threads.wait_stopped()
        if trains:
            self._late.require_no_gradients()
        if self._world is None and self._fixed is not None:
            self._fixed.check(trains)  # in processes the executors check, and tell the others

    def _tune(self, executors: Sequence[Executor]) -> None:
        """Let the replicas make their buckets by what they have just seen; each on its own thread."""
        jobs = [
            partial(e.replicas.tune, e.program, measured_trace([e]))
            for e in executors
            if e.replicas is not None
        ]
        if self._rank_threads is None or not self.thread_replicas:
            for job in jobs:
                job()
        else:
            self._rank_threads.run(jobs, _nothing)

    def _run_step(self, executors: Sequence[Executor], works: Sequence[Work]) -> None:
        if self._rank_threads is None:
            executors[0].run(self._step, works[0])
            return

        def stop(why: str) -> None:
            for executor in executors:
                if executor.channel is not None:
                    executor.channel.fail(Failure(executor.rank, self._step, why))

        names = [f"rank {e.rank}" for e in executors]
        if self.thread_replicas:
            ranks = len(self.local_ranks)
            names = [f"{name} of replica {n // ranks}" for n, name in enumerate(names)]
        detector = HangDetector(self.timeout, [e.words for e in executors], names, executors[0].program)
        jobs = [partial(e.run, self._step, w) for e, w in zip(executors, works, strict=True)]
        try:
            self._rank_threads.run(jobs, stop, detector)
        finally:
            self._copies.ran()

    def follow_modules(self) -> None:
        """Let copies in other threads follow what was changed on modules; see `ModuleCopies`."""
        self._copies.follow_modules()

    @contextmanager
    def _timeout_of_step(self, trains: bool) -> Iterator[None]:
        """Return a context in which all waits have the step's timeout."""
        try:
            with self.timeout.step(trains):
                self._apply_timeout()
                yield
        finally:
            self._apply_timeout()

    def _apply_timeout(self) -> None:
        """Give the communicators and the replicas' reducers the timeout that counts now."""
        if self._world is not None:
            self._world.apply_timeout()
        for part in (self.parts, *self.thread_replicas):
            for replicas in part.replicas.values():
                replicas.set_timeout(self.timeout.seconds)

    def _prepare(self, trains: bool) -> list[Executor]:
        if trains not in self._executors:
            self._executors[trains] = [
                executor
                for part in (self.parts, *self.thread_replicas)
                for executor in self._executors_of(part, trains)
            ]
        executors = self._executors[trains]
        if self._watch is not None:
            self._watch.detector.program = executors[0].program
        return executors

    def _executors_of(self, parts: LocalStages, trains: bool) -> list[Executor]:
        channels: Sequence[Channel | None] = [None]
        if self._world is not None:
            channels = [self._world.channel]
        elif parts.schedule.ranks > 1:
            program = parts.program if trains else parts.evaluate_program
            channels = thread_channels(program, self.timeout, parts.holders, self._streams)
        return [
            parts.executor(
                trains,
                rank,
                channel,
                one_memory=self._world is None,
                fixed=None if self._world is None else self._fixed,
            )
            for rank, channel in zip(self.local_ranks, channels, strict=True)
        ]

    def make_buckets(self, zero: bool = False) -> None:
        """Make the gradient buckets, or make them again; see `Pipeline.make_buckets`."""
        self._reductions = 0
        world = self._world
        if world is not None and world.mesh is not None:
            self._executors.clear()
            self.parts.make_buckets(world.rank, world.replicas(), world.exchange_beside, zero)
        elif self.thread_replicas and self._rank_threads is not None:
            self._make_thread_buckets(self._rank_threads)
        else:
            return
        self._executors.clear()

    @property
    def shards(self) -> Shards | None:
        """What of the parameters this process updates, if that is divided among replicas."""
        replicas = self.parts.replicas.get(self._world.rank) if self._world is not None else None
        return replicas.shards if replicas is not None else None

    def wait_for_parameters(self) -> None:
        """Wait for parameters that are being collected."""
        if self.shards is not None:
            self.shards.wait_all()

    def on_ranks(self, job: Callable[[int], T]) -> list[T]:
        """Call ``job(rank)`` for each local rank, on its own thread; see `Pipeline.on_ranks`."""
        if self._rank_threads is None:
            return [job(rank) for rank in self.local_ranks]
        found: dict[int, T] = {}

        def keep(rank: int) -> None:
            found[rank] = job(rank)

        jobs = [partial(keep, rank) for rank in self.local_ranks]
        idle = len(self.local_ranks) * len(self.thread_replicas)
        self._rank_threads.run([*jobs, *[_nothing] * idle], _nothing)
        return [found[rank] for rank in self.local_ranks]

    def wrap_ops(self, wrap: Callable[[int, Callable[[], None]], Callable[[], None]]) -> None:
        """Replace every op of a training step; see `Pipeline.wrap_ops`."""
        for executor in self._prepare(True):
            executor.ops = [(row, wrap(executor.rank, op)) for row, op in executor.ops]

    def choose_recompute(self, memory: int) -> None:
        """The first step has measured what every layer keeps; from now on only as many are recomputed as need be."""
        for part in (self.parts, *self.thread_replicas):
            for rank in self.local_ranks:
                stages = {s: stage for (r, s), stage in part.stages.items() if r == rank}
                choose_recompute(part.schedule, rank, stages, memory)

    def trace(self) -> Trace | None:
        """What the last step of this process's ranks did and when; None before the first."""
        if not self._traced:
            return None
        trace = measured_trace(self._traced)
        return replace(trace, info={**trace.info, "split": self.parts.split})

    def gather_trace(self) -> Trace | None:
        """What all ranks did in the last step; see `Pipeline.gather_trace`."""
        part = self.trace()
        return part if part is None or self._world is None else gather_trace(self._world, part)

    def close(self) -> None:
        """End the threads or the connections; may be called twice."""
        if self.closed:
            return
        self.closed = True
        try:
            if not self._failed:
                self.wait_for_parameters()
        finally:
            self._end()

    def _end(self) -> None:
        self._executors.clear()
        self.parts.undo()
        # Hooks on the parameters would keep the reducers, and with them the communicators, as long as the model.
        for part in (self.parts, *self.thread_replicas):
            for replicas in part.replicas.values():
                replicas.detach(wait=self._world is None or not self._failed)
        if self._rank_threads is not None:
            self._rank_threads.close()
        if self._watch is not None:
            self._watch.close()
        if self._world is not None:
            self._world.disconnect(failed=self._failed)


def _nothing(why: str = "") -> None:
    """What a replica's thread does while only the first one's have something to do."""
