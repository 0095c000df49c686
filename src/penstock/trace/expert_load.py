"""Tokens that experts got in a step, and the time of their exchange between processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

EXPERTS = "experts"
"""Key of a trace's `info` with the tokens of each layer by expert."""


@dataclass(frozen=True)
class ExpertLoad:
    """Work of divided experts in one step, over all microbatches and replicas.

    A token that its router sends to k experts counts k times, and once also where its layer is recomputed.

    Attributes:
        tokens: by name of a layer's module of experts, the tokens of each expert.
        imbalance: for a layer, the tokens of the busiest process over the mean of those that divide its experts; this is the
            mean over layers. At 1 all processes have equal work; a layer takes about so many times as long as then.
        computed: tokens that each process of the run computed, by rank.
        exchange_seconds: time of each process in exchanges of tokens, by rank, in seconds: forward, backward and recompute,
            with its waits for the other processes.
    """

    tokens: dict[str, list[int]]
    imbalance: float
    computed: list[int]
    exchange_seconds: list[float]


@dataclass(frozen=True)
class ProcessLoad:
    """Work of the experts of one process in a step.

    Attributes:
        sharers: ranks of the processes that together have all experts, in the order of the experts.
        rank: this process among them.
        tokens: by name of a module, the tokens of each of this process's experts.
        seconds: time in exchanges.
    """

    sharers: tuple[int, ...]
    rank: int
    tokens: dict[str, list[int]]
    seconds: float


def join_loads(parts: Sequence[ProcessLoad]) -> ExpertLoad:
    """Return the work of all processes of a run, which are given by rank."""
    tokens: dict[str, list[int]] = {}
    by_layer: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for part in parts:
        place = part.sharers.index(part.rank)
        for name, counts in part.tokens.items():
            total = tokens.setdefault(name, [0] * (len(counts) * len(part.sharers)))
            for expert, count in enumerate(counts, place * len(counts)):
                total[expert] += count
            by_layer.setdefault((name, part.sharers), []).append(sum(counts))
    ratios = [max(counts) / fmean(counts) for counts in by_layer.values() if any(counts)]
    return ExpertLoad(
        tokens,
        fmean(ratios) if ratios else 1.0,
        [sum(map(sum, part.tokens.values())) for part in parts],
        [part.seconds for part in parts],
    )
