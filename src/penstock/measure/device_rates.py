"""Achieved rates of a device, measured with the kernels that planning counts (`penstock.plan.cluster` lists them)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from penstock.base import host
from penstock.profile.closed_form import DTYPE_BYTES

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
UPDATE_BYTES = 32
"""Bytes that norm and update of AdamW read and write per fp32 parameter, as in `penstock.plan.prediction`."""

_BLOCK = 0.005  # seconds of back-to-back calls that are timed as one; the clock and a launch are far shorter
_PASSES, _PASSES_AGREE = 4, 0.05
_SMALL = 0.2  # share of a kernel's time above which its launch hides the rest
_BEYOND = 1.25  # ratio of the fitted limit to the best measured rate, at most
_AGREE = 0.02  # relative difference of two halves of the blocks below which they count as steady


def measure_device(device: torch.device, ranks: int, budget: float) -> dict[str, Any]:
    """Return the rates of a device as the section ``[device]`` of a cluster's file has them, and their ``spread``.

    All kernels are measured in turn, and again until two passes agree: a machine's speed drifts over seconds. The
    rates are the medians of the passes, and ``spread`` is the median difference of a pass from these, as a share.
    `budget` is the seconds that one kernel may take to become steady in a pass. The caller's other ranks measure
    their devices at the same time, as in a run.
    """
    passes = [_pass(device, budget)]
    while len(passes) < _PASSES:
        passes.append(_pass(device, budget))
        if _spread(passes[-1], passes[-2]) <= _PASSES_AGREE:
            break
    rates = medians(passes)
    spread = statistics.median(_spread(one, rates) for one in passes)
    return {"memory": float(_memory(device, ranks)), **rates, "spread": spread}


def medians(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the median of every number of equal tables."""
    values: dict[str, Any] = {}
    for key, first in tables[0].items():
        each = [table[key] for table in tables]
        values[key] = medians(each) if isinstance(first, Mapping) else statistics.median(each)
    return values


def _spread(rates: Mapping[str, Any], others: Mapping[str, Any]) -> float:
    """Return the largest relative difference of the rates that make up most of a step."""
    pairs = [(rates[key], others[key]) for key in ("memory_bandwidth", "optimizer_bandwidth")]
    pairs += [(rate, others["matmul"][dtype]) for dtype, rate in rates["matmul"].items()]
    return max(float(abs(a - b) / b) for a, b in pairs)


def _pass(device: torch.device, budget: float) -> dict[str, Any]:
    with torch.no_grad():
        launch = seconds_of_launch(device, budget)
        rates, width = _matmul(device, launch, budget)
        attention = {dtype: _attention(device, dtype, launch, budget) for dtype in rates}
        bandwidth = memory_bandwidth(device, launch, budget)
    return {
        "matmul": rates,
        "matmul_width": width,
        "attention": attention,
        "memory_bandwidth": bandwidth,
        "launch": launch,
        "optimizer_bandwidth": optimizer_bandwidth(device, budget),
    }


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return intercept and slope, both at least 0, of the line with the least squared relative errors."""
    rows = [(1 / y, x / y) for x, y in points]
    aa, ab, bb = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = sum(r[0] for r in rows), sum(r[1] for r in rows)
    determinant = aa * bb - ab * ab
    # Below, all points have the same x up to rounding, and the line has no slope to fit.
    if determinant > 1e-12 * aa * bb:
        intercept, slope = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
        if intercept >= 0 and slope >= 0:
            return intercept, slope
        if intercept >= 0:
            return a / aa, 0.0
    return (0.0, b / bb) if bb else (a / aa, 0.0)


def steady_seconds(job: Callable[[], object], device: torch.device, budget: float) -> float:
    """Return the seconds of one call, as the median of blocks of calls that are repeated until two halves of them agree."""
    # The first calls allocate memory and choose kernels.
    for _ in range(3):
        job()
    calls = 1
    while (took := _block(job, device, calls)) < _BLOCK and calls < 1 << 16:
        # A fifth more than needed, so that the next block is long enough; no more than four times as many, since the
        # first blocks tell little.
        calls = min(4 * calls, max(calls + 1, round(1.2 * calls * _BLOCK / max(took, 1e-9))))
    began, blocks = time.perf_counter(), [took]
    while time.perf_counter() - began < budget or len(blocks) < 3:
        blocks.append(_block(job, device, calls))
        half = len(blocks) // 2
        if half >= 5:
            early, late = statistics.median(blocks[:half]), statistics.median(blocks[half:])
            if abs(early - late) <= _AGREE * late:
                break
    return statistics.median(blocks) / calls


def _block(job: Callable[[], object], device: torch.device, calls: int) -> float:
    wait_for(device)
    began = time.perf_counter()
    for _ in range(calls):
        job()
    wait_for(device)
    return time.perf_counter() - began


def wait_for(device: torch.device) -> None:
    """Wait until a device has finished all kernels that this process launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of_launch(device: torch.device, budget: float) -> float:
    """Return the seconds of a kernel that has nothing to do, between other kernels."""
    value = torch.zeros(1, device=device)
    return steady_seconds(lambda: value.add_(1.0), device, budget)


def _matmul(device: torch.device, launch: float, budget: float) -> tuple[dict[str, float], float]:
    """Return the FLOP/s of large matrix products by dtype, and the width at which half of that is reached.

    Seconds per FLOP grow with the inverse of the width, as in `Device.matmul_rate`. The width is fitted to the first dtype.
    """
    large = 8192 if device.type == "cuda" else 768
    sizes = [
        *((large // n, large // n, large // n) for n in (1, 2, 4, 8)),
        (large // 16, large, large),
        (large, large // 8, large),
        (large // 4, large, large // 8),
    ]
    rates: dict[str, float] = {}
    width = 0.0
    for dtype in usable_dtypes(device):
        points: list[tuple[float, float]] = []
        for rows, inner, columns in sizes:
            left, right, out = (
                torch.ones(shape, dtype=TORCH_DTYPES[dtype], device=device)
                for shape in ((rows, inner), (inner, columns), (rows, columns))
            )
            taken = steady_seconds(partial(torch.mm, left, right, out=out), device, budget)
            inverse = (1 / rows + 1 / inner + 1 / columns) / 3
            if not points or launch < _SMALL * taken:  # a smaller product would measure the launch
                # A multiplication and an addition for each of rows x inner x columns.
                points.append((inverse, max(taken - launch, _SMALL * taken) / (2 * rows * inner * columns)))
        if not rates:
            # The largest product is near the limit, beyond which a fit would only follow noise.
            per_flop = max(fit_line(points)[0], min(y for _, y in points) / _BEYOND)
            width = max(0.0, statistics.median((y / per_flop - 1) / x for x, y in points))
            rates[dtype] = 1 / per_flop
        else:
            rates[dtype] = statistics.median((1 + width * x) / y for x, y in points)
    return rates, width


def usable_dtypes(device: torch.device) -> list[str]:
    """Return dtypes of matrix products worth a plan on a device, the usual one first."""
    if device.type != "cuda":
        return ["fp32"]
    return [*(["bf16"] if torch.cuda.is_bf16_supported() else []), "fp16", "fp32"]


def _attention(device: torch.device, dtype: str, launch: float, budget: float) -> float:
    """Return the FLOP/s of fused causal attention, with all scores counted."""
    heads, sequence, size = (16, 4096, 128) if device.type == "cuda" else (4, 512, 64)
    query = torch.ones(1, heads, sequence, size, dtype=TORCH_DTYPES[dtype], device=device)
    attend = torch.nn.functional.scaled_dot_product_attention
    taken = steady_seconds(lambda: attend(query, query, query, is_causal=True), device, budget)
    # Two products (scores, weighted values) of 2 FLOPs a term. The launch is measured, too: its noise must not make the
    # difference vanish.
    return 4 * heads * sequence * sequence * size / max(taken - launch, 0.1 * taken)


def memory_bandwidth(device: torch.device, launch: float, budget: float) -> float:
    """Return the bytes per second, read and written, of adding two tensors larger than the caches."""
    sizes = (1 << 26, 1 << 27, 1 << 28) if device.type == "cuda" else (1 << 21, 1 << 22, 1 << 23)
    points = []
    for count in sizes:
        left, right, out = (torch.zeros(count, device=device) for _ in range(3))
        taken = steady_seconds(partial(torch.add, left, right, out=out), device, budget)
        # Two tensors are read, and one is written.
        points.append((3 * DTYPE_BYTES["fp32"] * count, max(taken - launch, 0.1 * taken)))
    return statistics.median(size / taken for size, taken in points)


def optimizer_bandwidth(device: torch.device, budget: float) -> float:
    """Return the bytes per second of a gradient norm and a step of AdamW, at `UPDATE_BYTES` a parameter."""
    count = 1 << (26 if device.type == "cuda" else 20)
    parameters = [torch.nn.Parameter(torch.zeros(count, device=device)) for _ in range(4)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)

    def update() -> None:
        torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        optimizer.step()

    # 4 parameters of `count` elements.
    return UPDATE_BYTES * 4 * count / steady_seconds(update, device, budget)


def _memory(device: torch.device, ranks: int) -> int:
    """Return a rank's bytes of memory: its GPU's, or its share of the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    memory = host.memory()
    return memory.total // ranks if memory else 1 << 30
