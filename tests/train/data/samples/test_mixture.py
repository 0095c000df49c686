from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import ConfigError
from penstock.train.data.samples.batches import Row, Samples, blank
from penstock.train.data.samples.mixture import BLOCK, Mixture, fractions_of, shares


@dataclass
class Numbered:
    """Samples whose first token is the source's and whose second is the sample's number."""

    source: int
    per_epoch: int = 7
    masked: bool = False
    size: int | None = 10

    def read(self, samples: np.ndarray) -> list[Row]:
        rows = [blank(2) for _ in samples]
        for row, number in zip(rows, samples.tolist(), strict=True):
            row.tokens[:] = self.source, number
        return rows

    def spread(self, count: int) -> list[Row]:
        return self.read(np.arange(min(count, self.per_epoch)))

    def once(self) -> Iterator[Row]:
        yield from self.read(np.arange(self.per_epoch))


def mixture(*weights: float, seed: int = 0) -> Mixture:
    sources: list[Samples] = [Numbered(n) for n in range(len(weights))]
    return Mixture(sources, weights, seed)


def seen(mix: Mixture, samples: np.ndarray) -> list[tuple[int, int]]:
    return [(int(row.tokens[0]), int(row.tokens[1])) for row in mix.read(samples)]


def test_each_source_has_its_share_and_its_samples_come_in_their_order():
    mix = mixture(3, 1.5, 1)
    order = seen(mix, np.arange(2 * BLOCK))
    for block in (order[:BLOCK], order[BLOCK:]):
        assert Counter(source for source, _ in block) == dict(enumerate(shares([3, 1.5, 1], BLOCK).tolist()))
    for source in range(3):
        numbers = [number for one, number in order if one == source]
        assert numbers == list(range(len(numbers)))
    first = Counter(source for source, _ in order[:200])
    assert abs(first[0] - 109) < 25  # mixed, not one source after the other


def test_a_sample_depends_on_its_number_and_the_seed_alone():
    mix = mixture(2, 1)
    everything = seen(mix, np.arange(3 * BLOCK))
    some = np.array([2 * BLOCK + 5, 0, BLOCK - 1, BLOCK, 17])
    assert seen(mixture(2, 1), some) == [everything[n] for n in some]
    assert seen(mixture(2, 1, seed=1), np.arange(50)) != everything[:50]


def test_an_evaluation_has_of_each_source_its_share():
    mix = mixture(3, 1)
    assert Counter(int(row.tokens[0]) for row in mix.spread(8)) == {0: 6, 1: 2}
    assert Counter(int(row.tokens[0]) for row in mix.once()) == {0: 7, 1: 7}
    assert (mix.per_epoch, mix.masked, mix.size) == (14, False, 20)


def test_a_weight_too_small_to_be_drawn_is_refused():
    with pytest.raises(
        ConfigError, match=r"weight of source 2 in data.sources must be at least 1/4096 of the sum"
    ):
        mixture(1, 1e-6)


def test_weights_of_any_size_are_divided_by_their_sum():
    assert shares([1e308, 1e308, 1e308], 6).tolist() == [2, 2, 2]
    assert shares([5e-324, 1e-323], 6).tolist() == [2, 4]
    assert shares([1e308, 1.0], 6).tolist() == [6, 0]
    assert len(seen(mixture(1e308, 1.7e308), np.arange(BLOCK))) == BLOCK
    with pytest.raises(ConfigError, match=r"got 1, which is 5e-309 of the sum; give it a larger one"):
        mixture(1e308, 1.0, 1e308)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=8))
def test_samples_are_dealt_as_by_the_weights_themselves(weights: list[float]):
    exact = np.array(weights, np.float64) / sum(weights) * BLOCK
    again = np.array(fractions_of(weights), np.float64) * BLOCK
    assert np.array_equal(exact, again)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=8), st.integers(0, 5000))
def test_shares_add_up_and_are_off_by_less_than_one(weights: list[float], total: int):
    found = shares(weights, total)
    exact = np.array(weights) / sum(weights) * total
    assert found.sum() == total
    assert (np.abs(found - exact) < 1).all()
