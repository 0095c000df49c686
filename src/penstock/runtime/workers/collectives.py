"""Collectives of ``torch.distributed``: waits with a limit, cut short when a process is gone, that say which one it is."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from time import monotonic
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from penstock.errors import PeerError, WaitTimeoutError
from penstock.parallel.data.attendance import Attendance, Visit
from penstock.parallel.data.exchange import gather_values
from penstock.runtime.health.hang import TICK, dump_stacks
from penstock.runtime.health.peers import PeerRegistry
from penstock.runtime.workers.timeout import Timeout

ANSWERED = 3.0
"""Seconds in which those that wait have said so, once a connection is broken."""


class Collectives:
    """What processes do together outside a step's messages.

    Args:
        timeout: of a wait for the others.
        peer_registry: of the processes of this machine.

    Attributes:
        attendance: of processes that the registry does not show; None if it shows all.
    """

    def __init__(self, timeout: Timeout, peer_registry: PeerRegistry) -> None:
        self.timeout = timeout
        self.peer_registry = peer_registry
        self.attendance: Attendance | None = None

    def enter(self, group: dist.ProcessGroup | None) -> Visit | None:
        """Begin the next collective of a group, where processes cannot see each other; all of the group call it."""
        return None if self.attendance is None else self.attendance.enter(group)

    def exchange(
        self, value: Any, group: dist.ProcessGroup | None, what: str, patient: bool = False
    ) -> list[Any]:
        """The values of all processes of a group, by rank; all of them call it.

        Args:
            value: as `penstock.encoding.encode` takes it.
            group: None for all processes.
            what: they do, for the error.
            patient: whether to wait for as long as for a first step; some write files before they come.

        Raises:
            PeerError, WaitTimeoutError: as `finish`.
            TypeError: it cannot be sent; nothing has been, then.
        """
        if "cpu:" not in dist.get_backend_config(group):
            return gather_values(value, group)
        return gather_values(value, group, lambda work: self.finish(work, what, patient, self.enter(group)))

    def add_up(self, values: Tensor, group: dist.ProcessGroup | None, what: str) -> None:
        """Sum a tensor over the processes of a group, in place; all of them call it.

        Raises:
            PeerError, WaitTimeoutError: as `finish`.
        """
        self.begin_add_up(values, group, what)()

    def begin_add_up(self, values: Tensor, group: dist.ProcessGroup | None, what: str) -> Callable[[], None]:
        """Begin `add_up`, and return what waits for it; all processes of the group call both."""
        visit = self.enter(group)
        try:
            work = dist.all_reduce(values, group=group, async_op=True)
        except RuntimeError as error:  # the connection was broken already
            raise self._broken(what, error, visit) from error
        if values.is_cuda:  # with a limit the host would wait for NCCL; NCCL's own watchdog has the group's
            return lambda: _wait(work)
        return lambda: self.finish(work, what, visit=visit)

    def meet(self, group: dist.ProcessGroup | None, what: str) -> None:
        """Go on once all processes of a group are here.

        Raises:
            PeerError, WaitTimeoutError: as `finish`.
        """
        self.add_up(torch.zeros(1), group, what)

    def finish(self, work: dist.Work, what: str, patient: bool = False, visit: Visit | None = None) -> None:
        """Wait for something that all processes of a group have begun, on the CPU.

        Args:
            work: what was begun.
            what: they do, for the error.
            patient: as `exchange`.
            visit: what `enter` gave for it.

        Raises:
            PeerError: a process is gone; names it.
            WaitTimeoutError: not all came in time; names who is stopped, if that can be seen, or who has not come.
        """
        seconds = self.timeout.longest if patient else self.timeout.seconds
        until = monotonic() + seconds
        try:
            while True:
                try:
                    work.wait(timedelta(seconds=TICK))
                    return
                except RuntimeError as error:
                    if "imed out" not in str(error):
                        raise self._broken(what, error, visit) from error
                    if monotonic() > until:
                        raise self._late(what, seconds, visit) from error
                self.peer_registry.require_all()
                if visit is not None:
                    visit.waits(seconds)
        except (PeerError, WaitTimeoutError) as error:
            self.peer_registry.say(str(error))
            raise

    def _broken(self, what: str, error: RuntimeError, visit: Visit | None) -> PeerError:
        who = self.peer_registry.guilty(patience=1.0)
        if who:
            return PeerError(f"{who}, while the others were to {what}")
        missing = visit.missing(patience=ANSWERED) if visit is not None else ""
        who = missing or "another process broke off"
        return PeerError(f"{who}, when they were to {what}: {str(error).splitlines()[0]}")

    def _late(self, what: str, seconds: float, visit: Visit | None) -> WaitTimeoutError:
        who = self.peer_registry.guilty() or (visit.missing() if visit is not None else "")
        text = f"waited {seconds:g} s for the other processes, to {what}"
        error = WaitTimeoutError(f"{text}: {who}" if who else f"{text}; one of them failed, or is slow")
        dump_stacks(str(error))
        error.shown = True
        return error


def _wait(work: dist.Work) -> None:
    work.wait()
