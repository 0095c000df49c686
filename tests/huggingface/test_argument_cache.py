"""What layers are called with is made again as soon as a tensor that it follows from changes."""

from __future__ import annotations

import gc

import torch

from penstock.huggingface.argument_cache import ArgumentCache, Same


def test_a_tensor_in_a_key_is_equal_to_itself_until_it_is_written_to():
    one, other = torch.zeros(2), torch.zeros(2)
    assert Same(one) == Same(one)
    assert hash(Same(one)) == hash(Same(one))
    assert Same(one) != Same(other)
    assert Same(one) != one.data_ptr()
    before = Same(one)
    one.add_(1)
    assert before == before
    assert Same(one) != before
    assert {before: "old"}.get(Same(one)) is None


def test_a_key_of_a_tensor_that_is_gone_equals_nothing():
    tensor = torch.zeros(2)
    one, other = Same(tensor), Same(tensor)
    assert one == other
    del tensor
    gc.collect()
    assert one != other


def test_values_of_shapes_are_kept_for_the_last_few():
    cache, made = ArgumentCache(), []
    for key in [*range(32), 0, 32, 0, 1]:  # 1 was the least recently used
        assert cache.get(None, key, lambda key=key: made.append(key) or key) == key
    assert made == [*range(33), 1]


def test_values_of_an_owner_are_kept_until_it_is_written_to_or_dies():
    cache, made = ArgumentCache(), []

    def get(owner: torch.Tensor, key: str) -> int:
        return cache.get(owner, key, lambda: made.append(key) or len(made))

    owner, other = torch.zeros(2), torch.zeros(2)
    assert [get(owner, "a"), get(owner, "b"), get(other, "a"), get(owner, "a")] == [1, 2, 3, 1]
    owner.add_(1)
    assert [get(owner, "a"), get(other, "a")] == [4, 3]
    del owner
    gc.collect()
    assert len(cache._by_owner) == 1
