"""The steps of a run: training, logging, evaluation, checkpoints, skipped steps and stopping early."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from time import perf_counter
from typing import Any

import torch

from penstock.errors import NonFiniteError
from penstock.heartbeat import Heartbeat
from penstock.host import process_memory
from penstock.runtime.batch.result import StepResult
from penstock.runtime.optim.optimizer import OptimizerStep, PipelineOptimizer
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.run_group import RunGroup
from penstock.trace.bubbles import busy
from penstock.train.callbacks.callback import EvaluateEvent, StepEvent, values_of
from penstock.train.callbacks.callback_list import CallbackList
from penstock.train.config.config import Config
from penstock.train.data.run_data import RunData, held_out_bits, mean_loss, training_batch
from penstock.train.model.trainable import TrainableModel
from penstock.train.report.metrics_writer import MetricsWriter
from penstock.train.report.progress import Reporter
from penstock.train.report.step_profiler import StepProfiler
from penstock.train.report.traces import Traces
from penstock.train.resume import RunCheckpointer, RunProgress

Stopping = Callable[[], bool]
"""Function that returns True if this process has been asked to stop; all processes stop if one has been asked."""


@dataclass(frozen=True)
class TrainingRun:
    """The components of a run; `stopping` is None if nothing can stop it early."""

    config: Config
    model: TrainableModel
    data: RunData
    pipe: Pipeline
    optimizer: PipelineOptimizer
    run_group: RunGroup
    reporter: Reporter
    metrics: MetricsWriter
    checkpointer: RunCheckpointer
    traces: Traces
    profiles: StepProfiler
    callbacks: CallbackList
    heartbeat: Heartbeat
    stopping: Stopping | None


@dataclass(frozen=True)
class Result:
    """The result of the steps; see the attributes of `penstock.train.loop.Outcome`."""

    loss: float | None
    held_out_bits: float
    seconds: float
    tokens_per_second: float


@dataclass(frozen=True)
class _Launched:
    """A step that this process has done, and maybe not the others.

    Attributes:
        done: number of the step, from 1.
        results: results of its batches.
        update: result of the optimizer's step.
        in_pipe: time of the last ``pipe.step`` in seconds.
        scale: factor of the loss (1 without a scaler).
    """

    done: int
    results: tuple[StepResult, ...]
    update: OptimizerStep
    in_pipe: float
    scale: float


@dataclass(frozen=True)
class _Measured:
    """Measurements of a step that changed the weights; `in_pipe` is the time of the last ``pipe.step`` in seconds."""

    done: int
    loss: float
    lr: float
    grad_norm: float
    in_pipe: float


class Trainer:
    """Trainer for the remaining steps of a run; every process has one.

    Args:
        run: the components of the run.
        progress: steps already done.
    """

    def __init__(self, run: TrainingRun, progress: RunProgress) -> None:
        self._run = run
        self._progress = progress
        self._began = perf_counter()
        self._taken = self._taken_since_log = 0
        self._stepping = self._since_log = 0.0
        self._bits = math.nan
        self._flows = run.pipe.flow is not None
        self._unread: _Launched | None = None
        self._votes: deque[Callable[[], float]] = deque()

    def train(self) -> Result:
        """Execute the remaining steps.

        Raises:
            StoppedError: if a process was asked to stop; the run is saved.
            NonFiniteError: if more steps in a row than ``train.skip_nonfinite`` were NaN or infinite.
            PenstockError: if a step failed.
        """
        train, final = self._run.config.train, self._progress.final
        if final is not None:
            values: dict[str, Any] = {each.name: final.get(each.name) for each in fields(Result)}
            return Result(**values)
        while self._progress.done < train.steps:
            self._stop_if_asked()
            self._take(self._progress.done)
        for vote in self._votes:
            vote()
        if math.isnan(self._bits):
            self._evaluate()
        loss = self._progress.loss
        return Result(
            loss if math.isfinite(loss) else None,
            self._bits,
            self._seconds(),
            self._tokens(self._taken, self._stepping + self._since_log),
        )

    def _begin_vote(self) -> Callable[[], float]:
        """Start counting the processes that were asked to stop: once a step, after its forwards and backwards.

        The sum overlaps with the optimizer's step, so that it takes almost no time.
        """
        run = self._run
        return (lambda: 0.0) if run.stopping is None else run.run_group.begin_total(float(run.stopping()))

    def _stop_if_asked(self) -> None:
        if not self._votes:
            self._votes.append(self._begin_vote())
        # Where steps flow, not all processes have done the last one; the vote before it is complete.
        if len(self._votes) <= self._flows or not self._votes.popleft()():
            return
        for vote in self._votes:
            vote()
        self._announce(self._read_last())
        stopped = self._run.checkpointer.stop(self._progress)
        self._run.reporter.say(str(stopped))
        raise stopped

    def _take(self, step: int) -> None:
        run, train, done = self._run, self._run.config.train, step + 1
        started = perf_counter()
        earlier, self._unread = self._unread, None
        with run.profiles.of(done):
            self._unread = self._launch(step)
            if earlier is not None:
                self._announce(self._read(earlier))
        self._progress = replace(self._progress, done=done)
        last = done == train.steps
        logs, evaluates = done % train.log_every == 0 or last, done % train.eval_every == 0 or last
        saves = run.checkpointer.saves(done)
        launched = self._unread
        measured = None
        if not self._flows or logs or evaluates or saves:
            measured = self._read_last()
        self._taken += 1
        self._taken_since_log += 1
        self._since_log += perf_counter() - started
        if measured is not None and logs:
            self._log(measured)
        else:
            self._announce(measured)
        if measured is not None or (self._flows and launched is not None):
            run.traces.after(done, run.pipe)
        if evaluates:
            self._evaluate()
        run.checkpointer.after_step(self._progress)

    def _launch(self, step: int) -> _Launched | None:
        """Do a step and its update; None if it was skipped."""
        run, accumulate = self._run, self._run.config.train.accumulate
        results: list[StepResult] = []
        scale = 1.0 if run.optimizer.scaler is None else run.optimizer.scaler.scale
        try:
            while True:
                # Data and dropout depend on the number of the batch.
                run.pipe.steps = step * accumulate + len(results)
                batch = training_batch(run.data, run.config, run.model, run.pipe.steps)
                before = perf_counter()
                results.append(run.pipe.step(batch.x, batch.y, **batch.named))
                in_pipe = perf_counter() - before
                if len(results) == accumulate:
                    break
                run.optimizer.step()
            # Between steps, and so in checkpoints, it is the number of steps.
            run.pipe.steps = step + 1
            self._votes.append(self._begin_vote())
            return _Launched(step + 1, tuple(results), run.optimizer.step(), in_pipe, scale)
        except NonFiniteError as error:
            # A skipped step counts as well.
            run.pipe.steps = step + 1
            run.optimizer.zero_grad()
            self._skip(step + 1, error)
            return None

    def _read_last(self) -> _Measured | None:
        """Read the result of the last step, if that has not been done; None if it was skipped."""
        last, self._unread = self._unread, None
        return None if last is None else self._read(last)

    def _read(self, launched: _Launched) -> _Measured | None:
        """Read the result of a step; None if it was skipped. Where steps flow, this waits for the other processes."""
        update = launched.update
        if self._run.optimizer.scaler is not None and update.skipped:
            self._overflow(launched)
            return None
        try:
            losses = [mean_loss(self._run.pipe, result) for result in launched.results]
        except NonFiniteError as error:
            self._skip(launched.done, error)
            return None
        loss = sum(losses) / len(losses)
        assert update.grad_norm is not None, "every step is applied, and measured"
        self._progress = RunProgress(max(self._progress.done, launched.done), loss)
        self._run.heartbeat.step = launched.done
        self._run.reporter.step(launched.done, loss)
        return _Measured(launched.done, loss, update.lr[0], float(update.grad_norm), launched.in_pipe)

    def _event(self, measured: _Measured) -> StepEvent:
        """Return a step's event with what is known without messages between the ranks."""
        samples = self._run.config.train.batch * measured.done
        return StepEvent(
            measured.done, measured.loss, measured.lr, measured.grad_norm,
            samples=samples, tokens=samples * self._run.config.data.sequence, logged=False,
        )  # fmt: skip

    def _announce(self, measured: _Measured | None) -> None:
        """Give the callbacks a step that is not logged; None for one that was skipped, or is not read yet."""
        if measured is not None and self._run.callbacks:
            self._run.callbacks.on_step(self._event(measured))

    def _overflow(self, launched: _Launched) -> None:
        """Note a step that is skipped since a gradient overflowed at this loss scale; the next step has a smaller one.

        At a scale of 1 or less the scale is not the cause, and the step counts as one that is not finite.
        """
        run, done, scaler = self._run, launched.done, self._run.optimizer.scaler
        assert scaler is not None, "it has skipped the step"
        if launched.scale <= 1:
            self._skip(done, NonFiniteError("", what=f"a gradient, at a loss scale of {launched.scale:g},"))
            return
        self._progress = replace(self._progress, done=max(self._progress.done, done))
        run.reporter.step(done, self._progress.loss)
        run.reporter.say(
            f"step {done}: a gradient overflowed at a loss scale of {launched.scale:g}; the step is skipped, and the scale "
            f"is now {scaler.scale:g}"
        )
        run.metrics.write("skipped", step=done, loss_scale=launched.scale, seconds=self._seconds())

    def _skip(self, done: int, error: NonFiniteError) -> None:
        """Skip a step that is not finite on some rank: no weight changes, and the next step takes the next batch."""
        run, allowed = self._run, self._run.config.train.skip_nonfinite
        in_a_row = self._progress.skipped_in_a_row + 1
        where = f"step {done}: {error.what} is NaN or infinite; no weight was changed"
        if in_a_row > allowed:
            raise NonFiniteError(
                f"{where}. train.skip_nonfinite is {allowed}, and this is step number {in_a_row} in a row; a lower learning "
                "rate, a longer warm-up or clipping usually helps",
                error.stage,
                error.microbatch,
                error.what,
            ) from error
        self._progress = replace(
            self._progress, done=max(self._progress.done, done), skipped_in_a_row=in_a_row
        )
        run.reporter.step(done, self._progress.loss)
        run.reporter.say(f"{where}. The step is skipped, number {in_a_row} in a row of at most {allowed}")
        run.heartbeat.step = done
        run.callbacks.on_step(StepEvent(done, seconds=self._seconds(), logged=False, skipped=where))
        run.metrics.write(
            "skipped",
            step=done,
            stage=error.stage,
            microbatch=error.microbatch,
            in_a_row=in_a_row,
            seconds=self._seconds(),
        )

    def _log(self, measured: _Measured) -> None:
        run, taken, device = self._run, self._taken_since_log, self._run.pipe.device
        seconds, self._since_log, self._taken_since_log = self._since_log, 0.0, 0
        self._stepping += seconds
        bubble = measured_bubble(run.pipe, run.run_group, measured.in_pipe)
        memory = run.run_group.each(lambda: memory_use(device))
        rss, rss_peak, allocated, peak = (tuple(column) for column in zip(*memory, strict=True))
        event = replace(
            self._event(measured),
            logged=True,
            tokens_per_second=self._tokens(taken, seconds),
            step_seconds=seconds / taken,
            bubble=bubble,
            rss=rss,
            rss_peak=rss_peak,
            cuda_allocated=allocated if on_gpu(device) else (),
            cuda_peak=peak if on_gpu(device) else (),
            seconds=self._seconds(),
        )
        run.reporter.measured(event.step, measured.loss, self._tokens(taken, seconds), bubble)
        run.metrics.write("train", **values_of(event))
        run.callbacks.on_step(event)

    def _evaluate(self) -> None:
        run, done = self._run, self._progress.done
        self._bits = held_out_bits(run.pipe, run.data)
        run.reporter.say(f"step {done}: {self._bits:.3f} bits/{run.model.tokenizer.unit} on held-out text")
        event = EvaluateEvent(done, self._bits, self._seconds())
        run.metrics.write("held_out", **values_of(event))
        run.callbacks.on_evaluate(event)

    def _seconds(self) -> float:
        return perf_counter() - self._began

    def _tokens(self, steps: int, seconds: float) -> float:
        train, sequence = self._run.config.train, self._run.config.data.sequence
        return train.batch * train.accumulate * sequence * steps / seconds if steps else 0.0


def on_gpu(device: torch.device | None) -> bool:
    """Return whether stages are on a GPU."""
    return device is not None and device.type == "cuda"


def memory_use(device: torch.device | None) -> tuple[int, int, int, int]:
    """Return this process's memory in RAM and its peak, and its tensors on the GPU and their peak since the last call.

    All in bytes; without a GPU the last two are 0.
    """
    if not on_gpu(device):
        return (*process_memory(), 0, 0)
    allocated, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return (*process_memory(), allocated, peak)


def measured_bubble(pipe: Pipeline, run_group: RunGroup, seconds: float) -> float:
    """Return the share of the ranks' time in the last step that they spent in neither a forward nor a backward.

    Args:
        pipe: pipeline that has just done a step.
        run_group: processes of the run; each of them calls this.
        seconds: duration of the step.
    """
    trace = pipe.trace()
    assert trace is not None, "a step has just been done"
    ranks = run_group.size if pipe.in_processes else pipe.ranks
    return max(0.0, 1.0 - run_group.total(float(busy(trace).sum()) / (ranks * seconds)))
