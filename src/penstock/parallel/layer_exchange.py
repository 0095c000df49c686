"""The processes of one axis whose layers wait for each other within a step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch import distributed as dist

from penstock.base.errors import PeerError, PenstockError
from penstock.parallel.axis import Processes
from penstock.parallel.participant import Participant, Step, StepFailure


class LayerExchange(Participant):
    """This process among those whose layers wait for its own, since they divide experts or the tokens of a sample.

    They are in different replicas, and a layer of one waits for the same layer of the others. So a process whose step fails
    leaves a note in the rendezvous store, which the others read while they wait. An exchange that not all have made leaves
    a communicator out of step, so the step after a failure begins with a new one.

    Args:
        axis: name of the axis.
        lines: lines of processes that wait for each other.
        waited_for: what they wait for, for errors.
    """

    def __init__(self, processes: Processes, axis: str, lines: list[list[int]], waited_for: str) -> None:
        self._processes, self._axis, self._lines, self._waited_for = processes, axis, lines, waited_for
        self.group: dist.ProcessGroup = processes.open_group(lines)
        self._store = processes.open_store()
        self.step: Step | None = None
        self._failed = self._active = False
        processes.on_release(self._release)

    @property
    def size(self) -> int:
        """Number of processes that wait for each other."""
        return dist.get_world_size(self.group)

    def begin(self, step: Step) -> None:
        """Begin a step; every process of the run calls it."""
        if self._failed:
            self._processes.end_group(self.group)
            self.group = self._processes.open_group(self._lines)
            self._failed = False
        self.step, self._active = step, True

    def finish(self) -> None:
        self._active = False

    def abandon(self, failure: StepFailure) -> None:
        """Tell the others that the exchanges which are left do not come; the next step begins with a new communicator."""
        if self._active and isinstance(failure.error, Exception):
            # Without a store that answers, the others wait for the timeout.
            with suppress(RuntimeError):
                self._store.compare_set(self._note(), "", str(failure.report))
        self._active, self._failed = False, True

    def _note(self) -> str:
        assert self.step is not None, "begun"
        return f"penstock/{self._axis}/{self.group.group_name}/{self.step.number}"

    def _require_none_failed(self) -> None:
        if self._store.check([self._note()]):
            why = self._store.get(self._note()).decode()
            raise PeerError(f"another replica failed, {self._waited_for}: {why}", told=True)

    def start(
        self, start: Callable[[], Any], out: Tensor, group: dist.ProcessGroup, action: str
    ) -> Callable[[], Tensor]:
        """Start a collective that fills `out`, and return a function that waits for it and returns `out`."""
        if not self._active:
            raise PenstockError(
                "a layer whose experts or tokens are divided over processes was called outside of a step of the pipeline; "
                "call pipe.evaluate on all ranks, or use a saved model in one process"
            )
        finish = self._processes.collectives.start(start, out, group, action, self._require_none_failed)

        def finished() -> Tensor:
            finish()
            return out

        return finished

    def _release(self) -> None:
        # A communicator ends when nothing refers to it.
        del self.group
