"""Collectives of ``torch.distributed`` with a timeout, which end early and name the process if one has ended."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from penstock.base.errors import CallOrderError, PeerError, WaitTimeoutError, first_line, is_gloo_timeout
from penstock.parallel.replicas.attendance import REPORT_SECONDS, Attendance, Visit
from penstock.parallel.replicas.exchange import gather_values
from penstock.runtime.health.hang import POLL_INTERVAL, Timeout, dump_stacks
from penstock.runtime.health.peers import PeerRegistry


class Collectives:
    """Collectives of the run's processes, apart from the messages of a step."""

    def __init__(self, timeout: Timeout, peer_registry: PeerRegistry) -> None:
        self.timeout = timeout
        self.peer_registry = peer_registry
        self.attendance: Attendance | None = None
        self.everyone: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        """Rank of this process among all processes of the run."""
        return dist.get_rank(self.everyone)

    @property
    def size(self) -> int:
        """Number of processes of the run."""
        return dist.get_world_size(self.everyone)

    def enter(self, group: dist.ProcessGroup | None) -> Visit | None:
        """Begin the next collective in the attendance, if there is one; every process of the group calls it."""
        return None if self.attendance is None else self.attendance.enter(group)

    def gather(
        self,
        value: Any,
        group: dist.ProcessGroup | None,
        action: str,
        patient: bool = False,
    ) -> list[Any]:
        """Return the values of all processes of a group, by rank; every process of the group calls it.

        Args:
            patient: whether to wait as long as for a first step, since some processes write files first (default False).
        """
        members = group or self.everyone
        # A group for GPUs alone: its waits cannot be cut into short ones, and NCCL's watchdog has the timeout.
        if "cpu:" not in dist.get_backend_config(members):
            return gather_values(value, members)
        return gather_values(
            value, members, lambda work: self.finish(work, action, patient, self.enter(group))
        )

    def all_reduce(self, values: Tensor, group: dist.ProcessGroup | None, action: str) -> None:
        """Sum a tensor over the processes of a group, in place; every process of the group calls it."""
        self.begin_all_reduce(values, group, action)()

    def begin_all_reduce(
        self, values: Tensor, group: dist.ProcessGroup | None, action: str
    ) -> Callable[[], object]:
        """Begin `all_reduce`, and return a function that waits for it; every process of the group calls both."""
        return self._begin(dist.all_reduce, values, group, action)

    def broadcast(self, values: Tensor, source: int, group: dist.ProcessGroup | None, action: str) -> None:
        """Fill a tensor with that of the group's process `source`; every process of the group calls it."""
        self._begin(partial(dist.broadcast, group_src=source), values, group, action)()

    def _begin(
        self, collective: Callable[..., Any], values: Tensor, group: dist.ProcessGroup | None, action: str
    ) -> Callable[[], object]:
        start = partial(collective, values, group=group or self.everyone, async_op=True)
        return self.start(start, values, group, action)

    def start(
        self,
        start: Callable[[], Any],
        values: Tensor,
        group: dist.ProcessGroup | None,
        action: str,
        look: Callable[[], None] = lambda: None,
    ) -> Callable[[], object]:
        """Start a collective, and return a function that waits for it; every process of the group calls both.

        Args:
            start: function that starts it, and returns its handle.
            values: a tensor of it.
            look: function that is called repeatedly during a long wait on the CPU, and may raise.
        """
        visit = self.enter(group)
        try:
            work = start()
        except RuntimeError as error:  # the connection was broken already
            raise self.connection_error(action, error, visit) from error
        if values.is_cuda:
            # NCCL's own watchdog has the group's timeout; with one here the host would wait for NCCL.
            return lambda: work.wait()
        return lambda: self.finish(work, action, visit=visit, look=look)

    def barrier(self, group: dist.ProcessGroup | None, action: str) -> None:
        """Wait until all processes of a group call it."""
        self.all_reduce(torch.zeros(1), group, action)

    def finish(
        self,
        work: dist.Work,
        action: str,
        patient: bool = False,
        visit: Visit | None = None,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait for a collective on the CPU."""
        seconds = self.timeout.longest if patient else self.timeout.seconds
        deadline = monotonic() + seconds
        try:
            while True:
                try:
                    work.wait(timedelta(seconds=POLL_INTERVAL))
                    self.peer_registry.require_same_call()  # collectives of two calls may match by chance
                    return
                except RuntimeError as error:
                    if not is_gloo_timeout(error):
                        self.peer_registry.require_same_call()  # their sizes may differ
                        raise self.connection_error(action, error, visit) from error
                    if monotonic() > deadline:
                        raise self._timeout_error(action, seconds, visit) from error
                self.peer_registry.require_all()
                look()
                if visit is not None:
                    visit.waits(seconds)
        except (CallOrderError, PeerError, WaitTimeoutError) as error:
            self.peer_registry.report_error(str(error))
            raise

    def connection_error(self, action: str, error: RuntimeError, visit: Visit | None = None) -> PeerError:
        """Return the error that names the process whose connection has ended, as far as it is known."""
        failed = self.peer_registry.find_failed(patience=1.0)
        if failed:
            return PeerError(f"{failed}, while the other processes were to {action}")
        if left := self.peer_registry.left():
            return PeerError(
                f"{left} closed the pipeline, or left its block, before the processes were to {action}; make this call on "
                "every rank, and close the pipeline after it"
            )
        missing = visit.missing(patience=REPORT_SECONDS) if visit is not None else ""
        missing = missing or "another process closed the connection"
        return PeerError(f"{missing}, when the processes were to {action}: {first_line(error)}")

    def _timeout_error(self, action: str, seconds: float, visit: Visit | None) -> WaitTimeoutError:
        registry = self.peer_registry
        missing = registry.find_failed() or registry.missing() or (visit.missing() if visit else "")
        text = f"waited {seconds:g} s for the other processes, to {action}"
        text += f" in {registry.call}" if registry.calls else ""
        error = WaitTimeoutError(
            f"{text}: {missing}"
            if missing
            else f"{text}; one of them failed, is slow, or does not make this call"
        )
        dump_stacks(str(error))
        error.shown = True
        return error
