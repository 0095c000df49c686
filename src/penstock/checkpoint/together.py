"""The processes of a run where checkpoints are concerned: they do something each, and all know how it went."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from torch import distributed as dist

from penstock.errors import PenstockError
from penstock.parallel.data.exchange import describe_os_error, gather_values, run_each

T = TypeVar("T")


class Together:
    """Talks in a group of its own, so that a thread in the background may while the training talks in others.

    Args:
        several: whether ``torch.distributed`` has the run's processes; every one makes one then.
        timeout: the longest a wait for the others may last, in seconds.

    Attributes:
        rank, size: of this process among all of the run, replicas included.
    """

    def __init__(self, several: bool, timeout: float) -> None:
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
        self._group: Any = None
        if several:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))

    @property
    def leads(self) -> bool:
        """Whether this process is the one that decides and tells."""
        return self.rank == 0

    def each(self, job: Callable[[], T]) -> list[T]:
        """Run a job of their own on all processes, which all call it.

        Returns:
            What the jobs returned, by rank, on every process.

        Raises:
            PenstockError: on every process, if a job failed on any, with what it said.
        """
        return run_each(lambda: self._named(job), None if self._group is None else self._exchange)

    def _named(self, job: Callable[[], T]) -> T:
        """Run a job, and name this process in its errors."""
        try:
            return job()
        except (OSError, PenstockError) as error:
            text = describe_os_error(error) if isinstance(error, OSError) else str(error)
            raise PenstockError(f"rank {self.rank}: {text}" if self.size > 1 else text) from error

    def _exchange(self, value: Any) -> list[Any]:
        try:
            return gather_values(value, self._group)
        except RuntimeError as error:
            raise PenstockError(f"another process of the run did not answer: {error}") from error

    def close(self) -> None:
        """Leave the group; may be called twice."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None
