"""The exchange of tokens between the processes that divide experts, and the record of what it moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from penstock.base.encoding import sendable
from penstock.base.errors import PenstockError
from penstock.parallel.axis import Processes
from penstock.parallel.clocks import Readings, clock
from penstock.parallel.layer_exchange import LayerExchange
from penstock.parallel.mesh import Mesh
from penstock.parallel.participant import Step
from penstock.schedule.ops import Kind
from penstock.trace.expert_load import ProcessLoad

sendable(ProcessLoad)  # marked here, since `trace` must not import torch, and the encoding does


class ExpertExchange(LayerExchange):
    """This process among those that together have all experts of its layers."""

    def __init__(self, processes: Processes, mesh: Mesh) -> None:
        lines = processes.lines(mesh.shape.expert_ranks)
        super().__init__(processes, "ep", lines, "to whose experts tokens were sent")
        self._tokens: dict[str, Tensor] = {}
        self._calls: list[str] = []
        self._width = 0
        # By device, None for the host, the moments at which exchanges of tokens began and ended.
        self._moments: dict[torch.device | None, tuple[list[Any], list[Any]]] = {}

    def begin(self, step: Step) -> None:
        super().begin(step)
        self._tokens.clear()
        self._moments.clear()

    def finish(self) -> None:
        if self._calls:
            self.meet(_END, torch.zeros(self.size, 0, dtype=torch.int64))
        super().finish()

    def count(self, name: str, tokens: Tensor) -> None:
        """Add tokens that came to this process's experts of a module, by expert, in host memory."""
        if self.step is not None and self.step.op().kind == Kind.F:
            before = self._tokens.get(name)
            self._tokens[name] = tokens if before is None else before + tokens

    @contextmanager
    def record_kept(self) -> Iterator[None]:
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
        sharers = tuple(dist.get_process_group_ranks(self.group))
        tokens = {name: counts.tolist() for name, counts in self._tokens.items()}
        return ProcessLoad(sharers, dist.get_rank(), tokens, seconds)

    def prepare(self, calls: Sequence[str], width: int) -> None:
        """Take note of the calls that `meet` may be given, and of the numbers in its longest row."""
        self._calls, self._width = [_END, *calls], width

    def meet(self, call: str, rows: Tensor) -> Tensor:
        """Send one row of `rows`, int64 in host memory, to each process, and return the row that each sent.

        Exchanges of tokens begin with it. Their sizes follow from it, and a process in another layer has other tokens: all
        processes of the group are in the same call then, or all of them raise.
        """
        ones = [1] * self.size
        # Of one size, whatever the call, or processes in different ones could not exchange their numbers.
        given = torch.zeros(self.size, 2 + self._width, dtype=torch.int64)
        given[:, 0] = self._calls.index(call)
        given[:, 1] = self.step.op().microbatch if self.step is not None else 0
        given[:, 2 : 2 + rows.shape[1]] = rows
        got = self.all_to_all(given, ones, ones)
        if (got[:, :2] != given[:, :2]).any():
            ranks = dist.get_process_group_ranks(self.group)
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
        group = self.group
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
        self.start(start, out, group, action)()


_END = "the end of the step"
# The first name exists from torch 2.12 on, where the second one warns.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
