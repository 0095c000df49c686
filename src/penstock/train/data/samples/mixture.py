"""Samples of several sources, mixed by weight.

Samples are dealt out in blocks of 4,096. A block has of each source its share, rounded to whole samples, in an order drawn
from the seed and the block's number; each source's own samples come in their order. So a sample's source and its number
there follow from its number alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain

import numpy as np
import numpy.typing as npt

from penstock.base.errors import ConfigError
from penstock.train.data.samples.batches import Row, Samples
from penstock.train.data.samples.epochs import permute

Numbers = npt.NDArray[np.int64]
BLOCK = 4096


class Mixture:
    """Samples of several sources; see `penstock.train.data.samples.batches.Samples`.

    An epoch has as many samples as the sources have rows. With weights, a source may be read more or less than once in it.
    """

    def __init__(self, sources: Sequence[Samples], weights: Sequence[float], seed: int) -> None:
        self._sources = tuple(sources)
        self._shares = shares(weights, BLOCK)
        fractions = fractions_of(weights)
        self._ends = np.cumsum(self._shares)
        self._seed = seed
        for n, share in enumerate(self._shares, 1):
            if not share:
                raise ConfigError(
                    f"the weight of source {n} in data.sources must be at least 1/{BLOCK} of the sum of all, got "
                    f"{weights[n - 1]:g}, which is {fractions[n - 1]:.2g} of the sum; give it a larger one, or leave it out"
                )
        self._block = lru_cache(maxsize=4)(self._deal)

    @property
    def per_epoch(self) -> int:
        return sum(source.per_epoch for source in self._sources)

    @property
    def masked(self) -> bool:
        return any(source.masked for source in self._sources)

    @property
    def size(self) -> int | None:
        sizes = [source.size for source in self._sources]
        return None if None in sizes else sum(size or 0 for size in sizes)

    def read(self, samples: Numbers) -> list[Row]:
        rows: list[Row | None] = [None] * len(samples)
        which, numbers = self.places(samples)
        for n, source in enumerate(self._sources):
            here = np.flatnonzero(which == n)
            for at, row in zip(here.tolist(), source.read(numbers[here]), strict=True):
                rows[at] = row
        return [row for row in rows if row is not None]

    def spread(self, count: int) -> list[Row]:
        """Return up to `count` rows, of each source its share."""
        counts = shares(self._shares.tolist(), count)
        return list(
            chain.from_iterable(
                source.spread(int(n)) for source, n in zip(self._sources, counts, strict=True) if n
            )
        )

    def once(self) -> Iterator[Row]:
        for source in self._sources:
            yield from source.once()

    def places(self, samples: Numbers) -> tuple[Numbers, Numbers]:
        """Return the source of each sample, and its number in that source; both of shape (n,)."""
        blocks, places = np.divmod(samples, BLOCK)
        which, numbers = np.empty_like(samples), np.empty_like(samples)
        for block in np.unique(blocks):
            here = blocks == block
            source_of, number_of = self._block(int(block))
            which[here] = source_of[places[here]]
            numbers[here] = int(block) * self._shares[which[here]] + number_of[places[here]]
        return which, numbers

    def _deal(self, block: int) -> tuple[Numbers, Numbers]:
        """Return the source of each sample of a block, and its number among those of the block."""
        drawn = permute(np.arange(BLOCK, dtype=np.int64), BLOCK, self._seed, block)
        which = np.searchsorted(self._ends, drawn, side="right").astype(np.int64)
        numbers = np.empty_like(which)
        for n, share in enumerate(self._shares.tolist()):
            numbers[which == n] = np.arange(share)
        return which, numbers


def fractions_of(weights: Sequence[float]) -> list[float]:
    """Return the weights divided by their sum, however large they are."""
    _, exponent = math.frexp(max(weights))
    # By a power of two, so that only the range changes, and no other bit.
    scaled = [math.ldexp(weight, -exponent) for weight in weights]
    total = sum(scaled)
    return [weight / total for weight in scaled]


def shares(weights: Sequence[float], total: int) -> Numbers:
    """Divide a total into whole shares in the ratio of the weights, by the largest remainders; shape (weights,)."""
    exact = np.array(fractions_of(weights), np.float64) * total
    whole = np.floor(exact).astype(np.int64)
    largest = np.argsort(whole - exact, kind="stable")
    whole[largest[: total - int(whole.sum())]] += 1
    return whole
