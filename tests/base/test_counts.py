from __future__ import annotations

import pytest

from penstock.base.counts import describe_size, is_count, plural, require_count
from penstock.base.errors import ConfigError


@pytest.mark.parametrize("value", [True, 0, -1, 1.0, "1", None])
def test_only_whole_numbers_of_at_least_one_are_counts(value: object):
    assert not is_count(value)
    with pytest.raises(ConfigError, match=r"^ranks must be a whole number of at least 1, got "):
        require_count("ranks", value)


def test_bounds_are_inclusive():
    assert is_count(1)
    assert is_count(0, least=0)
    assert is_count(8, most=8)
    assert not is_count(9, most=8)
    require_count("batch", 1_000_000, most=1_000_000)
    with pytest.raises(ConfigError, match="batch must be a whole number from 1 to 1,000,000, got 1000001"):
        require_count("batch", 1_000_001, most=1_000_000)


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (0, "rank", "0 ranks"),
        (1, "rank", "1 rank"),
        (2, "stage", "2 stages"),
        (1, "process", "1 process"),
        (3, "process", "3 processes"),
    ],
)
def test_a_noun_follows_its_count(count, noun, text):
    assert plural(count, noun) == text


def test_the_size_of_a_schedule():
    assert describe_size(1, 2, 1) == "1 rank, 2 stages, 1 microbatch"
    assert describe_size(2, 1, 8) == "2 ranks, 1 stage, 8 microbatches"
