"""Choose the size of gradient buckets by a measured step and the measured speed of reductions.

A stage whose reduction hides behind the rank's later work gets one bucket. The reduction of a stage whose gradients are
complete only with the rank's last op, as in early stages, is exposed; small buckets start it while that op still runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from time import perf_counter
from typing import NamedTuple

import torch

from penstock.parallel.data.reducer import Reducer
from penstock.schedule.program import Program
from penstock.simulate.reduction import fewest_buckets
from penstock.trace.events import Trace

MAX_BUCKETS = 16
"""Largest number of buckets of a stage."""

_OVERHEAD = 0.25
"""Largest time to start a bucket's reduction, as a share of the time to send it."""

_SMALL, _LARGE, _ROUNDS = 1 << 10, 4 << 20, 3


class Speed(NamedTuple):
    """Speed of reductions: seconds to start one, and seconds per byte."""

    start: float
    byte: float


def measure(reducer: Reducer, device: torch.device) -> Speed:
    """Time reductions of two sizes while nothing else runs; every replica calls this."""
    seconds = {}
    for size in (_SMALL, _LARGE):
        flat = torch.zeros(size // 4, device=device)
        rounds = []
        for _ in range(_ROUNDS):
            begin = perf_counter()
            reducer.all_reduce(flat).wait()
            flat[0].item()  # on CUDA only the stream has waited
            rounds.append(perf_counter() - begin)
        seconds[size] = statistics.median(rounds)
    byte = max((seconds[_LARGE] - seconds[_SMALL]) / (_LARGE - _SMALL), 1e-15)
    return Speed(max(seconds[_SMALL] - byte * _SMALL, 0.0), byte)


def choose(program: Program, trace: Trace, gradients: Mapping[int, int], speed: Speed) -> dict[int, int]:
    """Return the largest bytes in a bucket, by stage.

    Args:
        program: program of a step.
        trace: trace of this rank in that step.
        gradients: bytes of gradients by stage, for each of the rank's stages.
        speed: measured speed of reductions.
    """
    seconds = [gradients.get(s, 0) * speed.byte for s in range(program.schedule.stages)]
    affordable = _OVERHEAD * max(seconds) / speed.start if speed.start else MAX_BUCKETS
    max_buckets = 1 << max(0, min(MAX_BUCKETS, int(affordable)).bit_length() - 1)  # powers of 2 are tried
    counts = fewest_buckets(program, trace, seconds, max_buckets)
    return {s: max(1, -(-size // counts[s])) for s, size in gradients.items()}
