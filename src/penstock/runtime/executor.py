"""The one executor: it runs any Program, one rank of it, over any transport.

At the start the rank's instructions are compiled to a list of closures, one an op, each of which takes its input,
computes, records when, hands over the result. A step is then a walk through that list. Two kinds of instruction need no
closure: POST is the transport's, which keeps as many receives posted as the edge has slots, across steps; and FREE is
what a stage does of itself at the end of B or W.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from penstock.errors import PeerError
from penstock.runtime.backwards import Backwards
from penstock.runtime.batch.work import Work
from penstock.runtime.closures import Give, GiveAll, Take, TakeAll, all_given, all_taken, one_after_another
from penstock.runtime.consensus import (
    COUNTED,
    GRAPH,
    TRAINABLE,
    Refusal,
    agree,
    compare_marks,
    explain,
    find_nonfinite,
    marks_of,
)
from penstock.runtime.copies.fixed import FixedModules
from penstock.runtime.health.failure_report import explained
from penstock.runtime.health.rank_progress import END, ROW, STEP, WAITS, new_words
from penstock.runtime.tracing.clocks import clock
from penstock.runtime.transport.channel import Channel, Failure
from penstock.runtime.weights.replicas import Replicas
from penstock.runtime.weights.shared import SharedGradients
from penstock.runtime.workers.streams import device_of
from penstock.schedule.ops import Kind
from penstock.schedule.program import Action, Instruction, Program
from penstock.stage.compute.runner import LossInputs, LossReport, Messages
from penstock.stage.compute.stage import Stage
from penstock.stage.values import Message


class Executor:
    """One rank's Program, compiled.

    Args:
        program: what to run.
        rank: which rank's part.
        stages: the stages this rank holds, by number.
        channel: its end of the transport; None for a single rank, which needs none.
        shared: the sums of the gradients of parameters that other ranks hold, too; None if there are none.
        replicas: the sums over the pipeline's replicas; None if there are none.
        fixed: what the stages are made of, where there are copies; None if there are none.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        stages: Mapping[int, Stage],
        channel: Channel | None,
        shared: SharedGradients | None = None,
        replicas: Replicas | None = None,
        fixed: FixedModules | None = None,
    ) -> None:
        self.program = program
        self.rank = rank
        self.stages = stages
        self.channel = channel
        self.shared = shared
        self.replicas = replicas
        self.fixed = fixed
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
        self._inputs: Messages | None = None
        self._handed: dict[int, Message] = {}
        self.words = channel.words if channel is not None else new_words()
        self._ops: list[tuple[int, Callable[[], None]]] = []
        self._backwards = Backwards.of(program, rank)
        self._compile()
        self._collector = program.schedule.placement.holders[-1][0]

    def run(self, step: int, work: Work) -> Work:
        """Run one step.

        Args:
            step: its number, the same on every rank; a message of another step is never taken for one of this.
            work: this rank's inputs; the results are filled in, with all losses in every process.

        Raises:
            StageError: an op failed here; names rank, stage, op and microbatch, with the cause chained.
            NonFiniteError: a loss or a gradient is NaN or infinite, on whichever rank.
            PeerError: another rank failed first.
            ReplicaError: what there are copies of was changed in a way that they cannot follow.
            WaitTimeoutError: a wait ran out.
        """
        self._work = work
        words, finding = self.words, None
        words[STEP], words[ROW], words[WAITS] = step, self.first_row, 0
        for stage in self.stages.values():
            stage.begin(work.turn, work.first_microbatch)
        if self.channel is not None:
            self.channel.open(step)
        try:
            with self._reducing(step, work.reduces), torch.set_grad_enabled(self.trains):
                if self.fixed is not None:
                    self.fixed.check(self.trains)
                if self.shared is not None:
                    self.shared.begin()
                for words[ROW], op in self._ops:
                    op()
                words[ROW] = END
                for stage in self.stages.values() if self.trains else ():
                    stage.end()
                if self.shared is not None:
                    self.shared.finish()
                if self.replicas is not None and self.trains:
                    self.replicas.finish()
                finding, work.flags = self._agree()
            if self.replicas is not None:
                work.losses, finding, work.flags = self.replicas.gather(work.losses, finding, work.flags)
        except BaseException as error:
            # The words stay as they are: others may still ask for whom this rank has waited.
            told = explained(error, self.rank, self.program, self.channel, words, self._inputs)
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
        words[STEP] = 0
        self._work, self._inputs = Work(), None
        if finding is not None:
            raise explain(finding, work.losses, self.program.schedule.stages - 1, step)
        return work

    def _reducing(self, step: int, reduces: bool) -> AbstractContextManager[None]:
        if self.replicas is None or not self.trains:
            return nullcontext()
        return self.replicas.step(step, reduces)

    def _complete(self, stage: int) -> None:
        """The rank's gradients of a stage are complete."""
        if self.shared is not None:
            self.shared.complete(stage)
        if self.replicas is not None:
            self.replicas.complete(stage)

    def _clean_up(self) -> None:
        self._handed.clear()
        self._work, self._inputs = Work(), None
        for stage in self.stages.values():
            stage.drop()
        if self.shared is not None:
            self.shared.abandon()

    def _agree(self) -> tuple[Refusal | None, int]:
        work, schedule = self._work, self.program.schedule
        finding, flags = None, 0
        if work.finite and self.trains:
            last, first = schedule.stages - 1, work.first_microbatch
            more = self.replicas.sharded_grads if self.replicas is not None else None
            finding = find_nonfinite(self.stages, work.losses, last, first, more)
        if self.trains:
            stages = self.stages.values()
            flags = COUNTED if any(work.losses.weights.values()) else 0
            flags |= GRAPH if work.has_graph else 0
            flags |= TRAINABLE if any(stage.module.trains_any for stage in stages) else 0
        finding, flags = agree(
            self.channel,
            self.rank,
            self._collector,
            schedule.ranks,
            self.program.tags,
            work.losses,
            finding,
            flags | marks_of(work.digest),
        )
        return compare_marks(flags, finding)

    # Compilation: one closure an op, made of what precedes its RUN, the RUN, and what follows it.

    def _compile(self) -> None:
        takes: dict[int, list[Take]] = {}
        run: Instruction | None = None
        gives: dict[int, list[Give]] = {}
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
                    takes.setdefault(line.row, []).append(self._take(line))
                case Action.RUN:
                    if run is not None:
                        close()
                    run = line
                case Action.SEND | Action.HAND:
                    gives.setdefault(line.row, []).append(self._give(line))
                case Action.REDUCE:
                    complete.append(line.number)
        close()

    def _close_op(
        self,
        run: Instruction,
        takes: dict[int, list[Take]],
        gives: dict[int, list[Give]],
        complete: list[int],
    ) -> None:
        rows = tuple(range(run.row, run.row + run.number))
        parts = [self._compute(row, takes.get(row, []), gives.get(row, [])) for row in rows]
        if self.shared is not None or self.replicas is not None:
            parts += [partial(self._complete, stage) for stage in complete]
        self._ops.append((run.row, parts[0] if len(parts) == 1 else partial(one_after_another, parts)))

    def _take(self, line: Instruction) -> Take:
        tag, peer = self.program.tag(line.row, line.route), line.peer
        if line.action is Action.TAKE:
            handed = self._handed
            return lambda: handed.pop(tag)
        channel = self.channel
        assert channel is not None
        return lambda: channel.recv(peer, tag)

    def _give(self, line: Instruction) -> Give:
        taker = next(t for t, route in self.program.takers(line.row) if route == line.route)
        tag, peer = self.program.tag(taker, line.route), line.peer
        if line.action is Action.HAND:
            handed = self._handed
            return lambda message: handed.__setitem__(tag, message)
        channel = self.channel
        assert channel is not None
        return lambda message: channel.send(peer, tag, message)

    def _compute(self, row: int, takes: list[Take], gives: list[Give]) -> Callable[[], None]:
        op = self.program.schedule.op(row)
        stage = self.stages[op.stage]
        slot = row - self.first_row
        if op.kind == Kind.F:
            take = all_taken([self._input(op.microbatch), *takes] if op.stage == 0 else takes)
            if op.stage == self.program.schedule.stages - 1:
                return self._last_forward(op.microbatch, stage, slot, take)
            return self._forward(op.microbatch, stage, slot, take, all_given(gives))
        if op.kind == Kind.W:
            return self._timed(partial(stage.backward_weight, op.microbatch), stage, slot)
        if op.kind == Kind.R:
            return self._timed(partial(stage.recompute, op.microbatch), stage, slot)
        half = op.kind == Kind.I and op not in self._backwards.merged
        run = stage.backward_input if half else stage.backward
        give = all_given([self._input_gradient(op.microbatch), *gives] if op.stage == 0 else gives)
        return self._backward(op.microbatch, stage, run, slot, all_taken(takes) if takes else None, give)

    def _how(self, stage: Stage, microbatch: int) -> dict[str, Any]:
        """How a forward is to run."""
        key = (stage.index, microbatch)
        return {"split": key in self._backwards.split, "drop": key in self._backwards.dropped}

    def _input(self, microbatch: int) -> Take:
        return lambda: self._work.input(microbatch)

    def _input_gradient(self, microbatch: int) -> Give:
        def give(message: Message) -> None:
            if self._work.input_grads:
                self._work.grads[self._work.first_microbatch + microbatch] = message

        return give

    def _forward(
        self, microbatch: int, stage: Stage, slot: int, take: TakeAll, give: GiveAll
    ) -> Callable[[], None]:
        start, end, held, now = self.start, self.end, self.held, self.now
        run: Callable[[int, Messages], Messages] = stage.evaluate
        if self.trains:
            run = partial(stage.forward, **self._how(stage, microbatch))

        def op() -> None:
            self._inputs = messages = take()
            start[slot] = now()
            outputs = run(microbatch, messages)
            end[slot] = now()
            held[slot] = stage.held_bytes
            give(outputs)

        return op

    def _last_forward(self, microbatch: int, stage: Stage, slot: int, take: TakeAll) -> Callable[[], None]:
        start, end, held, now = self.start, self.end, self.held, self.now
        run: Callable[[int, Messages, LossInputs], LossReport] = stage.evaluate_with_loss
        if self.trains:
            run = partial(stage.forward_with_loss, **self._how(stage, microbatch))

        def op() -> None:
            work = self._work
            self._inputs = messages = take()
            ends = LossInputs(
                work.targets[microbatch] if work.targets else None, work.shares[microbatch], work.keep_outputs
            )
            start[slot] = now()
            report = run(microbatch, messages, ends)
            end[slot] = now()
            held[slot] = stage.held_bytes
            number = work.first_microbatch + microbatch
            if report.loss is not None:
                work.losses.total[number] = report.loss
                work.losses.parts[number] = report.parts
                work.losses.weights[number] = ends.share.weight
                if report.has_graph:
                    work.has_graph = True
            if work.keep_outputs:
                work.outputs[number] = report.output

        return op

    def _backward(
        self,
        microbatch: int,
        stage: Stage,
        run: Callable[[int, Messages | None], Messages],
        slot: int,
        take: TakeAll | None,
        give: GiveAll,
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

    def _timed(self, run: Callable[[], None], stage: Stage, slot: int) -> Callable[[], None]:
        """An op that takes and gives nothing."""
        start, end, held, now = self.start, self.end, self.held, self.now

        def op() -> None:
            start[slot] = now()
            run()
            end[slot] = now()
            held[slot] = stage.held_bytes

        return op
