"""Parts of the stages of a traced step, and costs of stages that are cut in another way."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np

from penstock.base.errors import SplitError
from penstock.schedule.ops import Kind
from penstock.simulate.costs import Table
from penstock.stage.partition import even
from penstock.trace.events import Trace


@dataclass(frozen=True)
class StageParts:
    """Parts of the stages that can move to another stage."""

    counts: tuple[int, ...]  # number of parts of every stage
    # The parts are the blocks that a split counts, and the first stage also has the embedding, the last one
    # the head; False: they are all layers, because the trace does not tell which are blocks.
    blocks: bool

    @classmethod
    def of(cls, trace: Trace, stages: int) -> Self | None:
        """Return the parts of a trace's stages: from ``info["blocks"]``, or from ``info["split"]``; None without either."""
        blocks = _list(trace.info.get("blocks"), stages)
        if blocks and all(isinstance(count, int) and count >= 1 for count in blocks):
            return cls(tuple(blocks), True)
        split = _list(trace.info.get("split"), stages)
        if split and all(isinstance(layers, list | tuple) and layers for layers in split):
            return cls(tuple(len(layers) for layers in split), False)
        return None

    def moved(self, source: int, target: int) -> Self:
        """Return the parts after one of stage `source` has moved to stage `target`."""
        counts = list(self.counts)
        counts[source] -= 1
        counts[target] += 1
        return type(self)(tuple(counts), self.blocks)

    def evenly(self, stages: int) -> Self | None:
        """Return an even split over so many stages; None if there are too few parts."""
        try:
            ranges = even(sum(self.counts), stages)
        except SplitError:
            return None
        return type(self)(tuple(stop - start for start, stop in ranges), self.blocks)

    def recost(self, table: Table, other: Self) -> Table:
        """Return a table, one row a stage, of another split of the same parts.

        Every part of a stage counts the same. Of the first and the last stage, what exceeds the blocks of other stages is
        the embedding's or the head's, and stays there.
        """
        each = table / np.array(self.counts, np.float64)[:, None]
        ends = np.zeros((2, table.shape[1]))
        if self.blocks:
            inner = np.median(each[1:-1], axis=0) if len(each) > 2 else each.min(axis=0)
            for n, stage in enumerate((0, len(each) - 1)):
                usual = np.minimum(each[stage], inner)
                ends[n] += (each[stage] - usual) * self.counts[stage]
                each[stage] = usual
        parts = np.repeat(each, self.counts, axis=0)
        edges = np.cumsum([0, *other.counts])
        stages = np.stack([parts[a:b].sum(axis=0) for a, b in pairwise(edges)])
        stages[0] += ends[0]
        stages[-1] += ends[1]
        return stages

    @property
    def setting(self) -> list[int] | list[tuple[int, int]]:
        """Value of ``Pipeline(split=...)``: counts of blocks, or ranges of layers."""
        if self.blocks:
            return list(self.counts)
        return [(int(a), int(b)) for a, b in pairwise(np.cumsum([0, *self.counts]))]


def _list(value: object, stages: int) -> list[Any]:
    """Return a list of one entry per stage; empty if the value from a file is none."""
    return list(value) if isinstance(value, list | tuple) and len(value) == stages else []


def saved_sizes(trace: Trace, stages: int) -> Table:
    """Return what a forward of every stage keeps for its backward, float64, shape (stages,): the median in the trace.

    All stages are alike (1) if the trace does not tell, or nothing is kept.
    """
    sizes = np.zeros(stages)
    if trace.held is not None:
        change = np.zeros(len(trace))
        for rows in trace.rank_slices():
            change[rows] = np.diff(trace.held[rows], prepend=np.int64(0))
        for stage in range(stages):
            forward = change[(trace.kind == Kind.F) & (trace.stage == stage)]
            sizes[stage] = max(0.0, float(np.median(forward))) if len(forward) else 0.0
    return sizes if sizes.any() else np.ones(stages)


def recut(seconds: Table, stages: int) -> Table:
    """Return the costs of another number of stages of the same model, shape (stages, kinds).

    Every new stage is the same share of the model, counted in old stages, and costs the sum of the old stages' parts.
    """
    edges = np.linspace(0, len(seconds), stages + 1)
    total = np.vstack([np.zeros(seconds.shape[1]), np.cumsum(seconds, axis=0)])
    at_edges = np.stack([np.interp(edges, np.arange(len(total)), column) for column in total.T], axis=1)
    return np.maximum(np.diff(at_edges, axis=0), 0)
