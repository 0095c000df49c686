"""How replicas add up: what the buckets ask of a communicator, and the one over ``torch.distributed``.

Everything is started in the same order by every replica, and may be under way at once. What replicas tell each other in
small numbers (hashes, step counts) goes the same way, as int64.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from time import monotonic
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from penstock.errors import ConfigError, PeerError, PenstockError, WaitTimeoutError
from penstock.parallel.data.attendance import Visit
from penstock.parallel.data.exchange import gather_values


class Handle(Protocol):
    """Something started."""

    def wait(self) -> None:
        """Until it is done; on CUDA the current stream waits instead, where the communicator can have that.

        Raises:
            PeerError: another replica is gone.
            WaitTimeoutError: it did not end in time.
        """


class Reducer(Protocol):
    """One replica's end of a communicator.

    Attributes:
        rank, size: which replica this is, of how many.
    """

    rank: int
    size: int

    def start(self, flat: Tensor) -> Handle:
        """Begin to sum a 1-d tensor over the replicas, in place."""

    def scatter(self, flat: Tensor) -> Handle:
        """Begin to sum a 1-d tensor, its size a multiple of `size`; replica r needs its r-th part only, in place."""

    def gather(self, flat: Tensor) -> Handle:
        """Begin to fill in a 1-d tensor of which replica r has the r-th part, in place."""

    def set_timeout(self, seconds: float) -> None:
        """How long the waits of what is started from now on may last."""

    def exchange(self, numbers: list[int]) -> Callable[[], list[list[int]]]:
        """Begin to give every replica's numbers, equally many, to every replica; the result is by replica."""

    def share(self, value: object) -> list[Any]:
        """Give every replica's value to every replica, and wait; the result is by replica.

        Raises:
            PeerError: another replica is gone.
            WaitTimeoutError: a replica did not come in time.
        """


def part_of(flat: Tensor, rank: int, size: int) -> Tensor:
    """Replica `rank`'s part of a buffer that divides into `size` equal ones: a view."""
    each = flat.numel() // size
    return flat[rank * each : (rank + 1) * each]


class GroupReducer:
    """Replicas that are processes: a ``torch.distributed`` group, used for nothing else.

    Args:
        group: whose ranks are the replicas; by default all processes.
        timeout: the longest a wait may last, in seconds.
        blocking: finish everything before going on; for communicators that cannot go on by themselves.
        require_all: called now and then while something is waited for; raises if a process is gone, wherever it was.
        enter: called as a reduction begins; gives what knows afterwards who has not come to it, if anything does.

    Raises:
        ConfigError: this process is not in the group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        timeout: float = 60.0,
        blocking: bool = False,
        require_all: Callable[[], None] = lambda: None,
        enter: Callable[[], Visit | None] = lambda: None,
    ) -> None:
        self.group = group if group is not None else dist.group.WORLD
        if self.group is None or dist.get_rank(self.group) < 0:
            raise ConfigError(
                "this process belongs to no replica group: initialise torch.distributed and give a group it is in"
            )
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)
        self.timeout = timedelta(seconds=timeout)
        self.blocking = blocking
        self._require_all, self._enter = require_all, enter
        # Small numbers travel from host to host where they can, so that nobody waits for the device.
        self._host = "cpu" if "cpu:" in dist.get_backend_config(self.group) else "cuda"

    def start(self, flat: Tensor) -> Handle:
        return self._begin(
            flat, "add up", lambda later: dist.all_reduce(flat, group=self.group, async_op=later)
        )

    def scatter(self, flat: Tensor) -> Handle:
        part = part_of(flat, self.rank, self.size)
        return self._begin(
            flat,
            "add up and share out",
            lambda later: _REDUCE_SCATTER(part, flat, group=self.group, async_op=later),
        )

    def gather(self, flat: Tensor) -> Handle:
        part = part_of(flat, self.rank, self.size)
        return self._begin(
            flat, "collect", lambda later: _ALL_GATHER(flat, part, group=self.group, async_op=later)
        )

    def set_timeout(self, seconds: float) -> None:
        self.timeout = timedelta(seconds=seconds)

    def exchange(self, numbers: list[int]) -> Callable[[], list[list[int]]]:
        table = torch.zeros(self.size, len(numbers), dtype=torch.int64)
        table[self.rank] = torch.tensor(numbers, dtype=torch.int64)
        table = table.to(self._host)
        handle = self.start(table.view(-1))

        def result() -> list[list[int]]:
            handle.wait()
            rows: list[list[int]] = table.tolist()
            return rows

        return result

    def share(self, value: object) -> list[Any]:
        try:
            return gather_values(value, self.group)
        except RuntimeError as error:
            raise _failure(error, "share what they have", self.timeout) from error

    def _begin(self, flat: Tensor, what: str, start: Callable[[bool], Any]) -> Handle:
        visit = self._enter()
        try:
            work = start(not self.blocking)
        except RuntimeError as error:  # the connection was broken already
            raise _failure(error, what, self.timeout, visit) from error
        if work is None:
            return DONE
        # With a limit the host would wait for NCCL; NCCL's own watchdog has the group's.
        timeout = None if flat.is_cuda else self.timeout
        return _Waiting(work, timeout, f"{what} {flat.numel()} values", self._require_all, visit)


class _Done:
    def wait(self) -> None:
        """There is nothing to wait for."""


DONE = _Done()
"""The handle of what a communicator did at once."""


class _Waiting:
    __slots__ = ("require_all", "timeout", "visit", "what", "work")

    def __init__(
        self,
        work: dist.Work,
        timeout: timedelta | None,
        what: str,
        require_all: Callable[[], None],
        visit: Visit | None,
    ) -> None:
        self.work, self.timeout, self.what, self.require_all = work, timeout, what, require_all
        self.visit = visit

    def wait(self) -> None:
        try:
            if self.timeout is None:
                self.work.wait()
            else:
                self._wait(self.timeout)
        except RuntimeError as error:
            raise _failure(error, self.what, self.timeout, self.visit) from error

    def _wait(self, timeout: timedelta) -> None:
        """Wait for so long, and look around now and then."""
        until = monotonic() + timeout.total_seconds()
        while (left := until - monotonic()) > _LOOK:
            try:
                self.work.wait(timedelta(seconds=_LOOK))
                return
            except RuntimeError as error:
                if "imed out" not in str(error):
                    raise
            self.require_all()
            if self.visit is not None:
                self.visit.waits(timeout.total_seconds())
        self.work.wait(timedelta(seconds=max(left, 0.001)))


def _failure(
    error: RuntimeError, what: str, timeout: timedelta | None, visit: Visit | None = None
) -> PenstockError:
    text = str(error)
    if "imed out" in text:
        waited = f"{timeout.total_seconds():g} s" if timeout is not None else "too long"
        missing = visit.missing() if visit is not None else ""
        return WaitTimeoutError(
            f"waited {waited} for the other replicas to {what}; "
            + (missing or "one of them failed, is slow, or left out a step")
        )
    missing = visit.missing(patience=3.0) if visit is not None else ""
    return PeerError(
        f"the connection to another replica broke: {text.splitlines()[0]}"
        + (f" ({missing})" if missing else "")
    )


_LOOK = 0.25
# The names of torch 2.12 on; before, the others, which warn from then on.
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
