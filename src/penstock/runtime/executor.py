"""The one executor: it runs any Program, one rank of it, over any transport.

At the start the rank's instructions are compiled to a list of closures, one an op, each of which takes its input,
computes, records when, hands over the result. A step is then a walk through that list. Two kinds of instruction need no
closure: POST is the transport's, which keeps as many receives posted as the edge has slots, across steps; and FREE is
what a stage does of itself at the end of B or W.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from penstock.errors import PeerError, StageError, TransportError
from penstock.runtime.clocks import clock
from penstock.runtime.copies import Copies
from penstock.runtime.streams import device_of
from penstock.runtime.transport.base import Channel, Failure
from penstock.schedule.ops import Kind, Op
from penstock.schedule.program import Action, Instruction, Program
from penstock.stage.stage import Stage
from penstock.stage.values import Parcel, describe, flatten

Take = Callable[[], Parcel]
Give = Callable[[Parcel], None]


@dataclass
class Work:
    """What one rank gets for a step, and what it makes of it.

    Attributes:
        inputs, targets: by microbatch; where the rank holds the first or the last stage.
        keep_outputs: whether the last stage's outputs are wanted.
        input_grads: whether the gradients of the inputs are wanted.
        losses, outputs, grads: results by microbatch id, of the microbatches this rank saw.
    """

    inputs: Sequence[object] = ()
    targets: Sequence[object] = ()
    keep_outputs: bool = False
    input_grads: bool = False
    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, object] = field(default_factory=dict)
    grads: dict[int, Parcel] = field(default_factory=dict)


class Executor:
    """One rank's Program, compiled.

    Args:
        program: what to run.
        rank: which rank's part.
        stages: the stages this rank holds, by number.
        channel: its end of the transport; None for a single rank, which needs none.
        copies: the reduction of the stages of which other ranks hold copies; None if there are none.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        stages: Mapping[int, Stage],
        channel: Channel | None,
        copies: Copies | None = None,
    ) -> None:
        self.program = program
        self.rank = rank
        self.stages = stages
        self.channel = channel
        self.copies = copies
        rows = program.schedule.rows(rank)
        self.first_row = rows.start
        count = rows.stop - rows.start
        self.device = device_of([stage.module for stage in stages.values()])
        self.now = clock(self.device, 2 * count)
        self.start: list[Any] = [0.0] * count
        self.end: list[Any] = [0.0] * count
        self.held = [0] * count
        self.trains = bool((program.schedule.kind != Kind.F).any())
        self._work = Work()
        self._input_parcel: Parcel | None = None
        self._handed: dict[int, Parcel] = {}
        self._ops: list[Callable[[], None]] = []
        self._op_rows: list[tuple[int, ...]] = []
        self._compile()
        self._collector = program.schedule.placement.holders[-1][0]

    def run(self, step: int, work: Work) -> Work:
        """Run one step.

        Args:
            step: its number, the same on every rank; a message of another step is never taken for one of this.
            work: this rank's inputs; the results are filled in, with all losses in every process.

        Raises:
            StageError: an op failed here; names rank, stage, op and microbatch, with the cause chained.
            PeerError: another rank failed first.
            WaitTimeoutError: a wait ran out.
        """
        self._work = work
        at = 0
        if self.channel is not None:
            self.channel.open(step)
        try:
            if self.copies is not None:
                self.copies.begin()
            with torch.set_grad_enabled(self.trains):
                for at, op in enumerate(self._ops):  # noqa: B007 - read when an op fails
                    op()
                at = len(self._ops)
                if self.copies is not None:
                    self.copies.finish()
                self._agree()
        except BaseException as error:
            told = self._explain(error, at, step)
            self._clean_up()
            if self.channel is not None:
                known = error.failure if isinstance(error, PeerError) else None
                self.channel.fail(
                    known if isinstance(known, Failure) else Failure(self.rank, step, str(told))
                )
            if told is error:
                raise
            raise told from error
        if self.channel is not None:
            self.channel.finish()
        self._work, self._input_parcel = Work(), None
        return work

    def _clean_up(self) -> None:
        self._handed.clear()
        self._work, self._input_parcel = Work(), None
        for stage in self.stages.values():
            stage.drop()
        if self.copies is not None:
            self.copies.abandon()

    def _explain(self, error: BaseException, at: int, step: int) -> BaseException:
        """The error to raise: it names rank, stage, microbatch and op, unless another rank has named its own."""
        if not isinstance(error, Exception) or isinstance(error, PeerError):
            return error
        where, given = f"rank {self.rank}, at the end of step {step}", ""
        if at < len(self._ops):
            schedule, rows = self.program.schedule, self._op_rows[at]
            op = schedule.op(rows[0])
            ops = " and ".join(str(schedule.op(row)) for row in rows)
            where = f"rank {self.rank}, stage {op.stage}, microbatch {op.microbatch}, op {ops} of step {step}"
            if op.kind == Kind.F and self._input_parcel is not None:
                given = f" (the stage's input was {describe(self._input_parcel)})"
        if isinstance(error, TransportError):
            return type(error)(f"{error} (at {where})")
        return StageError(f"{where}: {type(error).__name__}: {error}{given}")

    def _agree(self) -> None:
        """End the step on every rank or on none, and let every rank know every loss.

        Each rank reports to the collector, which holds the last stage, that its ops are done, with the losses it
        saw; the collector answers with all of them. A rank that failed has sent its failure instead. In threads no
        loss travels: one process has them all, and to read them would be to wait for a GPU.
        """
        channel, losses = self.channel, self._work.losses
        if channel is None:
            return
        tag = len(self.program.rank)
        told = {} if channel.one_process else losses
        others = [r for r in range(self.program.schedule.ranks) if r != self._collector]
        if self.rank != self._collector:
            channel.send(self._collector, tag, _pack_losses(told))
            losses.update(_unpack_losses(channel.recv(self._collector, tag)))
            return
        for rank in others:
            told.update(_unpack_losses(channel.recv(rank, tag)))
        answer = _pack_losses(told)
        losses.update(_unpack_losses(answer))  # on the CPU, as every other rank has them
        for rank in others:
            channel.send(rank, tag, answer)

    # Compilation: one closure an op, made of what precedes its RUN, the RUN, and what follows it.

    def _compile(self) -> None:
        takes: dict[int, Take] = {}
        run: Instruction | None = None
        gives: dict[int, Give] = {}
        complete: list[int] = []

        def close() -> None:
            nonlocal run, takes, gives, complete
            if run is not None:
                self._close_op(run, takes, gives, complete)
                run, takes, gives, complete = None, {}, {}, []

        for line in self.program.instructions(self.rank):
            match line.action:
                case Action.RECV | Action.TAKE:
                    close()
                    takes[line.row] = self._take(line)
                case Action.RUN:
                    if run is not None:
                        close()
                    run = line
                case Action.SEND | Action.HAND:
                    gives[line.row] = self._give(line)
                case Action.REDUCE:
                    complete.append(line.number)
        close()

    def _close_op(
        self, run: Instruction, takes: dict[int, Take], gives: dict[int, Give], complete: list[int]
    ) -> None:
        rows = tuple(range(run.row, run.row + run.number))
        parts = [self._compute(row, takes.get(row), gives.get(row)) for row in rows]
        if self.copies is not None:
            parts += [partial(self.copies.send, stage) for stage in complete if stage in self.copies.holders]
        self._op_rows.append(rows)
        self._ops.append(parts[0] if len(parts) == 1 else partial(_one_after_another, parts))

    def _take(self, line: Instruction) -> Take:
        row, peer = line.row, line.peer
        if line.action is Action.TAKE:
            handed = self._handed
            return lambda: handed.pop(row)
        channel = self.channel
        assert channel is not None
        return lambda: channel.recv(peer, row)

    def _give(self, line: Instruction) -> Give:
        taker, peer = int(self.program.target[line.row]), line.peer
        if line.action is Action.HAND:
            handed = self._handed
            return lambda parcel: handed.__setitem__(taker, parcel)
        channel = self.channel
        assert channel is not None
        return lambda parcel: channel.send(peer, taker, parcel)

    def _compute(self, row: int, take: Take | None, give: Give | None) -> Callable[[], None]:
        op = self.program.schedule.op(row)
        stage = self.stages[op.stage]
        slot = row - self.first_row
        if op.kind == Kind.F:
            if op.stage == self.program.schedule.stages - 1:
                return self._last_forward(op.microbatch, stage, slot, take or self._input(op.microbatch))
            return self._forward(op.microbatch, stage, slot, take or self._input(op.microbatch), give)
        if op.kind == Kind.W:
            return self._weight(op.microbatch, stage, slot)
        half = op.kind == Kind.I and op not in self._merged
        run = stage.backward_input if half else stage.backward
        return self._backward(
            op.microbatch, stage, run, slot, take, give or self._input_gradient(op.microbatch)
        )

    @cached_property
    def _merged(self) -> frozenset[Op]:
        """I whose W follows at once and for whose result nobody waits: one full backward is cheaper than two halves."""
        schedule, rows = self.program.schedule, self.program.schedule.rows(self.rank)
        inputs = [r for r in range(rows.start, rows.stop - 1) if schedule.kind[r] == Kind.I]
        return frozenset(
            schedule.op(r)
            for r in inputs
            if self.program.target[r] < 0 and schedule.op(r + 1) == replace(schedule.op(r), kind=Kind.W)
        )

    @cached_property
    def _split(self) -> frozenset[tuple[int, int]]:
        """(stage, microbatch) whose backward comes in two halves on this rank."""
        schedule, rows = self.program.schedule, self.program.schedule.rows(self.rank)
        halves = [schedule.op(r) for r in range(rows.start, rows.stop) if schedule.kind[r] == Kind.I]
        return frozenset((op.stage, op.microbatch) for op in halves if op not in self._merged)

    def _input(self, microbatch: int) -> Take:
        """A microbatch of the batch, for the first stage."""

        def take() -> Parcel:
            work = self._work
            leaves, structure = flatten(work.inputs[microbatch])
            if not work.input_grads:
                return Parcel(leaves, structure, (False,) * len(leaves))
            wanted = tuple(isinstance(x, Tensor) and x.is_floating_point() for x in leaves)
            return Parcel(
                tuple(x.detach() if need else x for x, need in zip(leaves, wanted, strict=True)),
                structure,
                wanted,
            )

        return take

    def _input_gradient(self, microbatch: int) -> Give:
        def give(parcel: Parcel) -> None:
            if self._work.input_grads:
                self._work.grads[microbatch] = parcel

        return give

    def _forward(
        self, microbatch: int, stage: Stage, slot: int, take: Take, give: Give | None
    ) -> Callable[[], None]:
        start, end, held, now = self.start, self.end, self.held, self.now
        assert give is not None, "only the last stage hands nothing on"
        split = (stage.index, microbatch) in self._split
        run = partial(stage.forward, split=split) if self.trains else stage.evaluate

        def op() -> None:
            self._input_parcel = parcel = take()
            start[slot] = now()
            output = run(microbatch, parcel)
            end[slot] = now()
            held[slot] = stage.held_bytes
            give(output)

        return op

    def _last_forward(self, microbatch: int, stage: Stage, slot: int, take: Take) -> Callable[[], None]:
        start, end, held, now = self.start, self.end, self.held, self.now
        split = (stage.index, microbatch) in self._split
        run: Callable[..., tuple[Tensor | None, object]] = stage.evaluate_with_loss
        if self.trains:
            run = partial(stage.forward_with_loss, split=split)

        def op() -> None:
            work = self._work
            self._input_parcel = parcel = take()
            target = work.targets[microbatch] if work.targets else None
            start[slot] = now()
            loss, output = run(microbatch, parcel, target, work.keep_outputs)
            end[slot] = now()
            held[slot] = stage.held_bytes
            if loss is not None:
                work.losses[microbatch] = loss
            if work.keep_outputs:
                work.outputs[microbatch] = output

        return op

    def _backward(
        self,
        microbatch: int,
        stage: Stage,
        run: Callable[[int, Parcel | None], Parcel],
        slot: int,
        take: Take | None,
        give: Give,
    ) -> Callable[[], None]:
        start, end, held, now = self.start, self.end, self.held, self.now

        def op() -> None:
            grads = take() if take is not None else None
            start[slot] = now()
            inputs = run(microbatch, grads)
            end[slot] = now()
            held[slot] = stage.held_bytes
            give(inputs)

        return op

    def _weight(self, microbatch: int, stage: Stage, slot: int) -> Callable[[], None]:
        start, end, held, now = self.start, self.end, self.held, self.now

        def op() -> None:
            start[slot] = now()
            stage.backward_weight(microbatch)
            end[slot] = now()
            held[slot] = stage.held_bytes

        return op


def _one_after_another(parts: Sequence[Callable[[], None]]) -> None:
    for part in parts:
        part()


def _pack_losses(losses: Mapping[int, Tensor]) -> Parcel:
    ids = sorted(losses)
    values = torch.stack([losses[n].cpu() for n in ids]) if ids else torch.empty(0)
    return Parcel((torch.tensor(ids, dtype=torch.int64), values), _TWO_LEAVES, (False, False))


def _unpack_losses(parcel: Parcel) -> dict[int, Tensor]:
    ids, values = parcel.leaves
    return dict(zip(ids.tolist(), values, strict=True))


_TWO_LEAVES: Any = flatten((0, 0))[1]
