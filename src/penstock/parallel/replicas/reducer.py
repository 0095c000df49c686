"""The communicator of the buckets, over ``torch.distributed``.

Every replica starts its collectives in the same order; several may be in progress at once. Small numbers (hashes, step
counts) use the same collectives, as int64.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from time import monotonic
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from penstock.base.errors import (
    PeerError,
    PenstockError,
    WaitTimeoutError,
    first_line,
    is_gloo_timeout,
)
from penstock.parallel.replicas.attendance import REPORT_SECONDS, Visit
from penstock.parallel.replicas.exchange import gather_values


class Handle(Protocol):
    """A collective in progress."""

    def wait(self) -> None:
        """Wait until it is done; on CUDA the current stream waits instead, if the communicator supports that."""


def part_of(flat: Tensor, rank: int, size: int) -> Tensor:
    """Return a view of replica `rank`'s part of a buffer of `size` equal parts."""
    each = flat.numel() // size
    return flat[rank * each : (rank + 1) * each]


class GroupReducer:
    """One replica's end of a communicator of replicas, the processes of a ``torch.distributed`` group of their own.

    Args:
        require_all: function called repeatedly during waits; raises if any process is gone (default: no check).
        enter: function called as a reduction begins; returns a record that can name missing processes, or None (default).
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout: float,
        require_all: Callable[[], None] = lambda: None,
        enter: Callable[[], Visit | None] = lambda: None,
    ) -> None:
        self.group = group
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)
        self.timeout = timedelta(seconds=timeout)
        self._require_all, self._enter = require_all, enter
        # Small numbers are exchanged in host memory where the group supports it, so that no process waits for the device.
        self._host = "cpu" if "cpu:" in dist.get_backend_config(self.group) else "cuda"

    def release(self) -> None:
        """Drop the communicator, which ends with its threads when nothing refers to it; nothing is called after this."""
        del self.group, self._enter

    def all_reduce(self, flat: Tensor) -> Handle:
        """Start to sum the 1-d tensor `flat` over the replicas, in place."""
        return self._begin(flat, "all-reduce", lambda: dist.all_reduce(flat, group=self.group, async_op=True))

    def reduce_scatter(self, flat: Tensor) -> Handle:
        """Start to sum the 1-d tensor `flat`, whose size is a multiple of `size`, in place; replica r gets the r-th part."""
        part = part_of(flat, self.rank, self.size)
        return self._begin(
            flat, "reduce-scatter", lambda: _REDUCE_SCATTER(part, flat, group=self.group, async_op=True)
        )

    def all_gather(self, flat: Tensor) -> Handle:
        """Start to fill in the 1-d tensor `flat`, whose r-th part is on replica r, in place."""
        part = part_of(flat, self.rank, self.size)
        return self._begin(
            flat, "all-gather", lambda: _ALL_GATHER(flat, part, group=self.group, async_op=True)
        )

    def reduce(self, flat: Tensor, owner: int) -> Handle:
        """Start to sum the 1-d tensor `flat` over the replicas, in place; replica `owner` gets the sum."""
        root = dist.get_global_rank(self.group, owner)
        return self._begin(flat, "reduce", lambda: dist.reduce(flat, root, group=self.group, async_op=True))

    def broadcast(self, flat: Tensor, owner: int) -> Handle:
        """Start to fill in the 1-d tensor `flat`, which is on replica `owner`, in place."""
        root = dist.get_global_rank(self.group, owner)
        return self._begin(
            flat, "broadcast", lambda: dist.broadcast(flat, root, group=self.group, async_op=True)
        )

    def set_timeout(self, seconds: float) -> None:
        """Set the timeout in seconds of the collectives that are started from now on."""
        self.timeout = timedelta(seconds=seconds)

    def exchange(self, numbers: list[int]) -> Callable[[], list[list[int]]]:
        """Start to gather equally many numbers of every replica; return a function that waits for them, by replica."""
        table = torch.zeros(self.size, len(numbers), dtype=torch.int64)
        table[self.rank] = torch.tensor(numbers, dtype=torch.int64)
        table = table.to(self._host)
        handle = self.all_reduce(table.view(-1))

        def result() -> list[list[int]]:
            handle.wait()
            rows: list[list[int]] = table.tolist()
            return rows

        return result

    def gather(self, value: object) -> list[Any]:
        """Gather a value of every replica, and return them by replica."""
        try:
            return gather_values(value, self.group)
        except RuntimeError as error:
            raise _failure(error, "share their values", self.timeout) from error

    def _begin(self, flat: Tensor, what: str, start: Callable[[], Any]) -> Handle:
        visit = self._enter()
        try:
            work = start()
        except RuntimeError as error:  # the connection was broken already
            raise _failure(error, what, self.timeout, visit) from error
        # On CUDA no timeout is given, since the host would block; NCCL's own watchdog enforces the group's.
        timeout = None if flat.is_cuda else self.timeout
        return _Waiting(work, timeout, f"{what} {flat.numel()} values", self._require_all, visit)


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
        """Wait until the timeout, with a check of the other processes at every poll."""
        deadline = monotonic() + timeout.total_seconds()
        while (left := deadline - monotonic()) > _POLL_INTERVAL:
            try:
                self.work.wait(timedelta(seconds=_POLL_INTERVAL))
                return
            except RuntimeError as error:
                if not is_gloo_timeout(error):
                    raise
            self.require_all()
            if self.visit is not None:
                self.visit.waits(timeout.total_seconds())
        # Not 0, which torch takes for no timeout.
        self.work.wait(timedelta(seconds=max(left, 0.001)))


def _failure(
    error: RuntimeError, what: str, timeout: timedelta | None, visit: Visit | None = None
) -> PenstockError:
    if is_gloo_timeout(error):
        waited = f"{timeout.total_seconds():g} s" if timeout is not None else "too long"
        missing = visit.missing() if visit is not None else ""
        return WaitTimeoutError(
            f"waited {waited} for the other replicas to {what}; "
            + (missing or "one of them failed, is slow, or left out a step")
        )
    missing = visit.missing(patience=REPORT_SECONDS) if visit is not None else ""
    return PeerError(
        f"the connection to another replica broke: {first_line(error)}" + (f" ({missing})" if missing else "")
    )


_POLL_INTERVAL = 0.25  # seconds
# The first names exist from torch 2.12 on, where the second ones warn.
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
