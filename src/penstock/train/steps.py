"""The steps of a run, one after another: what each leaves behind, what skips it, and what ends them early."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter

from penstock.errors import NonFiniteError
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.run_group import RunGroup
from penstock.trace.bubbles import busy
from penstock.train.config.config import Config
from penstock.train.data.training_text import Text, batch_of, held_out_bits
from penstock.train.model.trainable import TrainableModel
from penstock.train.report.metrics_writer import MetricsWriter
from penstock.train.report.profile import Profile
from penstock.train.report.progress import Reporter
from penstock.train.report.traces import Traces
from penstock.train.resume import RunCheckpointer, RunProgress

Stopping = Callable[[], bool]
"""Whether this process has been asked to stop; one that has is enough."""


@dataclass(frozen=True)
class StepContext:
    """What the steps of a run work with; `stopping` is None where nothing asks."""

    config: Config
    language: TrainableModel
    text: Text
    pipe: Pipeline
    optimizer: PipelineOptimizer
    run_group: RunGroup
    reporter: Reporter
    metrics: MetricsWriter
    checkpointer: RunCheckpointer
    traces: Traces
    profiles: Profile
    stopping: Stopping | None


@dataclass(frozen=True)
class Result:
    """What the steps came to; the attributes are those of `penstock.train.loop.Outcome`."""

    loss: float | None
    held_out_bits: float
    seconds: float
    tokens_per_second: float


@dataclass(frozen=True)
class _Measured:
    """Of a step that changed the weights; `in_pipe` is the seconds of ``pipe.step``."""

    lr: float
    grad_norm: float
    in_pipe: float


class Steps:
    """Takes a run from where it stands to its last step; every process makes one.

    Args:
        run: its parts.
        standing: where it stands.
    """

    def __init__(self, run: StepContext, standing: RunProgress) -> None:
        self._run = run
        self._standing = standing
        self._began = perf_counter()
        self._taken = self._taken_since_log = 0
        self._stepping = self._since_log = 0.0
        self._bits = math.nan
        self._vote: Callable[[], float] | None = None

    def take_all(self) -> Result:
        """Take the steps that are left.

        Raises:
            StoppedError: a process was asked to stop; the run is saved.
            NonFiniteError: more steps in a row than ``train.skip_nonfinite`` were NaN or infinite.
            PenstockError: a step failed.
        """
        train = self._run.config.train
        while self._standing.done < train.steps:
            self._stop_if_asked()
            self._take(self._standing.done)
        if self._vote is not None:
            self._vote()
        if math.isnan(self._bits):
            self._evaluate()
        loss = self._standing.loss
        return Result(
            loss if math.isfinite(loss) else None,
            self._bits,
            self._seconds(),
            self._tokens(self._taken, self._stepping + self._since_log),
        )

    def _begin_vote(self) -> Callable[[], float]:
        """Begin to count the processes that were asked to stop; every step has one vote, after its forwards and backwards.

        It goes on beside the optimizer's step, and costs a step next to nothing.
        """
        run = self._run
        return (lambda: 0.0) if run.stopping is None else run.run_group.begin_total(float(run.stopping()))

    def _stop_if_asked(self) -> None:
        if not (self._vote or self._begin_vote())():
            return
        stopped = self._run.checkpointer.stop(self._standing)
        self._run.reporter.say(str(stopped))
        raise stopped

    def _take(self, step: int) -> None:
        run, train, done = self._run, self._run.config.train, step + 1
        started = perf_counter()
        self._vote = None
        try:
            with run.profiles.of(done):
                measured = self._update(step)
        except NonFiniteError as error:
            self._skip(done, error)
            measured = None
        self._taken += 1
        self._taken_since_log += 1
        self._since_log += perf_counter() - started
        run.reporter.step(done, self._standing.loss)
        if measured is not None:
            if done % train.log_every == 0 or done == train.steps:
                self._log(done, measured)
            run.traces.after(done, run.pipe)
        if done % train.eval_every == 0 or done == train.steps:
            self._evaluate()
        run.checkpointer.after_step(self._standing)

    def _update(self, step: int) -> _Measured:
        run = self._run
        x, y = batch_of(run.text, run.config, run.language, step)
        before = perf_counter()
        result = run.pipe.step(x, y)
        in_pipe = perf_counter() - before
        self._vote = self._begin_vote()
        update = run.optimizer.step()
        assert result.loss is not None, "a training step has a loss"
        assert update.grad_norm is not None, "every step is applied, and measured"
        self._standing = RunProgress(step + 1, float(result.loss))
        return _Measured(update.lr[0], float(update.grad_norm), in_pipe)

    def _skip(self, done: int, error: NonFiniteError) -> None:
        """Leave out a step that every rank has found not to be finite: no weight changes, and the data goes on."""
        run, allowed = self._run, self._run.config.train.skip_nonfinite
        # Dropout and the data of the next step go by the number of this one, whether it changed anything or not.
        run.pipe.steps = done
        run.optimizer.zero_grad()
        in_a_row = self._standing.skipped_in_a_row + 1
        where = f"step {done}: {error.what} is NaN or infinite; no weight was changed"
        if in_a_row > allowed:
            raise NonFiniteError(
                f"{where}. train.skip_nonfinite is {allowed}, and this is step number {in_a_row} in a row; a lower learning "
                "rate, a longer warm-up or clipping usually helps",
                error.stage,
                error.microbatch,
                error.what,
            ) from error
        self._standing = replace(self._standing, done=done, skipped_in_a_row=in_a_row)
        run.reporter.say(f"{where}. The step is skipped, number {in_a_row} in a row of at most {allowed}")
        run.metrics.write(
            "skipped",
            step=done,
            stage=error.stage,
            microbatch=error.microbatch,
            in_a_row=in_a_row,
            seconds=self._seconds(),
        )

    def _log(self, done: int, measured: _Measured) -> None:
        run, loss = self._run, self._standing.loss
        speed = self._tokens(self._taken_since_log, self._since_log)
        self._stepping += self._since_log
        self._since_log, self._taken_since_log = 0.0, 0
        bubble = measured_bubble(run.pipe, run.run_group, measured.in_pipe)
        run.reporter.measured(done, loss, speed, bubble)
        run.metrics.write(
            "train",
            step=done,
            loss=loss,
            lr=measured.lr,
            grad_norm=measured.grad_norm,
            tokens_per_second=speed,
            bubble=bubble,
            seconds=self._seconds(),
        )

    def _evaluate(self) -> None:
        run, done = self._run, self._standing.done
        self._bits = held_out_bits(run.pipe, run.text)
        run.reporter.say(f"step {done}: {self._bits:.3f} bits/{run.language.codec.unit} on held-out text")
        run.metrics.write("held_out", step=done, held_out_bits=self._bits, seconds=self._seconds())

    def _seconds(self) -> float:
        return perf_counter() - self._began

    def _tokens(self, steps: int, seconds: float) -> float:
        """Tokens a second."""
        config = self._run.config
        return config.train.batch * config.data.sequence * steps / seconds if steps else 0.0


def measured_bubble(pipe: Pipeline, run_group: RunGroup, seconds: float) -> float:
    """The share of the ranks' time in the last step that went neither into a forward nor into a backward.

    Args:
        pipe: right after the step.
        run_group: its processes; every one calls this.
        seconds: the step took.
    """
    trace = pipe.trace()
    assert trace is not None, "a step has just been done"
    ranks = run_group.size if pipe.in_processes else pipe.ranks
    return max(0.0, 1.0 - run_group.total(float(busy(trace).sum()) / (ranks * seconds)))
