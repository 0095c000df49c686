"""The machinery under a Pipeline: its ranks' threads or connections, their executors, and the running of steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from penstock.errors import BatchError
from penstock.runtime.batch import Cut
from penstock.runtime.build import Assembly
from penstock.runtime.crew import Crew
from penstock.runtime.executor import Executor, run_step
from penstock.runtime.gather import gather_trace
from penstock.runtime.recorder import measured_trace
from penstock.runtime.shared import equalise
from penstock.runtime.streams import Streams
from penstock.runtime.transport.base import Channel, Failure
from penstock.runtime.transport.threads import thread_channels
from penstock.runtime.work import Work
from penstock.runtime.world import World
from penstock.trace.events import Trace

T = TypeVar("T")


class Engine:
    """What runs the ranks of this process.

    Args:
        parts: their stages.
        local_ranks: the ranks of this process.
        timeout: the longest any wait may last, in seconds.
        world: the other processes, joined; None if all ranks are threads of this process.
        device: where the stages are; None for the CPU.
    """

    def __init__(
        self,
        parts: Assembly,
        local_ranks: Sequence[int],
        timeout: float,
        world: World | None,
        device: torch.device | None,
    ) -> None:
        self.parts = parts
        self.local_ranks = local_ranks
        self.timeout = timeout
        self.closed = False
        self._world = world
        self._crew: Crew | None = None
        self._streams: Streams | None = None
        self._executors: dict[bool, list[Executor]] = {}
        self._step = 0
        self._failed = False
        self._traced: list[Executor] | None = None
        schedule = parts.schedule
        if world is not None:
            on_cpu = device is None or device.type == "cpu"
            channel = world.connect(parts.program, parts.holders, None if on_cpu else device)
            modules = {s: stage.module for s, stage in parts.own_stages.items()}
            equalise(parts.bundles[world.rank], modules, world.rank, channel, schedule.stages)
            parts.replicate()
        elif schedule.ranks > 1:
            of_rank = schedule.placement.stages_of
            self._streams = Streams.of([[parts.stages[r, s].module for s in of_rank[r]] for r in local_ranks])
            self._crew = Crew(schedule.ranks, timeout, self._streams)

    def run(self, trains: bool, cut: Callable[[], Cut], make_work: Callable[[Cut], Work]) -> list[Work]:
        """Run a step.

        Args:
            trains: forward and backward; else forwards only.
            cut: cuts the batch.
            make_work: makes a rank's work of it.

        Raises:
            BatchError: what `cut` raised; the other ranks are told.
            PenstockError: as `Executor.run`.
        """
        self._step += 1
        self._failed = True
        executors = self._ready(trains)
        try:
            batch = cut()
        except BatchError as error:
            self._refuse(executors, error)
            raise
        works = [make_work(batch) for _ in executors]
        try:
            run_step(executors, works, self._step, self._crew)
        except BaseException:
            if self._world is None:
                # Half-delivered messages of the failed step stay in its channels; the next step gets new ones.
                self._executors.clear()
            raise
        self._failed = False
        self._traced = executors
        return works

    def _refuse(self, executors: Sequence[Executor], error: BatchError) -> None:
        for executor in executors if self._world is not None else ():
            if executor.channel is not None:
                executor.channel.open(self._step)
                executor.channel.fail(Failure(executor.rank, self._step, str(error)))

    def _ready(self, trains: bool) -> list[Executor]:
        if trains not in self._executors:
            parts = self.parts
            channels: Sequence[Channel | None] = [None]
            if self._world is not None:
                channels = [self._world.channel]
            elif parts.schedule.ranks > 1:
                program = parts.program if trains else parts.evaluate_program
                channels = thread_channels(program, self.timeout, parts.holders, self._streams)
            self._executors[trains] = [
                parts.executor(trains, rank, channel, one_memory=self._world is None)
                for rank, channel in zip(self.local_ranks, channels, strict=True)
            ]
        return self._executors[trains]

    def on_ranks(self, job: Callable[[int], T]) -> list[T]:
        """Call ``job(rank)`` for each local rank, on its own thread; see `Pipeline.on_ranks`."""
        if self._crew is None:
            return [job(rank) for rank in self.local_ranks]
        found: dict[int, T] = {}
        jobs = [lambda r=r: found.__setitem__(r, job(r)) for r in self.local_ranks]
        self._crew.run(jobs, lambda: None)
        return [found[rank] for rank in self.local_ranks]

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
        self._executors.clear()
        self.parts.ties.undo()
        if self._crew is not None:
            self._crew.close()
        if self._world is not None:
            self._world.disconnect(failed=self._failed)
