"""The processes that divide the experts of their layers, and the exchange of tokens between them within a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from torch import Tensor
from torch import distributed as dist

from penstock.base.errors import PeerError, PenstockError
from penstock.runtime.workers.collectives import Collectives


class ExpertExchange:
    """This process among those that together have all experts of its layers.

    They are in different replicas, and a layer of one waits for the same layer of the others. So a process whose step fails
    leaves a note in the rendezvous store, which the others read while they wait. An exchange that not all have made leaves
    a communicator out of step, so the step after a failure begins with a new one.

    Args:
        make_group: function that makes a communicator; all processes of the run call it.
        store: a connection to the store of its own.
    """

    def __init__(
        self, make_group: Callable[[], dist.ProcessGroup], collectives: Collectives, store: Any
    ) -> None:
        self.group = make_group()
        self.size = dist.get_world_size(self.group)
        self._make_group, self._collectives, self._store = make_group, collectives, store
        self._step = 0
        self._failed = self._active = False

    def begin(self, step: int) -> None:
        """Begin a step; every process of the run calls it."""
        if self._failed:
            dist.destroy_process_group(self.group)
            self.group = self._make_group()
            self._failed = False
        self._step = step

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Return a context for what all processes do in a step; its error is told to the others."""
        self._active = True
        try:
            yield
        except Exception as error:
            self.tell(str(error))
            raise
        finally:
            self._active = False

    def note_failure(self) -> None:
        """Have the next step begin with a new communicator, after one that failed on all processes of the run."""
        self._failed = True

    def tell(self, why: str) -> None:
        """Tell the others that this process does not make the exchanges that are left in its step."""
        # Without a store that answers, the others wait for the timeout.
        with suppress(RuntimeError):
            self._store.compare_set(self._note, "", why)

    @property
    def _note(self) -> str:
        return f"penstock/experts/{self.group.group_name}/{self._step}"

    def _require_none_failed(self) -> None:
        if self._store.check([self._note]):
            raise PeerError(
                f"another replica failed, to whose experts tokens were sent: {self._store.get(self._note).decode()}"
            )

    def all_to_all(self, values: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send ``sent[r]`` rows to process r, and return the ``received[r]`` rows that each sent, by process."""
        out = values.new_empty(sum(received), *values.shape[1:])
        start = partial(dist.all_to_all_single, out, values, received, sent, group=self.group, async_op=True)
        self._run(start, out, self.group, "exchange tokens with their experts")
        return out

    def all_gather(self, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the rows of all processes of another group, equally many of each."""
        out = rows.new_empty(len(rows) * dist.get_world_size(group), *rows.shape[1:])
        start = partial(_ALL_GATHER, out, rows.contiguous(), group=group, async_op=True)
        self._run(start, out, group, "join the tokens that experts have computed")
        return out

    def _run(self, start: Callable[[], Any], out: Tensor, group: dist.ProcessGroup, action: str) -> None:
        if not self._active:
            raise PenstockError(
                "experts are divided over processes, and a layer that has some was called outside of a step of the "
                "pipeline; call pipe.evaluate on all ranks, or use a saved model in one process"
            )
        self._collectives.run(start, out, group, action, self._require_none_failed)


# The first name exists from torch 2.12 on, where the second one warns.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
