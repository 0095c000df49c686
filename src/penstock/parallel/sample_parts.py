"""Samples whose values axes divide among processes: the parts of a batch, and the losses of the parts together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.parallel.participant import Losses


class SampleDivision(Protocol):
    """The division of the samples of each microbatch among the processes of an axis."""

    @property
    def parts(self) -> int:
        """Number of processes that divide a sample."""

    def cut(self, values: Mapping[str, Any], index: int) -> dict[str, Any]:
        """Return one part of a batch.

        Args:
            values: values of the batch by what errors call them, as "the input x", that first.
        """

    def join(self, parts: Tensor) -> Tensor:
        """Return a value for each token of whole samples from those of all parts, which lie along dimension 0."""


@dataclass(frozen=True)
class SampleParts:
    """The parts of samples that the processes with the same parameters have.

    Attributes:
        divisions: those of the axes, outermost first; none where processes have whole samples.
        replica: number of this process among those with the same parameters; those that divide a sample are neighbours.
    """

    divisions: tuple[SampleDivision, ...] = ()
    replica: int = 0

    @property
    def count(self) -> int:
        """Number of parts of a sample."""
        return math.prod(division.parts for division in self.divisions)

    @property
    def index(self) -> int:
        """Number of this process's part."""
        return self.replica % self.count

    def cut(self, values: Mapping[str, Any], index: int) -> dict[str, Any]:
        """Return one part of a batch's values; see `SampleDivision.cut`."""
        part = dict(values)
        inner = self.count
        for division in self.divisions:
            inner //= division.parts
            part = division.cut(part, index // inner % division.parts)
        return part

    def join(self, losses: Losses, microbatches: int, replicas: int, sums: bool) -> Losses:
        """Return the losses of whole samples' microbatches, by their numbers in the whole batch, from those of parts.

        Args:
            microbatches: number of a replica's.
            replicas: number of processes with the same parameters.
            sums: whether losses are summed rather than weighed.
        """
        for division in reversed(self.divisions):
            replicas //= division.parts
            losses = _join(losses, division, microbatches, replicas, sums)
        return losses


def _join(losses: Losses, division: SampleDivision, microbatches: int, replicas: int, sums: bool) -> Losses:
    """Join the parts of one axis; `replicas` is the number of those that are left."""
    joined = Losses()
    for replica in range(replicas) if losses.total else ():
        for n in range(microbatches):
            ids = [(replica * division.parts + index) * microbatches + n for index in range(division.parts)]
            number = replica * microbatches + n
            weights = [losses.weights[i] for i in ids]
            joined.weights[number] = 1.0 if sums else sum(weights)
            joined.total[number] = _together([losses.total[i] for i in ids], weights, division, sums)
            names = sorted({name for i in ids for name in losses.parts.get(i, {})})
            joined.parts[number] = {
                name: _together([losses.parts[i][name] for i in ids], weights, division, sums)
                for name in names
            }
    return joined


def _together(values: list[Tensor], weights: list[float], division: SampleDivision, sums: bool) -> Tensor:
    every = torch.stack(values)
    if every.dim() > 1:  # of each token
        return division.join(every)
    if sums:
        return every.sum()
    counting = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
    if not counting:
        return every.mean()
    total: Tensor = sum(value * weight for value, weight in counting) / sum(weights)  # type: ignore[assignment]
    return total
