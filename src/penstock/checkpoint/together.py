"""Collective jobs of a run's processes for checkpoints: each does its part, and all learn the result."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from time import monotonic
from typing import Any, TypeVar

from torch import distributed as dist

from penstock.base.errors import PenstockError, is_gloo_timeout
from penstock.parallel.replicas.exchange import describe_os_error, gather_values, run_each
from penstock.runtime.health.hang import POLL_INTERVAL
from penstock.runtime.workers.world import World

T = TypeVar("T")


class Together:
    """A separate process group, so that a background thread can communicate while the training does in other groups."""

    def __init__(self, world: World | None, timeout: float) -> None:
        self.rank, self.size = (0, 1) if world is None else (world.collectives.rank, world.collectives.size)
        self._group: Any = None if world is None else world.separate_group(timeout)
        self._peers = None if world is None else world.peer_registry
        self._timeout = timeout

    @property
    def leads(self) -> bool:
        """True in the process that writes what belongs to no single process."""
        return self.rank == 0

    def each(self, job: Callable[[], T]) -> list[T]:
        """Run each process's job; every process calls this, and all of them raise if one job failed."""
        return run_each(lambda: self._named(job), None if self._group is None else self._exchange)

    def _named(self, job: Callable[[], T]) -> T:
        """Run a job, with this process's rank in its errors."""
        try:
            return job()
        except (OSError, PenstockError) as error:
            text = describe_os_error(error) if isinstance(error, OSError) else str(error)
            raise PenstockError(f"rank {self.rank}: {text}" if self.size > 1 else text) from error

    def _exchange(self, value: Any) -> list[Any]:
        try:
            return gather_values(value, self._group, self._finish)
        except RuntimeError as error:
            raise PenstockError(f"another process of the run did not answer: {error}") from error

    def _finish(self, work: dist.Work) -> None:
        """Wait for a collective, but not for a process that has ended, or is in another call of the pipeline."""
        deadline = monotonic() + self._timeout
        while True:
            try:
                work.wait(timedelta(seconds=POLL_INTERVAL))
                return
            except RuntimeError as error:
                if self._peers is not None:
                    self._peers.require_all()
                if not is_gloo_timeout(error) or monotonic() > deadline:
                    raise

    def close(self) -> None:
        """Leave the group; may be called twice."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None
