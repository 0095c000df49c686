"""Processes of a run as the trainer uses them: one leads and decides, and sums go over all of them.

With threads there is one process, and every function is local.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch
from torch import distributed as dist

from penstock.parallel.replicas.exchange import run_each
from penstock.runtime.health.hang import Timeout
from penstock.runtime.health.peers import PeerRegistry
from penstock.runtime.start.meeting import meet
from penstock.runtime.start.place import current_place
from penstock.runtime.workers.agreement import Facts, require_same
from penstock.runtime.workers.collectives import Collectives
from penstock.runtime.workers.world import World

T = TypeVar("T")


class RunGroup:
    """This process among the processes of the run."""

    def __init__(self, collectives: Collectives | None) -> None:
        self.size, self.rank = (1, 0) if collectives is None else (collectives.size, collectives.rank)
        self._collectives = collectives

    @staticmethod
    def of(world: World | None) -> RunGroup:
        """Return the group of all processes of the run that a pipeline's world is part of, with all replicas."""
        return RunGroup(None if world is None else world.collectives)

    @staticmethod
    def meet(timeout: Timeout) -> RunGroup:
        """Return the group of all processes of the run before it has a pipeline; every process calls it."""
        place = current_place()
        if place is None or place.size == 1:
            return RunGroup(None)
        if not dist.is_initialized():
            meet(place.rank, place.size, timeout)
        return RunGroup(Collectives(timeout, PeerRegistry()))

    @property
    def leads(self) -> bool:
        """True on the process that prints and writes."""
        return self.rank == 0

    def each(self, job: Callable[[], T]) -> list[T]:
        """Run a job on every process; return the results by rank, or raise on every process. Every process calls it."""
        collectives = self._collectives
        if collectives is None:
            return run_each(job, None)
        return run_each(job, lambda report: collectives.gather(report, None, "report on a job", patient=True))

    def require_same(self, facts: Facts) -> None:
        """Check that all processes have the same facts, as `penstock.runtime.workers.agreement.require_same`."""
        if self._collectives is not None:
            require_same(facts, self._collectives)

    def decide(self, choose: Callable[[], T]) -> T:
        """Call a function on the leader; return its result, or raise its error, on all processes. Every process calls it."""
        return cast(T, self.each(lambda: choose() if self.leads else None)[0])

    def total(self, value: float) -> float:
        """Return the sum over all processes; every process calls it."""
        return self.begin_total(value)()

    def begin_total(self, value: float) -> Callable[[], float]:
        """Begin the sum over all processes, and return a function that waits for it; every process calls both."""
        if self._collectives is None:
            return lambda: value
        values = torch.tensor([value], dtype=torch.float64)
        finish = self._collectives.begin_all_reduce(values, None, "add up over the run")

        def wait() -> float:
            finish()
            return float(values)

        return wait
