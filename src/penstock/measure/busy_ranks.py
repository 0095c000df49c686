"""This machine as a cluster: rates of its device, links between its ranks, and overheads of the runtime, all measured.

Links and overheads come from traces of pipelines whose layers do next to nothing, on the transport that will run.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch import distributed as dist

from penstock.base import host
from penstock.measure.device_rates import (
    memory_bandwidth,
    optimizer_bandwidth,
    seconds_of_launch,
    steady_seconds,
)
from penstock.parallel.mesh import MeshShape
from penstock.parallel.replicas.exchange import gather_values
from penstock.plan.cluster import MEASURED_ERROR, Cluster, Device, LinkSpeed
from penstock.runtime.options import ExecutionOptions
from penstock.runtime.pipeline import Pipeline
from penstock.trace.events import Trace
from penstock.trace.messages import message_delays

_MICROBATCHES = 8
_SMALL, _LARGE = 256, 1 << 20
"""Elements of a message, to tell latency from bandwidth."""
_REDUCED = 1 << 21
"""Elements of the gradient whose reduction is timed."""
_CPU = torch.device("cpu")
_BUDGET = 0.05
"""Seconds that one kernel may take to become steady."""


def measure_cluster(ranks: int = 1, *, dp: int = 1, rounds: int = 15) -> Cluster:
    """Measure this machine with its ranks busy; in processes, every process calls it.

    `ranks` are threads of this process, or all its processes; the reduction over `dp` replicas, as many as the
    processes, is measured from 2 on. The cluster has one node, whose ranks share the memory. Rates of matrix products
    and of memory are one thread's.
    """
    small = _steps(ranks, _SMALL, rounds)
    large = _steps(ranks, _LARGE, max(3, rounds // 3)) if ranks > 1 else small
    latency = small.latency
    # 4 bytes an element, in fp32.
    size = 4 * (_LARGE - _SMALL)
    slower = large.latency - latency
    bandwidth = size / slower if ranks > 1 and slower > 0 else 1e12
    reduces = _reduction_rate(dp, small.overhead, rounds) if dp > 1 else None
    limits, launch = host.memory(), seconds_of_launch(_CPU, _BUDGET)
    device = Device(
        memory=float(limits.total) / max(ranks, dp) if limits is not None else 1e12,
        matmul={"fp32": _matmul_rate(torch.float32), "bf16": _matmul_rate(torch.bfloat16)},
        memory_bandwidth=memory_bandwidth(_CPU, launch, _BUDGET),
        optimizer_bandwidth=optimizer_bandwidth(_CPU, _BUDGET),
    )
    return Cluster(
        name="this machine",
        device=device,
        ranks_per_node=max(ranks, dp),
        node=LinkSpeed(latency, bandwidth, reduces),
        dtype="fp32",
        error=MEASURED_ERROR,
        op_overhead=small.gap,
        step_overhead=small.overhead,
        overlap=False,  # ranks on the same cores reduce at the expense of their backward
    )


class _Overheads(NamedTuple):
    """Seconds between two ops, of a message, and of a step besides its ops."""

    gap: float
    latency: float
    overhead: float


class _Scale(nn.Module):
    def __init__(self, elements: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(elements))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight[0]


def _first_element(output: Tensor, target: Tensor) -> Tensor:
    return output.view(-1)[0]


def _steps(ranks: int, elements: int, rounds: int) -> _Overheads:
    """Run steps in which nothing takes long, and return the medians."""
    x = torch.zeros(_MICROBATCHES, elements)
    gaps, delays, overheads = [], [], []
    with Pipeline(
        nn.Sequential(*[_Scale() for _ in range(ranks)]),
        _first_element,
        microbatches=_MICROBATCHES,
        schedule="gpipe",
        ranks=ranks,
        execution=ExecutionOptions(check_finite=True),
    ) as pipe:
        pipe.tracing = True
        for n in range(rounds + 2):
            begin = perf_counter()
            pipe.step(x, x)
            seconds = perf_counter() - begin
            trace = pipe.gather_trace()
            assert trace is not None, "a step has run"
            if n < 2:
                continue
            gaps += _gaps(trace)
            delays += np.maximum(message_delays(trace), 0.0).tolist()
            overheads.append(seconds - float(trace.end.max() - trace.start.min()))
    found = [statistics.median(each) if each else 0.0 for each in (gaps, delays, overheads)]
    return _Overheads(*_agree(found))


def _gaps(trace: Trace) -> list[float]:
    """Return the seconds between the forwards of the first rank, which wait for nothing."""
    rows = trace.rank_slices()[0]
    start, end = trace.start[rows], trace.end[rows]
    gaps: list[float] = (start[1:_MICROBATCHES] - end[: _MICROBATCHES - 1]).tolist()
    return gaps


def _reduction_rate(dp: int, overhead: float, rounds: int) -> float:
    """Return the bytes per second of a device at which gradients are reduced over replicas.

    `overhead` is seconds of a step besides its ops and the reduction.
    """
    x = torch.zeros(dp, 4)
    seconds = []
    with Pipeline(
        nn.Sequential(_Scale(_REDUCED)), _first_element, microbatches=1, mesh=MeshShape(pp=1, dp=dp)
    ) as pipe:
        pipe.tracing = True
        for n in range(rounds + 2):
            begin = perf_counter()
            pipe.step(x, x)
            spent = perf_counter() - begin
            trace = pipe.trace()
            assert trace is not None, "a step has run"
            if n >= 2:
                seconds.append(spent - float(trace.end.max() - trace.start.min()) - overhead)
    (middle,) = _agree([statistics.median(seconds)])
    # In a ring, each device sends 2 (dp - 1) / dp of the gradient's bytes.
    return 2 * (dp - 1) * 4 * _REDUCED / dp / max(middle, 1e-6)


def _agree(values: Sequence[float]) -> list[float]:
    """Return the mean of every process's values."""
    if not (dist.is_available() and dist.is_initialized()):
        return list(values)
    everyone: list[list[float]] = gather_values(list(values), None)
    return [statistics.mean(each) for each in zip(*everyone, strict=True)]


def _matmul_rate(dtype: torch.dtype) -> float:
    size = 384
    a, b = torch.randn(size, size, dtype=dtype), torch.randn(size, size, dtype=dtype)
    # A multiplication and an addition for each of size**3 products.
    return 2 * size**3 / steady_seconds(lambda: torch.mm(a, b), _CPU, _BUDGET)
