"""Run one rank of any Program over any transport.

The rank's instructions are compiled once (`penstock.runtime.op_compiler`). A step runs the compiled ops in order, and has
`penstock.parallel.participant.Participant` take part, which finish the reductions and agree with all ranks that it is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress

import torch

from penstock.base.errors import CallOrderError, PenstockError, WaitTimeoutError, describe_error
from penstock.parallel.participant import Outcome, Participant, Step, StepFailure, overrides
from penstock.runtime.batch.work import Work
from penstock.runtime.consensus import (
    APART,
    COUNTED,
    GRAPH,
    TRAINABLE,
    OtherRanks,
    compare_marks,
    explain,
    find_nonfinite,
    marks_of,
)
from penstock.runtime.failure_report import explain_error
from penstock.runtime.health.rank_progress import END, ROW, STEP, WAITS, new_progress
from penstock.runtime.op_compiler import OpCompiler, OpRecords, StepState, collectives_of
from penstock.runtime.transport.channel import Channel
from penstock.schedule.ops import Kind, Op
from penstock.schedule.program import Program
from penstock.stage.compute.stage import Stage
from penstock.stage.devices import device_of


class Executor:
    """Executor of one rank's ops, step by step.

    Args:
        around: participants around the messages of the pipeline's ranks: what other pipelines wait for.
        within: participants within them.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        stages: Mapping[int, Stage],
        channel: Channel | None,
        around: Sequence[Participant] = (),
        within: Sequence[Participant] = (),
    ) -> None:
        self.program = program
        self.rank = rank
        self.stages = stages
        self.channel = channel
        self._microbatches = program.schedule.microbatches
        rows = program.schedule.rows(rank)
        self.first_row = rows.start
        count = rows.stop - rows.start
        self.trains = bool((program.schedule.kind != Kind.F).any())
        self.device = device_of([stage.module for stage in stages.values()])
        self.records = OpRecords(count, self.device)
        self.progress = channel.progress if channel is not None else new_progress()
        self._state = StepState()
        ranks = () if channel is None else (OtherRanks(program, rank, channel, self.progress),)
        # The scale of gradients is read before anything changes them. Replicas come before the ranks, so that they are told
        # of a failure last: what is still reduced may wait for ranks that wait for this one. Sums over holders come after,
        # since replicas add these sums; they are around a store, as they are of gradients at home. Exchanges of tokens end
        # before the sums over holders and replicas: a rank that waits for gradients may be one that a process waits for
        # which waits for this one's tokens. Checks come last, when all can be told what they find.
        self.participants: tuple[Participant, ...] = (*around, *ranks, *within)
        self._begins = overrides(self.participants, "begin")
        self._ends = overrides(self.participants, "end")
        inner_first = self.participants[::-1]
        self._finishes = overrides(inner_first, "finish")
        self._agrees = overrides(inner_first, "agree")
        self._abandons = overrides(self.participants, "abandon")
        self._sharded_grads = overrides(self.participants, "sharded_grads")
        self._collectives = collectives_of(program, rank) if program.residency is not None else []
        # Those with collectives in this executor's steps, for the trace.
        self.buckets = [b for each in self.participants for b in each.recorded] if self._collectives else []
        compiler = OpCompiler(
            program,
            rank,
            stages,
            channel,
            state=self._state,
            records=self.records,
            participants=inner_first,
            trains=self.trains,
        )
        self.ops = compiler.compile()
        self._last_stage = program.schedule.stages - 1

    @property
    def sums_at_the_end(self) -> bool:
        """True if gradients change after the last op."""
        return bool(self._finishes)

    def run(self, step: int, work: Work) -> Work:
        """Run this rank's ops of a step, and agree with all ranks on its losses; messages of other steps are ignored."""
        options = work.options
        begun = self._step(step, options.number, options.reduces)
        try:
            self.records.begin(options.timed)
            self._begin(begun, work)
            with torch.set_grad_enabled(self.trains):
                self._run_ops()
            self.progress[ROW] = END
            for stage in self.stages.values():
                stage.end()
            for finish in self._finishes:
                finish()
            outcome = self._outcome(begun.flags)
            for agree in self._agrees:
                agree(outcome)
            outcome.refusal, outcome.flags = compare_marks(outcome.flags, outcome.refusal)
        except BaseException as error:
            # The progress stays: other ranks may still ask which rank this one was waiting for.
            report = explain_error(
                error, self.rank, self.program, self.channel, self.progress, self._state.inputs
            )
            self._abandon(error, report, ran=True)
            if report is error:
                raise
            raise report from error
        for end in self._ends:
            end(begun, outcome)
        self.progress[STEP] = 0
        self._state.clear()
        work.losses, work.flags = outcome.losses, outcome.flags
        if outcome.refusal is not None:
            raise explain(outcome.refusal, work.losses, self._last_stage, step)
        return work

    def refuse(self, step: int, error: Exception, reduces: bool = False) -> None:
        """Tell the other ranks that this process cannot run a step.

        Args:
            reduces: whether the step would reduce gradients over replicas, and so waits for this one there.
        """
        text = f"rank {self.rank}: {describe_error(error)}"
        report = error if isinstance(error, PenstockError) else PenstockError(text)
        with suppress(Exception):
            self._begin_participants(self._step(step, 0, reduces))
        self._abandon(error, report, ran=False)

    def _step(self, number: int, trained: int, reduces: bool) -> Step:
        return Step(
            number=number,
            trained=trained,
            trains=self.trains,
            reduces=reduces,
            microbatches=self._microbatches,
            collectives=self._collectives,
            op=self._present_op,
        )

    def _begin(self, step: Step, work: Work) -> None:
        progress = self.progress
        self._state.work = work
        progress[STEP], progress[ROW], progress[WAITS] = step.number, self.first_row, 0
        batch = work.batch
        for stage in self.stages.values():
            stage.begin(work.options.number, batch.first, (*batch.inputs, *batch.targets))
        self._begin_participants(step)

    def _begin_participants(self, step: Step) -> None:
        """Begin a step. After an error the others begin, too, so that those who wait for this rank can be told of it."""
        errors = []
        for begin in self._begins:
            try:
                begin(step)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _present_op(self) -> Op:
        return self.program.schedule.op(int(self.progress[ROW]))

    def _run_ops(self) -> None:
        progress = self.progress
        # The loop stores each op's row as it goes, so a step spends no statement on it.
        for progress[ROW], op in self.ops:
            op()

    def _outcome(self, flags: int) -> Outcome:
        """Return what this rank reports: its losses, the first number that is not finite, and its flags."""
        work, refusal = self._state.work, None
        if work.options.check_finite and self.trains:
            refusal = find_nonfinite(
                self.stages,
                work.losses,
                self._last_stage,
                work.batch.first,
                work.batch.ignored_index,
                self._sharded_grads,
            )
        flags |= APART if work.batch.apart else 0
        if self.trains:
            flags |= COUNTED if any(work.losses.weights.values()) else 0
            flags |= GRAPH if work.has_graph else 0
            flags |= TRAINABLE if any(s.module.trains_any for s in self.stages.values()) else 0
        return Outcome(work.losses, refusal, flags | marks_of(work.batch.digest))

    def _abandon(self, error: BaseException, report: BaseException, ran: bool) -> None:
        """Drop what is left of a step, and tell all who wait for this rank that it failed."""
        self._state.clear()
        for stage in self.stages.values():
            stage.drop()
        # Others do not come if they are in another call, or did not come in time.
        failure = StepFailure(error, report, ran, isinstance(error, CallOrderError | WaitTimeoutError))
        with ExitStack() as inner_first:
            for abandon in self._abandons:
                inner_first.callback(abandon, failure)
