"""The processes of a run as the trainer needs them: one that leads, what it decides, sums over all.

With threads there is one process, and everything here is what it seems.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch
from torch import distributed as dist

from penstock.parallel.data.exchange import run_each
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.collectives import Collectives

T = TypeVar("T")


class RunGroup:
    """This process among those of the run.

    Args:
        together: how they talk; None for a single process.

    Attributes:
        size: number of processes.
        rank: this one's number.
    """

    def __init__(self, together: Collectives | None) -> None:
        self.size, self.rank = (1, 0) if together is None else (dist.get_world_size(), dist.get_rank())
        self._together = together

    @staticmethod
    def of(pipe: Pipeline) -> RunGroup:
        """All processes of a pipeline's run, those of the pipelines beside it included."""
        return RunGroup(None if pipe.world is None else pipe.world.together)

    @property
    def leads(self) -> bool:
        """Whether this process is the one that prints and writes."""
        return self.rank == 0

    def each(self, job: Callable[[], T]) -> list[T]:
        """Let every process do something of its own; every process calls it.

        Returns:
            What the jobs returned, by rank, on every process; it is such as `penstock.encoding.encode` takes.

        Raises:
            PenstockError: on every process, if a job raised one, or an OSError, on any; a `ConfigError` stays one.
            PeerError, WaitTimeoutError: a process is gone, or has not come.
        """
        together = self._together
        if together is None:
            return run_each(job, None)
        return run_each(job, lambda report: together.exchange(report, None, "tell how it went", patient=True))

    def decide(self, choose: Callable[[], T]) -> T:
        """Let the leader do something, and tell all the others what came of it; every process calls it.

        Raises:
            PenstockError: as `each`, if `choose` raises on the leader.
        """
        return cast(T, self.each(lambda: choose() if self.leads else None)[0])

    def total(self, value: float) -> float:
        """The sum over all processes; every process calls it."""
        return self.begin_total(value)()

    def begin_total(self, value: float) -> Callable[[], float]:
        """Begin the sum over all processes, and return what waits for it; every process calls both."""
        together = self._together
        if together is None:
            return lambda: value
        values = torch.tensor([value], dtype=torch.float64)
        finish = together.begin_add_up(values, None, "add up over the run")

        def wait() -> float:
            finish()
            return float(values)

        return wait
