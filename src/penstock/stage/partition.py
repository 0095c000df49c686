"""Partitions of layers into contiguous ranges, one per stage: evenly, by count, by range, or by weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from penstock.base.errors import SplitError

Ranges = tuple[tuple[int, int], ...]
"""One (start, stop) a stage: consecutive, covering all layers, none empty."""


def even(blocks: int, stages: int) -> Ranges:
    """Partition into equal counts, the remainder to the earliest stages: 10 blocks on 3 stages is 4, 3, 3."""
    _require_enough(blocks, stages)
    base, extra = divmod(blocks, stages)
    return _from_counts([base + (s < extra) for s in range(stages)])


def by_counts(counts: Sequence[int], blocks: int, *, embedding: bool = False, head: bool = False) -> Ranges:
    """Partition by the number of blocks of each stage.

    Args:
        embedding, head: whether layers before or after the blocks are a stage, too, if the first or last count is 0.
    """
    least = [1] * len(counts)
    if len(counts) > 1:
        least[0], least[-1] = int(not embedding), int(not head)
    if any(count < minimum for count, minimum in zip(counts, least, strict=True)) or not counts:
        raise SplitError(
            f"every stage needs at least one block, except a first one with an embedding and a last one with a head; the "
            f"counts are {list(counts)}"
        )
    if sum(counts) != blocks:
        raise SplitError(
            f"the counts {list(counts)} add up to {sum(counts)}, but there are {blocks} blocks to place"
        )
    return _from_counts(counts)


def by_ranges(ranges: Sequence[tuple[int, int]], blocks: int) -> Ranges:
    """Partition by the (start, stop) range of each stage."""
    partition = tuple((int(start), int(stop)) for start, stop in ranges)
    if not partition:
        raise SplitError("no ranges; give one (start, stop) a stage")
    if any(stop <= start for start, stop in partition):
        raise SplitError(f"an empty range in {list(partition)}; every stage needs at least one block")
    consecutive = all(a[1] == b[0] for a, b in pairwise(partition))
    if partition[0][0] != 0 or partition[-1][1] != blocks or not consecutive:
        raise SplitError(
            f"the ranges {list(partition)} do not cover blocks 0..{blocks - 1} exactly once, in order"
        )
    return partition


def by_weights(weights: Sequence[float], stages: int, speeds: Sequence[float] = ()) -> Ranges:
    """Partition so that the heaviest stage is as light as possible; exact.

    Among the partitions with that heaviest stage, the stages are as equal as possible (least sum of squares); of equals, the
    early stages get few layers, since they hold the most activations. Dynamic programming, O(layers² · stages).

    Args:
        weights: cost of each layer (seconds, bytes, parameters; any one unit), finite and not negative.
        speeds: speed of each stage's device, by which its weight is divided; empty where they are alike (default).
    """
    ranges = by_weights_within(weights, stages, speeds, [[len(weights)] * len(weights)] * stages)
    assert ranges is not None, "nothing limits the stages"
    return ranges


def by_weights_within(
    weights: Sequence[float], stages: int, speeds: Sequence[float], stops: Sequence[Sequence[int]]
) -> Ranges | None:
    """Partition as `by_weights`, with limits of the stages; None if no partition keeps them.

    Args:
        stops: for each stage, and each layer that it may begin with, the largest end of its range.
    """
    if bad := [w for w in weights if not (math.isfinite(w) and w >= 0)]:
        raise SplitError(f"weights must be finite and not negative; given {bad[0]!r}")
    _require_enough(len(weights), stages)
    speeds = speeds or [1.0] * stages
    heaviest, _ = _best(weights, speeds, stops, max)
    if heaviest == math.inf:
        return None
    _, counts = _best(
        weights, speeds, stops, lambda stage, rest: stage * stage + rest if stage <= heaviest else math.inf
    )
    return _from_counts(counts)


def _best(
    weights: Sequence[float],
    speeds: Sequence[float],
    stops: Sequence[Sequence[int]],
    join: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """Return the least value of a partition, and its counts; `join` adds a stage's weight to the value of those after it."""
    n, stages = len(weights), len(speeds)
    prefix = list(accumulate(weights, initial=0.0))
    # least[k][i]: the least value of layers i.. on k stages.
    least = [[math.inf] * (n + 1) for _ in range(stages + 1)]
    cut = [[n] * (n + 1) for _ in range(stages + 1)]
    least[0][n] = 0.0
    for k in range(1, stages + 1):
        for i in range(n - k, -1, -1):
            for j in range(i + 1, min(n - k + 1, stops[stages - k][i]) + 1):
                value = join((prefix[j] - prefix[i]) / speeds[stages - k], least[k - 1][j])
                # Not <=: of equal values the first, shortest range stays, so early stages get few layers.
                if value < least[k][i]:
                    least[k][i], cut[k][i] = value, j
    counts, start = [], 0
    for k in range(stages, 0, -1):
        stop = cut[k][start]
        counts.append(stop - start)
        start = stop
    return least[stages][0], counts


def _require_enough(blocks: int, stages: int) -> None:
    if stages < 1:
        raise SplitError(f"the number of stages must be at least 1, got {stages}")
    if blocks < stages:
        raise SplitError(
            f"{stages} stages but only {blocks} layer(s) to cut; use at most {blocks} stage(s) "
            "(ranks times virtual stages), or a model with more layers"
        )


def _from_counts(counts: Sequence[int]) -> Ranges:
    return tuple(pairwise(accumulate(counts, initial=0)))
