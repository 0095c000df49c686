"""Every kind of partition, compared with its definition and with a search over all partitions."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import SplitError
from penstock.stage.partition import by_counts, by_ranges, by_weights, by_weights_within, even


def sizes(ranges):
    return [stop - start for start, stop in ranges]


@given(st.integers(1, 40), st.integers(1, 40))
def test_an_even_split_owns_every_block_once_and_puts_the_remainder_first(blocks, stages):
    if blocks < stages:
        with pytest.raises(SplitError, match=f"only {blocks} layer"):
            even(blocks, stages)
        return
    ranges = even(blocks, stages)
    assert [n for start, stop in ranges for n in range(start, stop)] == list(range(blocks))
    assert sizes(ranges) == sorted(sizes(ranges), reverse=True)
    assert max(sizes(ranges)) - min(sizes(ranges)) <= 1


# Speeds by which all weights can be divided without a remainder.
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=9),
    st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=5),
)
def test_a_weighted_split_is_as_good_as_the_best_of_all(weights, speeds):
    stages = len(speeds)
    if len(weights) < stages:
        return

    def rated(ranges):
        loads = [sum(weights[a:b]) / speed for (a, b), speed in zip(ranges, speeds, strict=True)]
        return max(loads), sum(load**2 for load in loads), sizes(ranges)

    assert rated(by_weights(weights, stages, speeds)) == min(
        rated(tuple(itertools.pairwise((0, *cuts, len(weights)))))
        for cuts in itertools.combinations(range(1, len(weights)), stages - 1)
    )
    assert by_weights(weights, stages, [2] * stages) == by_weights(weights, stages)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=8),
    st.lists(st.integers(0, 12), min_size=1, max_size=4),
)
def test_a_split_within_limits_is_as_good_as_the_best_that_keeps_them(layers, limits):
    stages, count = len(limits), len(layers)
    if count < stages:
        return
    weights, sizes_of = ([layer[n] for layer in layers] for n in (0, 1))
    stops = [
        [max(stop for stop in range(a, count + 1) if sum(sizes_of[a:stop]) <= most) for a in range(count)]
        for most in limits
    ]
    every = [
        tuple(itertools.pairwise((0, *cuts, count)))
        for cuts in itertools.combinations(range(1, count), stages - 1)
    ]
    allowed = [
        ranges
        for ranges in every
        if all(sum(sizes_of[a:b]) <= most for (a, b), most in zip(ranges, limits, strict=True))
    ]

    def rated(ranges):
        loads = [sum(weights[a:b]) for a, b in ranges]
        return max(loads), sum(load**2 for load in loads), sizes(ranges)

    assert by_weights_within(weights, stages, [], stops) == min(allowed, key=rated, default=None)


@pytest.mark.parametrize("weights", [[1.0, float("nan")], [1.0, -1.0], [float("inf"), 1.0]])
def test_weights_that_are_no_costs_are_refused(weights):
    with pytest.raises(SplitError, match="finite and not negative"):
        by_weights(weights, 1)


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([(0, 2), (3, 4)], "exactly once"),
        ([(0, 3), (2, 4)], "exactly once"),
        ([(0, 2), (2, 3)], "exactly once"),
        ([(0, 2), (2, 2), (2, 4)], "empty range"),
        ([], "no ranges"),
    ],
)
def test_ranges_that_do_not_cover_are_refused(ranges, message):
    with pytest.raises(SplitError, match=message):
        by_ranges(ranges, 4)


def test_counts_must_add_up():
    assert by_counts([1, 3], 4) == ((0, 1), (1, 4))
    with pytest.raises(SplitError, match="add up to 5"):
        by_counts([2, 3], 4)
    assert by_counts([0, 4, 0], 4, embedding=True, head=True) == ((0, 0), (0, 4), (4, 4))
    for counts, more in [
        ([4, 0], {"embedding": True}),
        ([0, 4], {"head": True}),
        ([2, 0, 2], {"embedding": True, "head": True}),
        ([0], {"embedding": True}),
        ([5, -1], {"head": True}),
        ([], {}),
    ]:
        with pytest.raises(SplitError, match="at least one block"):
            by_counts(counts, sum(counts), **more)
    with pytest.raises(SplitError, match="at least 1"):
        even(4, 0)
