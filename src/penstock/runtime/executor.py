"""Run one rank of any Program over any transport.

The rank's instructions are compiled once (`penstock.runtime.op_compiler`). A step runs the compiled ops in order, finishes
the reductions, and ends when all ranks agree that it is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import NoReturn

import torch

from penstock.base.errors import CallOrderError, PenstockError, WaitTimeoutError, describe_error
from penstock.runtime.batch.work import Work
from penstock.runtime.clocks import clock
from penstock.runtime.consensus import (
    COUNTED,
    GRAPH,
    TRAINABLE,
    GradientScale,
    Refusal,
    agree,
    compare_marks,
    explain,
    find_nonfinite,
    marks_of,
)
from penstock.runtime.copies.fixed import FixedModules
from penstock.runtime.health.failure_report import explain_error, failure_of
from penstock.runtime.health.rank_progress import END, ROW, STEP, WAITS, new_progress
from penstock.runtime.op_compiler import OpCompiler, OpRecords, StepState
from penstock.runtime.transport.channel import Channel, Failure
from penstock.runtime.weights.replicas import ReplicaReduction
from penstock.runtime.weights.resident import ResidentReduction, collectives_of
from penstock.runtime.weights.shared import SharedGradients
from penstock.runtime.workers.layer_exchange import LayerExchange
from penstock.runtime.workers.streams import device_of
from penstock.schedule.ops import Kind, Op
from penstock.schedule.program import Action, Program
from penstock.stage.compute.stage import Stage


class Executor:
    """Executor of one rank's ops, step by step."""

    def __init__(
        self,
        program: Program,
        rank: int,
        stages: Mapping[int, Stage],
        channel: Channel | None,
        *,
        shared: SharedGradients | None = None,
        replica_reduction: ReplicaReduction | None = None,
        fixed: FixedModules | None = None,
        scale: GradientScale | None = None,
        exchange: LayerExchange | None = None,
    ) -> None:
        self.program = program
        self.rank = rank
        self.stages = stages
        self.channel = channel
        self.shared = shared
        self.replica_reduction = replica_reduction
        self.fixed = fixed
        self._exchange = exchange
        self._microbatches = program.schedule.microbatches
        self._factor: float | None = None
        rows = program.schedule.rows(rank)
        self.first_row = rows.start
        count = rows.stop - rows.start
        self.trains = bool((program.schedule.kind != Kind.F).any())
        self._scale = scale if self.trains else None
        self.device = device_of([stage.module for stage in stages.values()])
        # Two moments for each op: its start and its end.
        self.records = OpRecords(count, clock(self.device, 2 * count))
        self.progress = channel.progress if channel is not None else new_progress()
        self._state = StepState()
        resident = replica_reduction.resident if isinstance(replica_reduction, ResidentReduction) else None
        gradients = [each for each in (shared, resident or replica_reduction) if each is not None]
        self._collectives = collectives_of(program, rank) if resident is not None else []
        # Those with collectives in this executor's steps, for the trace.
        self.buckets = resident.buckets if resident is not None and self._collectives else []
        compiler = OpCompiler(
            program,
            rank,
            stages,
            channel,
            state=self._state,
            records=self.records,
            gradients=gradients,
            weights=resident,
            trains=self.trains,
        )
        self._sharded_layers = compiler.sharded_layers
        self.ops = compiler.compile()
        self._last_stage = program.schedule.stages - 1
        self._collector = program.schedule.placement.holders[-1][0]
        self._ranks = program.schedule.ranks
        self._end_tag = program.tags  # after the tags of all messages

    def run(self, step: int, work: Work) -> Work:
        """Run this rank's ops of a step, and agree with all ranks on its losses; messages of other steps are ignored."""
        # Before the ops add to the gradients, which would look like a change by the program.
        self._factor = None if self._scale is None else self._scale.factor()
        self._begin(step, work)
        gathers, report = False, None
        try:
            with self._reducing(step, work.options.reduces), torch.set_grad_enabled(self.trains):
                try:
                    # Left before the reduction, which waits for replicas that may wait for this one's tokens.
                    with self._exchanging():
                        if self.fixed is not None:
                            self.fixed.check(self.trains)
                        if self.shared is not None:
                            self.shared.begin()
                        self._run_ops()
                    self.progress[ROW] = END
                    self._finish_gradients()
                    refusal, flags = self._agree()
                except BaseException as error:
                    # Before the reduction ends: what it still has to gather may wait for ranks that wait for this one.
                    report = self._report(step, error)
                    raise
            if self.replica_reduction is not None:
                gathers = True
                work.losses, refusal, flags = self.replica_reduction.gather(
                    work.losses, refusal, flags, self._microbatches
                )
            refusal, work.flags = compare_marks(flags, refusal)
        except BaseException as error:
            # Of a step that reduces gradients, the reduction tells the other replicas.
            told = gathers or (self.trains and work.options.reduces)
            report = report or self._report(step, error)
            self._fail(error, report, None if told else self.replica_reduction)
        if self.channel is not None:
            self.channel.finish()
        self.progress[STEP] = 0
        self._state.clear()
        if refusal is not None:
            raise explain(refusal, work.losses, self._last_stage, step)
        if self._scale is not None:
            self._scale.remember(work.options.number)
        return work

    def refuse(self, step: int, error: Exception, reduces: bool = False) -> None:
        """Tell the other ranks that this process cannot run a step.

        Args:
            reduces: whether the step would reduce gradients over replicas, and so waits for this one there.
        """
        text = (
            str(error) if isinstance(error, PenstockError) else f"rank {self.rank}: {describe_error(error)}"
        )
        if self._exchange is not None:
            self._exchange.begin(step, self._microbatches, self._present_op)
            self._exchange.tell(text)
            self._exchange.note_failure()
        if self.channel is not None:
            self.channel.open(step, self.trains, self._microbatches)
            self.channel.fail(Failure(self.rank, step, text))
            self._drain(error)
        if self.replica_reduction is None or _was_told(error):
            return
        if not reduces:
            if self._collectives:  # the other replicas wait for its part of their weights
                with suppress(Exception), self._reducing(step, False):
                    raise error
            self.replica_reduction.tell(text)
            return
        with suppress(Exception), self._reducing(step, True):
            raise error

    def _begin(self, step: int, work: Work) -> None:
        progress = self.progress
        if self._exchange is not None:
            self._exchange.begin(step, self._microbatches, self._present_op)
        self._state.work = work
        progress[STEP], progress[ROW], progress[WAITS] = step, self.first_row, 0
        batch = work.batch
        for stage in self.stages.values():
            stage.begin(work.options.number, batch.first, (*batch.inputs, *batch.targets))
        self._sharded_layers.set(in_step=True)
        if self.channel is not None:
            self.channel.open(step, self.trains, self._microbatches)

    def _present_op(self) -> Op:
        return self.program.schedule.op(int(self.progress[ROW]))

    def _run_ops(self) -> None:
        progress = self.progress
        # The loop stores each op's row as it goes, so a step spends no statement on it.
        for progress[ROW], op in self.ops:
            op()

    def _finish_gradients(self) -> None:
        for stage in self.stages.values():
            stage.end()
        self._sharded_layers.set(in_step=False)
        # Replicas add the sums over holders, so these come first.
        if self.shared is not None:
            self.shared.finish()
        if self.replica_reduction is not None and self.trains:
            self.replica_reduction.finish()

    def _report(self, step: int, error: BaseException) -> BaseException:
        """Tell the other ranks of the pipeline what failed, and return the error to raise."""
        # The progress stays: other ranks may still ask which rank this one was waiting for.
        report = explain_error(
            error, self.rank, self.program, self.channel, self.progress, self._state.inputs
        )
        self._clear()
        if self._exchange is not None:
            self._exchange.note_failure()
        if self.shared is not None:
            self.shared.abandon()
        if self.channel is not None:
            self.channel.fail(failure_of(error, report, self.rank, step, self.program, self.progress))
        return report

    def _fail(
        self, error: BaseException, report: BaseException, replicas: ReplicaReduction | None
    ) -> NoReturn:
        self._drain(error)
        if replicas is not None and isinstance(error, Exception) and not _was_told(error):
            replicas.tell(f"{type(report).__name__}: {report}")
        if report is error:
            raise error
        raise report from error

    def _drain(self, error: BaseException) -> None:
        """Take what the other ranks still send, unless they are in another call, do not send, or a user interrupts."""
        if self.channel is not None and isinstance(error, Exception) and not _was_told(error):
            lines = self.program.instructions(self.rank)
            self.channel.drain([line.peer for line in lines if line.action is Action.RECV])

    def _clear(self) -> None:
        self._state.clear()
        for stage in self.stages.values():
            stage.drop()
        self._sharded_layers.abandon()

    def _reducing(self, step: int, reduces: bool) -> AbstractContextManager[None]:
        if self.replica_reduction is None or not (self.trains or self._collectives):
            return nullcontext()
        return self.replica_reduction.step(step, reduces, self._microbatches, self._collectives)

    def _exchanging(self) -> AbstractContextManager[None]:
        return nullcontext() if self._exchange is None else self._exchange.exchanging()

    def _agree(self) -> tuple[Refusal | None, int]:
        """Report this rank's losses, refusal and flags, and return the refusal and the flags of all ranks."""
        work = self._state.work
        refusal, flags = None, 0
        if work.options.check_finite and self.trains:
            sharded_grads = (
                self.replica_reduction.sharded_grads if self.replica_reduction is not None else None
            )
            refusal = find_nonfinite(
                self.stages,
                work.losses,
                self._last_stage,
                work.batch.first,
                work.batch.ignored_index,
                sharded_grads,
            )
        if self.trains:
            flags = COUNTED if any(work.losses.weights.values()) else 0
            flags |= GRAPH if work.has_graph else 0
            flags |= TRAINABLE if any(s.module.trains_any for s in self.stages.values()) else 0
        flags |= marks_of(work.batch.digest, self._factor)
        return agree(
            self.channel,
            rank=self.rank,
            collector=self._collector,
            ranks=self._ranks,
            tag=self._end_tag,
            losses=work.losses,
            refusal=refusal,
            flags=flags,
        )


def _was_told(error: BaseException) -> bool:
    """Return whether an error says that other ranks do not come, so that nothing is to be had from them."""
    return isinstance(error, CallOrderError | WaitTimeoutError)
