"""Compile one rank's Program to a list of functions, one per op, so that a step only walks through the list.

Each function receives the op's inputs, computes, records times and memory, and sends the outputs. Two kinds of
instruction need no function. POST belongs to the transport, which keeps as many receives posted as the edge has slots,
across steps. FREE happens in the stage: its B or I drops the graph, and W the products that I left for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch

from penstock.parallel.clocks import clock
from penstock.parallel.participant import Collective, CollectiveKind, Participant, overrides
from penstock.runtime.batch.work import Work
from penstock.runtime.transport.channel import Channel
from penstock.schedule.ops import Kind, Op
from penstock.schedule.program import Action, Instruction, Program
from penstock.stage.compute.runner import LossInputs, LossReport, Messages
from penstock.stage.compute.stage import Stage
from penstock.stage.values import Message

CompiledOp = tuple[int, Callable[[], None]]
"""An op's row in the schedule, and the function that runs it."""

_Receive = Callable[[], Message]
_Send = Callable[[Message], None]
_ReceiveAll = Callable[[], Messages]
_SendAll = Callable[[Messages], None]


@dataclass
class StepState:
    """State of a rank in a step, on which its ops work.

    Attributes:
        inputs: inputs of its last op, for error messages.
        local: messages between stages of this rank, by tag.
    """

    work: Work = field(default_factory=Work)
    inputs: Messages | None = None
    local: dict[int, Message] = field(default_factory=dict)

    def clear(self) -> None:
        """Drop the work of a step and its messages."""
        self.work, self.inputs = Work(), None
        self.local.clear()


class OpRecords:
    """Times and memory of a rank's ops in its last step.

    Attributes:
        timed: whether the times are those of the ops; on a GPU they are otherwise of the host, and mean nothing.
        now: clock of the step; see `penstock.parallel.clocks.clock`.
        start, end: by op, readings of the clock.
        held: by op, bytes that its stage holds after it.
    """

    def __init__(self, count: int, device: torch.device | None) -> None:
        self.timed = False
        self.now: Callable[[], Any] = perf_counter
        self._device, self._mark = device, self.now
        self._stream: Any = None
        self.start: list[Any] = [0.0] * count
        self.end: list[Any] = [0.0] * count
        self.held = [0] * count

    def begin(self, timed: bool | None) -> None:
        """Begin a step, on the thread of its ops and with their CUDA stream as the current one.

        Args:
            timed: whether its ops are timed, for which a GPU records two events an op; None where it costs nothing.
        """
        self.timed = self._device is None if timed is None else timed
        self.now = perf_counter
        if self._device is None or not self.timed:
            return
        # A rank's ops stay on one stream, so that it is looked up once a step.
        stream = torch.cuda.current_stream(self._device)
        if stream != self._stream:
            self._stream, self._mark = stream, clock(self._device, 2 * len(self.start), stream)
        self.now = self._mark


class BackwardKinds(NamedTuple):
    """Kinds of a rank's backwards: whole, in two halves, or after a recomputation.

    Attributes:
        merged: I ops whose W follows at once and whose result no other op needs: one full backward costs less than two
            halves.
        split: (stage, microbatch) of backwards that run in two halves.
        dropped: (stage, microbatch) of forwards that an R recomputes, so that they keep their inputs only.
    """

    merged: frozenset[Op]
    split: frozenset[tuple[int, int]]
    dropped: frozenset[tuple[int, int]]

    @staticmethod
    def of(program: Program, rank: int) -> BackwardKinds:
        """Return the kinds of one rank's backwards."""
        schedule, rows = program.schedule, program.schedule.rows(rank)
        inputs = [r for r in range(rows.start, rows.stop) if schedule.kind[r] == Kind.I]
        merged = frozenset(
            schedule.op(r)
            for r in inputs
            if r + 1 < rows.stop
            and program.target[r] < 0
            and schedule.op(r + 1) == replace(schedule.op(r), kind=Kind.W)
        )
        halves = [op for op in map(schedule.op, inputs) if op not in merged]
        recomputed = [schedule.op(r) for r in range(rows.start, rows.stop) if schedule.kind[r] == Kind.R]
        return BackwardKinds(
            merged,
            frozenset((op.stage, op.microbatch) for op in halves),
            frozenset((op.stage, op.microbatch) for op in recomputed),
        )


def collectives_of(program: Program, rank: int) -> list[Collective]:
    """Return the gathers and reductions of one rank's step, in their order."""
    names: dict[Action, CollectiveKind] = {Action.UNSHARD: "unshard", Action.REDUCE: "reduce"}
    return [(names[line.action], line.number) for line in program.instructions(rank) if line.action in names]


class OpCompiler:
    """Compiler of one rank's instructions into ops."""

    def __init__(
        self,
        program: Program,
        rank: int,
        stages: Mapping[int, Stage],
        channel: Channel | None,
        *,
        state: StepState,
        records: OpRecords,
        participants: Sequence[Participant],
        trains: bool,
    ) -> None:
        self._program, self._rank = program, rank
        self._stages, self._channel = stages, channel
        self._state, self._records = state, records
        self._participants, self._trains = participants, trains
        self._first_row = program.schedule.rows(rank).start
        self._last_stage = program.schedule.stages - 1
        self._backwards = BackwardKinds.of(program, rank)

    def compile(self) -> list[CompiledOp]:
        """Return the rank's ops in their order; ops that run as a pair are one function."""
        ops: list[CompiledOp] = []
        receives: dict[int, list[_Receive]] = {}
        sends: dict[int, list[_Send]] = {}
        before: list[Callable[[], None]] = []
        after: list[Callable[[], None]] = []
        later: list[Callable[[], None]] = []  # after the next op
        run: Instruction | None = None

        def close() -> None:
            nonlocal run
            if run is not None:
                calls = [*before, *self._compile_run(run, receives, sends), *after]
                ops.append((run.row, calls[0] if len(calls) == 1 else partial(_call_all, calls)))
                run = None
                receives.clear()
                sends.clear()
                before.clear()
                after[:] = later
                later.clear()

        lines = list(self._program.instructions(self._rank))
        # With several reductions of a stage a step, what else waits for its gradients waits for the last.
        last = {line.number: line for line in lines if line.action is Action.REDUCE}
        for line in lines:
            match line.action:
                case Action.RECV | Action.TAKE:
                    close()
                    receives.setdefault(line.row, []).append(self._compile_receive(line))
                case Action.RUN:
                    close()
                    run = line
                case Action.SEND | Action.HAND:
                    sends.setdefault(line.row, []).append(self._compile_send(line))
                case Action.REDUCE:
                    if line is last[line.number]:
                        after += self._calls("complete", line.number)
                    after += self._calls("reduce", line.number)
                    # It runs beside the next op, and then its memory is given back.
                    later[:] = self._calls("settle")
                case Action.UNSHARD:
                    close()
                    before += self._calls("unshard", line.number)
                case Action.RESHARD:
                    after += self._calls("reshard", line.number)
        close()
        return ops

    def _compile_run(
        self,
        run: Instruction,
        receives: Mapping[int, list[_Receive]],
        sends: Mapping[int, list[_Send]],
    ) -> list[Callable[[], None]]:
        rows = range(run.row, run.row + run.number)
        calls = [self._compile_op(row, receives.get(row, []), sends.get(row, [])) for row in rows]
        last_backwards = overrides(self._participants, "last_backward")
        for index, stage in self._stages.items() if last_backwards else ():
            if self._program.last_gradient_rows.get((self._rank, index)) in rows:
                for last_backward in last_backwards:
                    calls = [last_backward(stage, partial(_call_all, calls))]
        ops = [self._program.schedule.op(row) for row in rows]
        # A forward waits layer by layer, in the stage's module.
        read = [op.stage for op in ops if op.kind not in (Kind.F, Kind.W)]
        added = [op.stage for op in ops if op.kind not in (Kind.F, Kind.R)]
        return [
            *(call for stage in read for call in self._calls("before", stage)),
            *(call for stage in added for call in self._calls("before_gradients", stage)),
            *calls,
        ]

    def _calls(self, method: str, *args: int) -> list[Callable[[], None]]:
        return [partial(bound, *args) for bound in overrides(self._participants, method)]

    def _compile_receive(self, line: Instruction) -> _Receive:
        tag, peer = self._program.tag(line.row, line.route), line.peer
        if line.action is Action.TAKE:
            local = self._state.local
            return lambda: local.pop(tag)
        channel = self._channel
        assert channel is not None
        return lambda: channel.recv(peer, tag)

    def _compile_send(self, line: Instruction) -> _Send:
        receiver = next(row for row, route in self._program.consumers(line.row) if route == line.route)
        tag, peer = self._program.tag(receiver, line.route), line.peer
        if line.action is Action.HAND:
            local = self._state.local
            return lambda message: local.__setitem__(tag, message)
        channel = self._channel
        assert channel is not None
        return lambda message: channel.send(peer, tag, message)

    def _compile_op(self, row: int, receives: list[_Receive], sends: list[_Send]) -> Callable[[], None]:
        op = self._program.schedule.op(row)
        stage, microbatch = self._stages[op.stage], op.microbatch
        index = row - self._first_row

        def run_weight_backward(_: Messages | None) -> None:
            stage.backward_weight(microbatch)

        def run_recompute(_: Messages | None) -> None:
            stage.recompute(microbatch)

        if op.kind == Kind.F:
            inputs = [self._compile_input(microbatch), *receives] if op.stage == 0 else receives
            if op.stage == self._last_stage:
                run_last_forward = self._compile_last_forward(stage, microbatch)
                return self._timed(stage, index, run_last_forward, _receive_all(inputs))
            run_forward = self._compile_forward(stage, microbatch)
            return self._timed(stage, index, run_forward, _receive_all(inputs), _send_all(sends))
        if op.kind == Kind.W:  # does nothing if the I before it was merged with it and ran the full backward
            return self._timed(stage, index, run_weight_backward)
        if op.kind == Kind.R:
            return self._timed(stage, index, run_recompute)
        half = op.kind == Kind.I and op not in self._backwards.merged
        run_backward = partial(stage.backward_input if half else stage.backward, microbatch)
        grads = _receive_all(receives) if receives else None
        if op.stage == 0:
            sends = [self._compile_input_gradient(microbatch), *sends]
        return self._timed(stage, index, run_backward, grads, _send_all(sends))

    def _timed(
        self,
        stage: Stage,
        index: int,
        run: Callable[[Any], Any],
        receive: _ReceiveAll | None = None,
        send: Callable[[Any], None] | None = None,
    ) -> Callable[[], None]:
        """Return an op: receive its inputs, run it, record its times and the bytes held after it, send its outputs."""
        state, records = self._state, self._records
        start, end, held = records.start, records.end, records.held

        def run_op() -> None:
            state.inputs = inputs = receive() if receive is not None else None
            now = records.now
            start[index] = now()
            outputs = run(inputs)
            end[index] = now()
            held[index] = stage.held_bytes
            if send is not None:
                send(outputs)

        return run_op

    def _forward_options(self, stage: Stage, microbatch: int) -> dict[str, Any]:
        key = (stage.index, microbatch)
        options = {"split": key in self._backwards.split, "inputs_only": key in self._backwards.dropped}
        return {name: True for name, given in options.items() if given}  # a call without keywords is faster

    def _compile_input(self, microbatch: int) -> _Receive:
        # The work is looked up when the op runs: each step has its own.
        state = self._state
        return lambda: state.work.input(microbatch)

    def _compile_input_gradient(self, microbatch: int) -> _Send:
        state = self._state

        def keep(message: Message) -> None:
            work = state.work
            if work.options.input_grads:
                work.grads[work.batch.first + microbatch] = message

        return keep

    def _compile_forward(self, stage: Stage, microbatch: int) -> Callable[[Messages], Messages]:
        if not self._trains:
            return partial(stage.evaluate, microbatch)
        return partial(stage.forward, microbatch, **self._forward_options(stage, microbatch))

    def _compile_last_forward(self, stage: Stage, microbatch: int) -> Callable[[Messages], None]:
        state = self._state
        run: Callable[[int, Messages, LossInputs], LossReport] = stage.evaluate_with_loss
        if self._trains:
            run = partial(stage.forward_with_loss, **self._forward_options(stage, microbatch))

        def run_last_forward(messages: Messages) -> None:
            work = state.work
            batch = work.batch
            weight = batch.weights[microbatch]
            target = batch.targets[microbatch] if batch.targets else None
            options = work.options
            loss_inputs = LossInputs(target, weight, options.outputs, options.log_probs)
            report = run(microbatch, messages, loss_inputs)
            number = batch.first + microbatch
            if report.loss is not None:
                work.losses.total[number] = report.loss
                work.losses.parts[number] = report.parts
                work.losses.weights[number] = weight.weight
                if report.has_graph:
                    work.has_graph = True
            if options.outputs:
                work.outputs[number] = report.output

        return run_last_forward


def _call_all(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


def _receive_all(receives: Sequence[_Receive]) -> _ReceiveAll:
    if len(receives) == 1:
        only = receives[0]
        return lambda: (only(),)
    receives = tuple(receives)
    return lambda: tuple([receive() for receive in receives])


def _send_all(sends: Sequence[_Send]) -> _SendAll:
    if len(sends) == 1:
        only = sends[0]
        return lambda messages: only(messages[0])
    sends = tuple(sends)

    def send_all(messages: Messages) -> None:
        for send, message in zip(sends, messages, strict=True):
            send(message)

    return send_all
