"""Seeds depend only on their key, and different keys never give the same bytes."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from penstock.stage.rng.isolated_rng import seed_of


def test_a_seed_is_the_digest_of_its_parts_with_their_kinds_and_lengths():
    digest = hashlib.sha256(b"i1:7s8:blocks.3i1:0").digest()
    assert seed_of(7, "blocks.3", 0) == int.from_bytes(digest[:8], "little")
    assert 0 <= seed_of(7, "blocks.3", 0) < 2**64


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, 23), (12, 3)),
        (("a", "b"), ("ab",)),
        ((1,), ("1",)),
        (("a", ""), ("a",)),
        (("s1:a",), ("a",)),
        ((-1,), (1,)),
    ],
)
def test_different_parts_give_different_seeds(one: tuple[object, ...], other: tuple[object, ...]):
    assert seed_of(*one) != seed_of(*other)


def test_integers_of_any_kind_count_as_integers_and_nothing_else_does():
    assert seed_of(np.int64(5), True) == seed_of(5, 1)
    with pytest.raises(TypeError):
        seed_of(1.0)
    with pytest.raises(TypeError):
        seed_of(None)
