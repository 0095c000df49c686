"""The processes whose layers wait for each other within a step: they divide experts (ep), or the tokens of a sample (cp)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from penstock.base.encoding import sendable
from penstock.base.errors import PeerError, PenstockError
from penstock.parallel.clocks import Readings, clock
from penstock.parallel.context.attention import Masks
from penstock.parallel.participant import Participant, Step, StepFailure
from penstock.runtime.workers.collectives import Collectives
from penstock.schedule.ops import Kind, Op
from penstock.trace.expert_load import ProcessLoad

sendable(ProcessLoad)  # marked here, since `trace` must not import torch, and the encoding does


class LayerExchange(Participant):
    """This process among those that together have all experts of its layers, and among those with the other tokens.

    They are in different replicas, and a layer of one waits for the same layer of the others. So a process whose step fails
    leaves a note in the rendezvous store, which the others read while they wait. An exchange that not all have made leaves
    a communicator out of step, so the step after a failure begins with new ones.

    Args:
        make_groups: for each of "ep" and "cp" that the mesh has, a function that makes its communicator; all processes of
            the run call it.
        store: a connection to the store of its own.

    Attributes:
        size: number of processes that divide the experts.
        masks: of attention, which layers of a step share.
        microbatches: number of a replica's microbatches in the step.
    """

    def __init__(
        self, make_groups: Mapping[str, Callable[[], dist.ProcessGroup]], collectives: Collectives, store: Any
    ) -> None:
        self.groups = {axis: make() for axis, make in make_groups.items()}
        self.size = dist.get_world_size(self.groups["ep"]) if "ep" in self.groups else 1
        self._make_groups, self._collectives, self._store = make_groups, collectives, store
        self._step = 0
        self._op: Callable[[], Op] | None = None
        self._tokens: dict[str, Tensor] = {}
        self._calls: list[str] = []
        self._width = 0
        self.masks: Masks = {}
        self.microbatches = 1
        # By device, None for the host, the moments at which exchanges of tokens began and ended.
        self._moments: dict[torch.device | None, tuple[list[Any], list[Any]]] = {}
        self._failed = self._active = False

    def begin(self, step: Step) -> None:
        """Begin a step; every process of the run calls it."""
        if self._failed:
            for axis, make in self._make_groups.items():
                dist.destroy_process_group(self.groups[axis])
                self.groups[axis] = make()
            self._failed = False
        self._step, self.microbatches, self._op = step.number, step.microbatches, step.op
        self._tokens.clear()
        self._moments.clear()
        self.masks.clear()
        self._active = True

    def finish(self) -> None:
        if self._calls:
            self.meet(_END, torch.zeros(self.size, 0, dtype=torch.int64))
        self._active = False

    def abandon(self, failure: StepFailure) -> None:
        """Tell the others that the exchanges which are left do not come; the next step begins with new communicators."""
        if self._active and isinstance(failure.error, Exception):
            self._tell(str(failure.report))
        self._active, self._failed = False, True

    def _tell(self, why: str) -> None:
        # Without a store that answers, the others wait for the timeout.
        with suppress(RuntimeError):
            for axis in self.groups:
                self._store.compare_set(self._note(axis), "", why)

    def _note(self, axis: str) -> str:
        return f"penstock/{axis}/{self.groups[axis].group_name}/{self._step}"

    def _require_none_failed(self) -> None:
        for axis in self.groups:
            if self._store.check([self._note(axis)]):
                why = self._store.get(self._note(axis)).decode()
                raise PeerError(f"another replica failed, {_WAITED_FOR[axis]}: {why}")

    def count(self, name: str, tokens: Tensor) -> None:
        """Add tokens that came to this process's experts of a module, by expert, in host memory."""
        if self._op is not None and self._op().kind == Kind.F:
            before = self._tokens.get(name)
            self._tokens[name] = tokens if before is None else before + tokens

    @contextmanager
    def load_kept(self) -> Iterator[None]:
        """Return a context with other steps, after which `load` is that of the step before it."""
        tokens, moments = dict(self._tokens), dict(self._moments)
        try:
            yield
        finally:
            self._tokens, self._moments = tokens, moments

    def load(self) -> ProcessLoad:
        """Return the work of this process's experts since `begin`; waits for its GPU."""
        readings = Readings()
        seconds = 0.0
        for device, (starts, ends) in self._moments.items():
            both = readings.seconds(device, starts + ends)
            seconds += float(both[len(starts) :].sum() - both[: len(starts)].sum())
        sharers = tuple(dist.get_process_group_ranks(self.groups["ep"]))
        tokens = {name: counts.tolist() for name, counts in self._tokens.items()}
        return ProcessLoad(sharers, dist.get_rank(), tokens, seconds)

    def prepare(self, calls: Sequence[str], width: int) -> None:
        """Take note of the calls that `meet` may be given, and of the numbers in its longest row."""
        self._calls, self._width = [_END, *calls], width

    def meet(self, call: str, rows: Tensor) -> Tensor:
        """Send one row of `rows`, int64 in host memory, to each process, and return the row that each sent.

        All processes of the group are in the same call then, or all of them raise.
        """
        ones = [1] * self.size
        # Of one size, whatever the call, or processes in different ones could not exchange their numbers.
        given = torch.zeros(self.size, 2 + self._width, dtype=torch.int64)
        given[:, 0] = self._calls.index(call)
        given[:, 1] = self._op().microbatch if self._op is not None else 0
        given[:, 2 : 2 + rows.shape[1]] = rows
        got = self.all_to_all(given, ones, ones)
        if (got[:, :2] != given[:, :2]).any():
            ranks = dist.get_process_group_ranks(self.groups["ep"])
            places = [
                f"process {rank} is in {self._calls[number]}, microbatch {microbatch}"
                for rank, (number, microbatch, *_) in zip(ranks, got.tolist(), strict=True)
            ]
            raise PenstockError(
                f"the processes that divide experts are in different places: {'; '.join(places)}. In each microbatch all "
                "replicas must call the same layers of experts, equally often and in one order, whatever their tokens; "
                "draw what is left out alike on all of them (a seed of the step), or leave ep at 1"
            )
        return got[:, 2 : 2 + rows.shape[1]]

    def all_to_all(self, values: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send ``sent[r]`` rows to process r, and return the ``received[r]`` rows that each sent, by process."""
        out = values.new_empty(sum(received), *values.shape[1:])
        group = self.groups["ep"]
        start = partial(dist.all_to_all_single, out, values, received, sent, group=group, async_op=True)
        with self._timed(out):
            self._run(start, out, group, "exchange tokens with their experts")
        return out

    def all_gather(self, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the rows of all processes of another group, equally many of each."""
        out = rows.new_empty(len(rows) * dist.get_world_size(group), *rows.shape[1:])
        start = partial(_ALL_GATHER, out, rows.contiguous(), group=group, async_op=True)
        with self._timed(out):
            self._run(start, out, group, "join the tokens that experts have computed")
        return out

    def start_gather(self, part: Tensor) -> Callable[[], Tensor]:
        """Gather the tensors of all processes that divide the tokens of a sample, along a new dimension 0."""
        group = self.groups["cp"]
        out = part.new_empty(dist.get_world_size(group), *part.shape)
        start = partial(_ALL_GATHER, out.flatten(0, 1), part.contiguous(), group=group, async_op=True)
        return self._start(start, out, group, "gather keys and values")

    def start_sum(self, whole: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        """Sum this process's row in dimension 0 over those that divide the tokens; return its tensor at once, too."""
        group = self.groups["cp"]
        out = whole.new_empty(whole.shape[1:])
        whole, action = whole.contiguous(), "add up gradients of keys and values"
        if whole.is_cuda:
            start = partial(_REDUCE_SCATTER, out, whole.flatten(0, 1), group=group, async_op=True)
            return out, self._start(start, out, group, action)
        # Gloo's reduce-scatter is an all-reduce, which sends twice as much.
        parts = torch.empty_like(whole)
        finish = self._start(
            partial(dist.all_to_all_single, parts, whole, group=group, async_op=True), parts, group, action
        )
        return out, lambda: torch.sum(finish(), 0, out=out)

    @contextmanager
    def _timed(self, out: Tensor) -> Iterator[None]:
        device = out.device if out.is_cuda else None
        mark = clock(device, 2)
        starts, ends = self._moments.setdefault(device, ([], []))
        begun = mark()
        yield
        starts.append(begun)
        ends.append(mark())

    def _run(self, start: Callable[[], Any], out: Tensor, group: dist.ProcessGroup, action: str) -> None:
        self._start(start, out, group, action)()

    def _start(
        self, start: Callable[[], Any], out: Tensor, group: dist.ProcessGroup, action: str
    ) -> Callable[[], Tensor]:
        if not self._active:
            raise PenstockError(
                "a layer whose experts or tokens are divided over processes was called outside of a step of the pipeline; "
                "call pipe.evaluate on all ranks, or use a saved model in one process"
            )
        finish = self._collectives.start(start, out, group, action, self._require_none_failed)

        def finished() -> Tensor:
            finish()
            return out

        return finished


_END = "the end of the step"
_WAITED_FOR = {
    "ep": "to whose experts tokens were sent",
    "cp": "which has the other tokens of the same samples",
}
# The first names exist from torch 2.12 on, where the second ones warn.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
