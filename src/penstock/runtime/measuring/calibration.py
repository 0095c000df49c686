"""Profile of a model as it runs in pipelines: layers measured alone, then recalibrated on short steps of real pipelines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree

from penstock.plan.cluster import Cluster
from penstock.plan.profile_fit import MeasuredLayout, fit_profile
from penstock.plan.run_layout import Layout
from penstock.profile.measured import DEFAULT_EFFORT, Effort, Exchange, measure_layers
from penstock.profile.model_profile import Profile
from penstock.profile.traced import trace_layers
from penstock.runtime.options import ExecutionOptions
from penstock.runtime.pipeline import Pipeline
from penstock.stage.compute.runner import LossFunction
from penstock.trace.bubbles import makespan
from penstock.trace.events import Trace

_MICROBATCHES = 4
"""Microbatches of a calibration step, for each rank."""

_IN_A_ROW = 4
"""Steps of a pipeline in a row, after one that does not count: other pipelines leave the caches without its weights."""


class _Way(NamedTuple):
    schedule: str
    virtual: int
    recompute: str


_WAYS = (
    _Way("1f1b", 1, "none"),
    _Way("zb-h1", 1, "none"),
    _Way("interleaved-1f1b", 2, "none"),
    _Way("1f1b", 1, "full"),
)


def profile_layers(
    model: object,
    example: object,
    *,
    measure: bool = True,
    target: object = None,
    loss_fn: LossFunction | None = None,
    named: Mapping[str, object] | None = None,
    microbatches: Sequence[int] | None = None,
    ranks: int = 1,
    effort: Effort = DEFAULT_EFFORT,
    exchange: Exchange | None = None,
    name: str | None = None,
    seed: int = 0,
    autocast: torch.dtype | None = None,
) -> Profile:
    """Profile the layers of a model, for `penstock.plan`.

    Args:
        model: model or layers as `penstock.Pipeline` takes them.
        example: input of one microbatch, batch first.
        measure: measure the layers on this machine (default), or trace them without running them.
        target: target of the loss for the same microbatch.
        loss_fn: loss function as `penstock.Pipeline` takes it; its cost is part of the last layer's (default: no loss).
        named: keyword inputs of the step, by name.
        microbatches: samples of the microbatches to profile (default: the example's, and twice as many).
        ranks: number of threads of this process that compute at the same time while it is measured (default 1).
        effort: bounds on the measurement.
        exchange: function that joins the processes that measure at the same time (default None: this process alone).
        name: name of the model (default: its class).
        seed: seed of layers that are built (default 0).
        autocast: dtype of mixed precision, as for `penstock.Pipeline` (default None).

    Returns:
        A profile with source "traced" or "measured". `Profile.save` writes it as JSON.

    Raises:
        ProfileError: if a layer does not run on tensors without values; names it.
        SplitError: if the model is no list of layers.
    """
    if not measure:
        return trace_layers(
            model, example, target=target, loss_fn=loss_fn, named=named, microbatches=microbatches, name=name,
            seed=seed, autocast=autocast,
        )  # fmt: skip
    return measure_layers(
        model, example, target=target, loss_fn=loss_fn, named=named, microbatches=microbatches, ranks=ranks,
        effort=effort, exchange=exchange, name=name, seed=seed, autocast=autocast,
    )  # fmt: skip


def calibrate(
    profile: Profile,
    cluster: Cluster,
    build: Callable[[], object],
    loss_fn: LossFunction,
    x: Any,
    y: Any,
    *,
    rows: int,
    ranks: int,
    steps: int = 20,
    share: float = 0.5,
    check_finite: bool = True,
) -> Profile:
    """Recalibrate a measured profile on steps of pipelines; in processes, every process calls it.

    Args:
        profile: measured profile of the model.
        cluster: this machine, as measured.
        build: function that returns the model as `penstock.Pipeline` takes it, a new one on each call.
        loss_fn: loss function.
        x, y: input and target of one microbatch.
        rows: samples of it.
        ranks: pipeline ranks.
        steps: steps of each pipeline (default 20), one of each in turn.
        share: share of the steps that counts, the fastest: the others shared the machine (default 0.5).
        check_finite: option of the pipelines; see `penstock.ExecutionOptions` (default True).
    """
    count = _MICROBATCHES * ranks
    x, y = (_pytree.tree_map(lambda leaf: _repeated(leaf, count), value) for value in (x, y))
    ways = [way for way in _WAYS if ranks * way.virtual <= profile.blocks and (ranks > 1 or way.virtual == 1)]
    traces: list[list[Trace]] = [[] for _ in ways]
    with ExitStack() as stack:
        pipes = [
            stack.enter_context(
                Pipeline(
                    build(), loss_fn, microbatches=count, schedule=way.schedule, ranks=ranks,
                    virtual_stages=way.virtual, recompute=way.recompute,
                    execution=ExecutionOptions(check_finite=check_finite),
                )
            )
            for way in ways
        ]  # fmt: skip
        for _ in range(-(-steps // _IN_A_ROW)):
            for pipe, found in zip(pipes, traces, strict=True):
                for n in range(1 + _IN_A_ROW):
                    pipe.zero_grad()
                    pipe.step(x, y)
                    trace = pipe.gather_trace()
                    if n and trace is not None:
                        found.append(trace)
        runs = [
            MeasuredLayout(
                Layout(ranks, v=way.virtual, microbatch=rows, schedule=way.schedule, recompute=way.recompute),
                pipe.schedule.placement, profile.sequence or 1, _fastest(found, share),
            )
            for way, pipe, found in zip(ways, pipes, traces, strict=True)
        ]  # fmt: skip
    return fit_profile(profile, cluster, runs)


def _fastest(traces: Sequence[Trace], share: float) -> Sequence[Trace]:
    return sorted(traces, key=makespan)[: max(1, int(share * len(traces)))]


def _repeated(leaf: Any, count: int) -> Any:
    return torch.cat([leaf] * count) if isinstance(leaf, Tensor) and leaf.dim() else leaf
