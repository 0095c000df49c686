"""Examples grouped by a number of tokens: all of them, within it, in the fewest groups, of equal cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock

SMALL = st.lists(st.integers(1, 9), min_size=1, max_size=5)


def partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for n, group in enumerate(rest):
            yield [*rest[:n], [items[0], *group], *rest[n + 1 :]]


def within(lengths: Sequence[int], tokens: int) -> list[list[list[int]]]:
    """All groupings that a number of tokens allows."""
    return [
        found
        for found in partitions(range(len(lengths)))
        if all(len(group) * max(lengths[n] for n in group) <= tokens for group in found)
    ]


@given(lengths=SMALL, more=st.integers(0, 30), attention=st.floats(0, 2))
def test_no_grouping_has_fewer_groups(lengths: list[int], more: int, attention: float):
    tokens = max(lengths) + more
    groups = penstock.by_tokens(lengths, tokens, attention=attention)
    assert len(groups) == min(map(len, within(lengths, tokens)))


@given(
    lengths=st.lists(st.integers(1, 300), min_size=8, max_size=40),
    more=st.integers(0, 2000),
    least=st.integers(1, 2),
    replicas=st.integers(1, 3),
    attention=st.floats(0, 0.1),
)
def test_every_example_is_in_one_group_within_the_tokens(
    lengths: list[int], more: int, least: int, replicas: int, attention: float
):
    tokens = max(lengths) + more
    alone = penstock.by_tokens(lengths, tokens)
    if -(-len(alone) // replicas) * replicas > len(lengths):
        return
    groups = penstock.by_tokens(lengths, tokens, least=least, replicas=replicas, attention=attention)
    assert sorted(n for group in groups for n in group) == [*range(len(lengths))]
    assert all(len(group) * max(lengths[n] for n in group) <= tokens for group in groups)
    assert len(groups) == replicas * max(least, -(-len(alone) // replicas))


@given(lengths=SMALL, more=st.integers(0, 30), least=st.integers(1, 5), attention=st.floats(0, 2))
def test_the_costliest_group_costs_as_little_as_in_any_grouping(
    lengths: list[int], more: int, least: int, attention: float
):
    tokens = max(lengths) + more
    least = min(least, len(lengths))

    def worst(groups: Sequence[Sequence[int]]) -> float:
        longest = [(len(group), max(lengths[n] for n in group)) for group in groups]
        return max(rows * (length + attention * length**2) for rows, length in longest)

    groups = penstock.by_tokens(lengths, tokens, least=least, attention=attention)
    best = min(worst(each) for each in within(lengths, tokens) if len(each) == len(groups))
    assert worst(groups) == pytest.approx(best)


def test_costs_are_dealt_out_to_replicas():
    lengths = [100, 90, 80, 70, 60, 50, 40, 30]
    assert penstock.by_tokens(lengths, 100, least=4, replicas=2) == [[0], [3], [4], [7], [1], [2], [5], [6]]


def test_attention_makes_groups_of_long_rows_smaller():
    lengths = [64] * 4 + [8] * 32
    assert [len(g) for g in penstock.by_tokens(lengths, 256, least=2)] == [4, 32]
    assert max(len(g) for g in penstock.by_tokens(lengths, 256, least=3, attention=0.1) if 0 in g) == 2


@pytest.mark.parametrize(
    ("lengths", "tokens", "options", "said"),
    [
        ([3, 7], 5, {}, "an example has 7 tokens, more than the 5 .*allow at least 7, or cut"),
        ([3, 7], 0, {}, "tokens must be a whole number of at least 1, got 0"),
        ([3, 7], 7.5, {}, "tokens must be a whole number"),
        ([3, 7], 7, {"replicas": 0}, "replicas must be a whole number"),
        ([3, 7], 7, {"attention": -1}, "attention must be a number of at least 0, got -1"),
        ([3, "7"], 7, {}, "whole numbers of at least 1, got '7' for example 1"),
        ([3, 7], 7, {"least": 3}, "a batch of 2 examples is too small for 3 groups"),
        ([], 7, {}, "a batch of 0 examples is too small for 1 group"),
    ],
)
def test_what_cannot_be_grouped_is_refused(lengths: Any, tokens: Any, options: dict[str, Any], said: str):
    with pytest.raises(penstock.ConfigError, match=said):
        penstock.by_tokens(lengths, tokens, **options)
