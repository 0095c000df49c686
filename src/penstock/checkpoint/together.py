"""The processes of a run where checkpoints are concerned: they do something each, and all know how it went."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from torch import distributed as dist

from penstock.errors import PenstockError
from penstock.parallel.data.exchange import gather_values

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
        said: tuple[Any, str | None] = (None, None)
        error: Exception | None = None
        try:
            said = (job(), None)
        except (OSError, PenstockError) as failure:
            error = failure
            said = (None, _words(failure))
        answers: list[tuple[Any, str | None]] = [said] if self._group is None else self._exchange(said)
        failures = [
            f"rank {rank}: {message}" if self.size > 1 else message
            for rank, (_, message) in enumerate(answers)
            if message is not None
        ]
        if failures:
            raise PenstockError("; ".join(failures)) from error
        return [value for value, _ in answers]

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


def _words(error: Exception) -> str:
    """What an error says, an operating system's with the file first."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)
