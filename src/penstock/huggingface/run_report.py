"""Traces, metrics and page that a run of the trainer leaves in its output folder."""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers

from penstock.base.counts import plural
from penstock.base.errors import describe_error
from penstock.base.host import to_stderr
from penstock.plan.cluster import rated_flops
from penstock.runtime.kept_traces import KeptTraces
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.start.start_record import keep_start, start_of
from penstock.runtime.workers.run_group import RunGroup
from penstock.schedule.check import check
from penstock.show.run_page import RunPage
from penstock.simulate.costs import Costs
from penstock.simulate.metrics import measure
from penstock.simulate.simulator import simulate
from penstock.trace.folder import drop_after
from penstock.trace.metrics_writer import MetricsWriter, go_back

_NAMES = {"loss": "loss", "learning_rate": "lr", "grad_norm": "grad_norm"}
"""Names in Trainer's logs, and in the lines of ``metrics.jsonl``."""


class RunReport(transformers.TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
    """Callback that writes ``traces/``, ``metrics.jsonl``, ``run.json`` and ``report.html`` into the output folder.

    Args:
        trace_every: updates between two traces; 0 for the first and the last update alone.
        dtype: precision of the run.
        mean_of_tokens: whether the loss is the mean over tokens, so that it can be told in bits per token.
        varies: whether batches may have more microbatches than the pipeline's own number (default False).
    """

    def __init__(
        self, pipe: Pipeline, *, trace_every: int, dtype: str, mean_of_tokens: bool, varies: bool = False
    ) -> None:
        self._varies = varies
        self._pipe, self._every, self._dtype, self._in_bits = pipe, trace_every, dtype, mean_of_tokens
        self._group = RunGroup.of(pipe.world)
        self._open = ExitStack()
        self._traces: KeptTraces | None = None
        self._page = RunPage(None, 0, to_stderr)
        self._metrics = MetricsWriter(None)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._forget()
        run, leads = Path(args.output_dir), self._group.leads
        self._group.decide(lambda: self._begin(run, state, args.device))
        self._traces = KeptTraces(run, state.max_steps, self._every, leads, to_stderr, api="Trainer")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self._traces is not None, "training has begun"
        self._pipe.tracing = self._traces.due(state.global_step + 1) or None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self._traces is not None, "training has begun"
        self._traces.after(state.global_step, self._pipe)
        self._page.after_step(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        logs = logs or {}
        values = {ours: float(logs[name]) for name, ours in _NAMES.items() if name in logs}
        if "loss" in values:
            finite = {name: value for name, value in values.items() if math.isfinite(value)}
            self._metrics.write("train", step=state.global_step, **finite)
        if self._in_bits and math.isfinite(loss := logs.get("eval_loss", math.nan)):
            self._metrics.write("held_out", step=state.global_step, held_out_bits=loss / math.log(2))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._page.finish()
        self._forget()

    def close(self, error: BaseException) -> None:
        """End a run that has not come to its end: draw its page, with the reason."""
        self._page.finish(f"The run ended before its last step: {describe_error(error)}.")
        self._forget()

    def _forget(self) -> None:
        self._open.close()
        self._page, self._metrics = RunPage(None, 0, to_stderr), MetricsWriter(None)

    def _begin(self, run: Path, state: Any, device: torch.device) -> None:
        pipe = self._pipe
        to_stderr(plan_line(pipe, self._varies))
        run.mkdir(parents=True, exist_ok=True)
        drop_after(run, state.global_step)
        go_back(run, state.global_step)
        processes = pipe.ranks * pipe.replicas if pipe.in_processes else 1
        start = start_of(
            step=state.global_step,
            layout=pipe.layout,
            device=device,
            processes=processes,
            threads=pipe.threads,
            dtype=self._dtype,
            rated=rated_flops,
        )
        keep_start(run, to_stderr, start)
        self._metrics = self._open.enter_context(MetricsWriter(run, to_stderr))
        self._page = self._open.enter_context(RunPage(run, state.max_steps, to_stderr))


def plan_line(pipe: Pipeline, varies: bool = False) -> str:
    """Return a line about a pipeline, with the idle time of its schedule where all stages cost the same.

    Args:
        varies: whether batches may have more microbatches (default False).
    """
    schedule = pipe.schedule
    costs = Costs.of(schedule.placement, 1, 1, 1)  # a backward takes twice as long as a forward
    figures = measure(schedule, costs, simulate(check(schedule).program, costs))
    kind = "processes" if pipe.in_processes else "threads"
    if pipe.devices:
        kind += f" on {', '.join(map(str, pipe.devices))}"
    least, most = ("at least ", "at most ") if varies else ("", "")
    counted = f"{least}{plural(pipe.microbatches, 'microbatch')} of a batch each"
    return (
        f"pipeline: {pipe.layout} ({kind}), {plural(schedule.stages, 'stage')}, {counted}; with stages of equal cost "
        f"{most}{figures.bubble_of_makespan:.1%} of the ranks' time is idle"
    )
