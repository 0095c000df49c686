"""Recalibration of a measured profile on short steps of real pipelines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils import _pytree

from bench.profile_fit import MeasuredLayout, fit_profile
from penstock.parallel.replicas.exchange import gather_values
from penstock.plan.cluster import Cluster
from penstock.plan.run_layout import Layout
from penstock.profile.model_profile import Profile
from penstock.runtime.options import ExecutionOptions
from penstock.runtime.pipeline import Pipeline
from penstock.stage.compute.runner import LossFunction
from penstock.trace.events import Trace

_WARM_UP = 2
"""Steps that do not count: the first ones check and compile, and find the caches without the weights."""
_IN_A_ROW = 4
"""Steps of a pipeline in a row; then it closes, as pipelines that are open besides would change what a step costs."""


class _Way(NamedTuple):
    """A layout to calibrate on, with so many microbatches for each rank."""

    schedule: str
    virtual: int = 1
    recompute: str = "none"
    microbatches: int = 4


_WAYS = (
    _Way("1f1b"),
    _Way("1f1b", microbatches=1),
    _Way("gpipe"),
    _Way("zb-h1"),
    _Way("zb-v", 2),
    _Way("interleaved-1f1b", 2),
    _Way("interleaved-1f1b", 3),
    _Way("1f1b", recompute="full"),
)
"""Layouts that differ in what ops cost: by size, by what runs at the same time, and by what they prepare and repeat."""


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

    `build` returns a new model on each call. Only a `share` of the steps counts, the fastest: slower ones had less of
    the machine.
    """
    ways = [way for way in _WAYS if ranks * way.virtual <= profile.blocks and (ranks > 1 or way.virtual == 1)]
    batches = [
        [_pytree.tree_map(partial(_repeated, count=way.microbatches * ranks), value) for value in (x, y)]
        for way in ways
    ]
    steps_of: list[list[tuple[float, Trace]]] = [[] for _ in ways]
    stages_of = [0] * len(ways)
    for _ in range(-(-steps // _IN_A_ROW)):
        for number, way in enumerate(ways):
            with Pipeline(
                build(),
                loss_fn,
                microbatches=way.microbatches * ranks,
                schedule=way.schedule,
                ranks=ranks,
                virtual_stages=way.virtual if way.schedule == "interleaved-1f1b" else 1,
                recompute=way.recompute,
                execution=ExecutionOptions(check_finite=check_finite),
            ) as pipe:
                steps_of[number] += _timed(pipe, batches[number])
                stages_of[number] = pipe.schedule.stages
    runs = []
    for way, stages, found in zip(ways, stages_of, steps_of, strict=True):
        layout = Layout(
            pp=ranks, v=stages // ranks, microbatch=rows, schedule=way.schedule, recompute=way.recompute
        )
        runs.append(MeasuredLayout(layout, profile.sequence or 1, *zip(*_fastest(found, share), strict=True)))
    return fit_profile(profile, cluster, runs)


def _timed(pipe: Pipeline, batch: Sequence[Any]) -> list[tuple[float, Trace]]:
    """Return seconds and traces of steps in a row, after some that warm up."""
    found = []
    for n in range(_WARM_UP + _IN_A_ROW):
        pipe.zero_grad()
        begin = perf_counter()
        pipe.step(*batch)
        seconds = perf_counter() - begin
        trace = pipe.gather_trace()
        if n >= _WARM_UP and trace is not None:
            found.append((seconds, trace))
    return found


def _fastest(steps: Sequence[tuple[float, Trace]], share: float) -> list[tuple[float, Trace]]:
    """Return the fastest steps by their slowest process."""
    seconds = [[seconds for seconds, _ in steps]]
    if dist.is_available() and dist.is_initialized():
        seconds = gather_values(seconds[0], None)
    slowest = [max(each) for each in zip(*seconds, strict=True)]
    order = sorted(range(len(steps)), key=slowest.__getitem__)
    return [(slowest[n], steps[n][1]) for n in order[: max(1, int(share * len(steps)))]]


def _repeated(leaf: Any, count: int) -> Any:
    return torch.cat([leaf] * count) if isinstance(leaf, Tensor) and leaf.dim() else leaf
