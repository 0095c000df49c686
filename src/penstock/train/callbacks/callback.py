"""The callback protocol: an object whose methods are called with what happens in a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from penstock.base.scratch import Scratch
from penstock.show.picture import draw_picture
from penstock.trace.events import Trace

Outcome = Literal["done", "stopped", "failed"]
"""How a run ended."""


@dataclass(frozen=True)
class StartEvent:
    """The run is about to do its first step, or the next one after a checkpoint.

    Attributes:
        folder: folder of the run, which exists.
        config: resolved config, as sections of keys; empty in an own loop that has none.
        step: steps done before; 0 for a new run.
        steps: number of the last step; 0 if unknown.
    """

    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0
    steps: int = 0


@dataclass(frozen=True, kw_only=True)
class StepEvent:
    """A training step is done on all ranks, and the weights are updated, or the step was skipped.

    Attributes:
        step: number of the step, counted from 1.
        loss: loss of the batch before the update, in nats per token for language models; None if the step was skipped.
        lr: learning rate of the first parameter group.
        grad_norm: global 2-norm of the gradients before clipping.
        tokens_per_second: tokens trained per second since the last line of metrics.
        step_seconds: mean duration of a step since the last line of metrics, in seconds.
        samples: samples trained since the first step of the run.
        tokens: tokens trained since the first step of the run.
        bubble: share of the ranks' time in this step that they spent in neither a forward nor a backward, from 0 to 1.
        rss: memory of each process in RAM, in bytes, by rank.
        rss_peak: largest `rss` of each process since it started.
        cuda_allocated: memory of tensors on each process's GPU, in bytes, by rank; empty on the CPU.
        cuda_peak: largest `cuda_allocated` since the last line of metrics.
        expert_imbalance, expert_tokens, exchange_seconds: of divided experts in the step's last ``pipe.step``; see
            `ExpertLoad`. None and empty without.
        seconds: seconds since the first step of this start.
        logged: True if the step has a line in ``metrics.jsonl`` (every ``train.log_every`` steps). In other steps everything
            from `tokens_per_second` to `exchange_seconds`, except `samples` and `tokens`, is None or empty, since measuring
            it takes messages between the ranks.
        skipped: reason why the step was skipped and no weight changed; empty if it was not.
    """

    step: int
    loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    tokens_per_second: float | None = None
    step_seconds: float | None = None
    samples: int | None = None
    tokens: int | None = None
    bubble: float | None = None
    rss: tuple[int, ...] = ()
    rss_peak: tuple[int, ...] = ()
    cuda_allocated: tuple[int, ...] = ()
    cuda_peak: tuple[int, ...] = ()
    expert_imbalance: float | None = None
    expert_tokens: tuple[int, ...] = ()
    exchange_seconds: tuple[float, ...] = ()
    seconds: float | None = None
    logged: bool = True
    skipped: str = ""


@dataclass(frozen=True)
class EvaluateEvent:
    """The model was evaluated on held-out data.

    Attributes:
        step: number of steps done.
        held_out_bits: mean bits per token (a byte, where tokens are bytes).
        seconds: seconds since the first step of this start.
    """

    step: int
    held_out_bits: float
    seconds: float | None = None


@dataclass(frozen=True)
class SaveEvent:
    """A checkpoint is complete on the disk. It is written in the background, so some steps may have passed since.

    Attributes:
        step: step of the checkpoint.
        path: folder of the checkpoint.
    """

    step: int
    path: Path


@dataclass(frozen=True)
class TraceEvent:
    """A step was traced (every ``train.trace_every`` steps, the first and the last).

    Attributes:
        step: number of the step.
        trace: ops of all ranks of the first replica, with their times.
    """

    step: int
    trace: Trace

    @cached_property
    def picture(self) -> bytes:
        """The timeline as a PNG; needs matplotlib."""
        with Scratch() as scratch:
            path = scratch.path / "timeline.png"
            draw_picture(self.trace, path)
            return path.read_bytes()


@dataclass(frozen=True, kw_only=True)
class EndEvent:
    """The run has ended; the last event.

    Attributes:
        outcome: ``done``; ``stopped`` by a signal and saved; or ``failed``.
        step: number of steps done.
        error: message of the error that ended the run; empty if none did.
        loss: loss of the last step that was not skipped; None if there is none, or the run is not done.
        held_out_bits: mean bits per token on held-out data at the end of a run that is done.
        bigram_bits: the same of a bigram table, where tokens are bytes.
        tokens_per_second: trained tokens divided by the time of the steps alone.
        seconds: duration of the steps and evaluations.
    """

    outcome: Outcome
    step: int
    error: str = ""
    loss: float | None = None
    held_out_bits: float | None = None
    bigram_bits: float | None = None
    tokens_per_second: float | None = None
    seconds: float | None = None


class Callback:
    """Base class of callbacks; each method does nothing until you override it.

    In a run, only the process of rank 0 creates callbacks and calls them: in its main thread, between two steps. No other
    rank waits for the call, except for its next message from rank 0, so a slow callback slows the run. A callback must not
    call functions that all ranks have to call, such as ``pipe.evaluate``.

    An exception never ends the steps. An `OSError` (a full disk, a service that does not answer) loses the event; any other
    exception is an error of the callback itself, which then receives `on_end` and nothing else. Both are reported with the
    callback's name, and the traceback is in the log. Only in `on_start` an exception ends the run, before its first step.
    """

    def on_start(self, event: StartEvent) -> None:
        """Prepare: the first event."""

    def on_step(self, event: StepEvent) -> None:
        """Receive a step."""

    def on_evaluate(self, event: EvaluateEvent) -> None:
        """Receive an evaluation."""

    def on_save(self, event: SaveEvent) -> None:
        """Receive a checkpoint."""

    def on_trace(self, event: TraceEvent) -> None:
        """Receive a traced step."""

    def on_end(self, event: EndEvent) -> None:
        """Flush and close: the last event, also if the run was stopped or failed."""


_PER_PROCESS = ("rss", "rss_peak", "cuda_allocated", "cuda_peak", "expert_tokens", "exchange_seconds")


def values_of(event: StepEvent | EvaluateEvent | EndEvent) -> dict[str, Any]:
    """Return the known numbers of an event by name, as ``metrics.jsonl`` has them, with lists by rank.

    ``bigram_bits`` and ``loss`` of the end may be None.
    """
    end = isinstance(event, EndEvent)
    left_out = {"logged", "skipped", "outcome", "error"}
    values = {each.name: getattr(event, each.name) for each in fields(event) if each.name not in left_out}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
        if value not in (None, ()) or (end and name in ("loss", "bigram_bits"))
    }


def numbers_of(event: StepEvent | EvaluateEvent | EndEvent) -> dict[str, float]:
    """Return the numbers of an event by a name for charts: ``train/loss``, ``train/rss/rank_0``, ``held_out/seconds``."""
    kind = {StepEvent: "train", EvaluateEvent: "held_out", EndEvent: "final"}[type(event)]
    numbers: dict[str, float] = {}
    for name, value in values_of(event).items():
        if name in _PER_PROCESS:
            numbers |= {f"{kind}/{name}/rank_{rank}": each for rank, each in enumerate(value)}
        elif name != "step" and value is not None:
            numbers[f"{kind}/{name}"] = value
    return numbers
