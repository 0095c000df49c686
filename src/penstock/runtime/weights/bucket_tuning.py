"""How finely a rank's gradients are cut into buckets, chosen by a measured step and the measured speed of reductions.

A stage whose reduction hides behind the rank's later work is reduced in one piece. One that ends with the rank's last
op, as the early stages do, shows what is left of it then; cut finely, it begins while that op still runs.
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

MOST = 16
"""The most buckets of a stage."""

_OVERHEAD = 0.25
"""A bucket is large enough that starting it takes at most this share of the time of sending it."""

_SMALL, _LARGE, _ROUNDS = 1 << 10, 4 << 20, 3


class Speed(NamedTuple):
    """What a reduction takes: seconds for starting one, and seconds a byte."""

    start: float
    byte: float


def measure(reducer: Reducer, device: torch.device) -> Speed:
    """Time reductions of two sizes while nothing else runs; every replica calls it."""
    seconds = {}
    for size in (_SMALL, _LARGE):
        flat = torch.zeros(size // 4, device=device)
        rounds = []
        for _ in range(_ROUNDS):
            begin = perf_counter()
            reducer.start(flat).wait()
            flat[0].item()  # on CUDA only the stream has waited
            rounds.append(perf_counter() - begin)
        seconds[size] = statistics.median(rounds)
    byte = max((seconds[_LARGE] - seconds[_SMALL]) / (_LARGE - _SMALL), 1e-15)
    return Speed(max(seconds[_SMALL] - byte * _SMALL, 0.0), byte)


def choose(program: Program, trace: Trace, gradients: Mapping[int, int], speed: Speed) -> dict[int, int]:
    """The most bytes in a bucket, by stage.

    Args:
        program: of a step.
        trace: of this rank in that step.
        gradients: bytes of the gradients of each of the rank's stages.
        speed: of reductions.
    """
    seconds = [gradients.get(s, 0) * speed.byte for s in range(program.schedule.stages)]
    cuts = _OVERHEAD * max(seconds) / speed.start if speed.start else MOST
    most = 1 << max(0, min(MOST, int(cuts)).bit_length() - 1)  # a power of 2, as the numbers that are tried
    counts = fewest_buckets(program, trace, seconds, most)
    return {s: max(1, -(-size // counts[s])) for s, size in gradients.items()}
