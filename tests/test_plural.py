"""Counts with their nouns."""

import pytest

from penstock.plural import describe_size, plural


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
