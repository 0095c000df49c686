"""The steps of a run: training, logging, evaluation, checkpoints, skipped steps and stopping early."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from time import perf_counter
from typing import Any

import torch

from penstock.base.errors import NonFiniteError
from penstock.base.host import process_memory
from penstock.runtime.batch.work import StepResult
from penstock.runtime.kept_traces import KeptTraces
from penstock.runtime.optim.optimizer import OptimizerStep, PipelineOptimizer
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.run_group import RunGroup
from penstock.show.run_page import RunPage
from penstock.trace.bubbles import busy
from penstock.trace.metrics_writer import MetricsWriter
from penstock.train.callbacks.callback import EvaluateEvent, StepEvent, TraceEvent, values_of
from penstock.train.callbacks.callback_list import CallbackList
from penstock.train.config.config import Config
from penstock.train.data.run_data import RunData, held_out_bits, mean_loss, training_batch
from penstock.train.model.trainable import TrainableModel
from penstock.train.resume import RunCheckpointer, RunProgress
from penstock.train.run_log import Reporter
from penstock.train.step_profiler import StepProfiler

Stopping = Callable[[], bool]
"""Function that returns True if this process has been asked to stop; all processes stop if one has been asked."""


@dataclass(frozen=True, kw_only=True)
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
    traces: KeptTraces
    profiles: StepProfiler
    callbacks: CallbackList
    page: RunPage
    stopping: Stopping | None


@dataclass(frozen=True)
class Result:
    """The result of the steps; see the attributes of `penstock.train.loop.Outcome`."""

    loss: float | None
    held_out_bits: float
    seconds: float
    tokens_per_second: float


class Trainer:
    """Trainer for the remaining steps of a run; every process has one."""

    def __init__(self, run: TrainingRun, progress: RunProgress) -> None:
        self._run = run
        self.progress = progress
        self._began = math.nan
        self._taken = self._taken_since_log = 0
        self._stepping = self._since_log = 0.0
        self._bits = math.nan
        self._vote: Callable[[], float] | None = None

    def train(self) -> Result:
        """Execute the remaining steps."""
        self._began = perf_counter()
        train, final = self._run.config.train, self.progress.final
        if final is not None:
            values: dict[str, Any] = {each.name: final.get(each.name) for each in fields(Result)}
            return Result(**values)
        while self.progress.done < train.steps:
            self._stop_if_asked()
            self.train_step(self.progress.done)
        # Begun with the last step. It is a collective, so every process has to wait for its end.
        if self._vote is not None:
            self._vote()
        # No step was left to do, and the last one would have evaluated.
        if math.isnan(self._bits):
            self._evaluate()
        loss = self.progress.loss
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
        vote, self._vote = self._vote or self._begin_vote(), None
        if vote():
            stopped = self._run.checkpointer.stop(self.progress)
            self._run.reporter.say(str(stopped))
            raise stopped

    def train_step(self, step: int) -> None:
        """Make one update of the weights: batches, forwards and backwards, the update, and what is due after it."""
        run, config, done = self._run, self._run.config, step + 1
        train, pipe, optimizer = config.train, run.pipe, run.optimizer
        scale = 1.0 if optimizer.scaler is None else optimizer.scaler.scale
        started = perf_counter()
        event: StepEvent | None = None
        in_pipe = 0.0
        last = done == train.steps
        logs = done % train.log_every == 0 or last
        pipe.tracing = logs or run.traces.due(done) or None
        with run.profiles.of(done):
            try:
                # 1. Forwards and backwards of the batches whose gradients make the update.
                results: list[StepResult] = []
                for number in range(train.accumulate):
                    if number:
                        optimizer.step()  # counts the batch before
                    pipe.steps = step * train.accumulate + number  # data and dropout depend on it
                    batch = training_batch(run.data, config, run.model, pipe.steps)
                    before = perf_counter()
                    results.append(pipe.step(batch.x, batch.y))
                    in_pipe = perf_counter() - before
                pipe.steps = done  # between steps, and so in checkpoints, it is the number of updates
                # 2. The update, clipped, while the processes count which of them were asked to stop.
                self._vote = self._begin_vote()
                update = optimizer.step()
                # 3. What came of it.
                if update.skipped:
                    self._overflow(done, scale)
                else:
                    losses = [mean_loss(pipe, result.loss) for result in results]
                    event = self._applied(done, sum(losses) / len(losses), update)
            except NonFiniteError as error:
                pipe.steps = done  # a skipped step counts as well
                optimizer.zero_grad()
                self._skip(done, error)
        # 4. Logs, traces, evaluation and checkpoints that are due.
        self._taken += 1
        self._taken_since_log += 1
        self._since_log += perf_counter() - started
        if event is not None:
            if logs:
                self._log(event, in_pipe)
            elif run.callbacks:
                run.callbacks.on_step(event)
            trace = run.traces.after(done, pipe)
            if trace is not None:
                run.callbacks.on_trace(TraceEvent(done, trace))
        if done % train.eval_every == 0 or last:
            self._evaluate()
        run.checkpointer.after_step(self.progress)
        run.page.after_step(done)

    def _applied(self, done: int, loss: float, update: OptimizerStep) -> StepEvent:
        """Note an update, and return its event with what is known without messages between the ranks."""
        assert update.grad_norm is not None, "every update is measured"
        run = self._run
        self.progress = RunProgress(done, loss)
        run.reporter.step(done, loss)
        samples = run.config.train.batch * done
        lr, norm, tokens = update.lr[0], float(update.grad_norm), samples * run.config.data.sequence
        return StepEvent(
            step=done, loss=loss, lr=lr, grad_norm=norm, samples=samples, tokens=tokens, logged=False
        )

    def _overflow(self, done: int, scale: float) -> None:
        """Note a step that is skipped since a gradient overflowed at this loss scale; the next step has a smaller one.

        At a scale of 1 or less the scale is not the cause, and the step counts as one that is not finite.
        """
        run, scaler = self._run, self._run.optimizer.scaler
        assert scaler is not None, "it has skipped the step"
        if scale <= 1:
            self._skip(done, NonFiniteError("", what=f"a gradient, at a loss scale of {scale:g},"))
            return
        self.progress = replace(self.progress, done=done)
        run.reporter.step(done, self.progress.loss)
        run.reporter.say(
            f"step {done}: a gradient overflowed at a loss scale of {scale:g}; the step is skipped, and the scale "
            f"is now {scaler.scale:g}"
        )
        run.metrics.write("skipped", step=done, loss_scale=scale, seconds=self._seconds())

    def _skip(self, done: int, error: NonFiniteError) -> None:
        """Skip a step that is not finite on some rank: no weight changes, and the next step takes the next batch."""
        run, allowed = self._run, self._run.config.train.skip_nonfinite
        in_a_row = self.progress.skipped_in_a_row + 1
        where = f"step {done}: {error.what} is NaN or infinite; no weight was changed"
        if in_a_row > allowed:
            raise NonFiniteError(
                f"{where}. train.skip_nonfinite is {allowed}, and this is step number {in_a_row} in a row; a lower learning "
                "rate, a longer warm-up or clipping usually helps",
                error.stage,
                error.microbatch,
                error.what,
            ) from error
        self.progress = replace(self.progress, done=done, skipped_in_a_row=in_a_row)
        run.reporter.step(done, self.progress.loss)
        run.reporter.say(f"{where}. The step is skipped, number {in_a_row} in a row of at most {allowed}")
        run.callbacks.on_step(StepEvent(step=done, seconds=self._seconds(), logged=False, skipped=where))
        run.metrics.write(
            "skipped",
            step=done,
            stage=error.stage,
            microbatch=error.microbatch,
            in_a_row=in_a_row,
            seconds=self._seconds(),
        )

    def _log(self, event: StepEvent, in_pipe: float) -> None:
        loss = event.loss
        assert loss is not None, "the step was not skipped"
        run, taken, device = self._run, self._taken_since_log, self._run.pipe.device
        seconds, self._since_log, self._taken_since_log = self._since_log, 0.0, 0
        self._stepping += seconds
        bubble = measured_bubble(run.pipe, run.run_group, in_pipe)
        memory = run.run_group.each(lambda: memory_use(device))
        experts = run.pipe.gather_expert_load()
        rss, rss_peak, allocated, peak = (tuple(column) for column in zip(*memory, strict=True))
        event = replace(
            event,
            logged=True,
            tokens_per_second=self._tokens(taken, seconds),
            step_seconds=seconds / taken,
            bubble=bubble,
            rss=rss,
            rss_peak=rss_peak,
            cuda_allocated=allocated if on_gpu(device) else (),
            cuda_peak=peak if on_gpu(device) else (),
            expert_imbalance=None if experts is None else experts.imbalance,
            expert_tokens=() if experts is None else tuple(experts.computed),
            exchange_seconds=() if experts is None else tuple(experts.exchange_seconds),
            seconds=self._seconds(),
        )
        run.reporter.measured(event.step, loss, self._tokens(taken, seconds), bubble)
        run.metrics.write("train", **values_of(event))
        run.callbacks.on_step(event)

    def _evaluate(self) -> None:
        run, done = self._run, self.progress.done
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
    """Return the share of the ranks' time in the last step that they spent in neither a forward nor a backward."""
    trace = pipe.trace()
    assert trace is not None, "a step has just been done"
    ranks = run_group.size if pipe.in_processes else pipe.ranks
    return max(0.0, 1.0 - run_group.total(float(busy(trace).sum()) / (ranks * seconds)))
