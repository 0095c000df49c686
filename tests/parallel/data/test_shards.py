"""Owners of whole matrices."""

from __future__ import annotations

import torch

from penstock.parallel.data.shards import choose_owners


def owners(*shapes: tuple[int, ...], size: int = 2, shared: tuple[int, ...] = ()) -> list[int]:
    parameters = [torch.empty(shape, device="meta") for shape in shapes]
    found = choose_owners(parameters, {parameters[n]: "shared" for n in shared}, size)
    return [found[parameter] for parameter in parameters]


def test_the_costliest_come_first_each_to_the_owner_with_the_least():
    assert owners((4, 4), (4, 4), (8, 8), (4, 4)) == [1, 1, 0, 1]
    assert owners((4, 4), (4, 4), (4, 4), (4, 4), size=3) == [0, 1, 2, 0]


def test_the_cost_is_rows_times_columns_times_the_smaller():
    assert owners((2, 32), (8, 8), (2, 32), (2, 32)) == [1, 0, 1, 1]  # 128, 512, 128, 128
    assert owners((64,), (8, 8), (32,)) == [1, 0, 1]


def test_owners_of_shared_matrices_depend_on_these_alone_and_count():
    assert owners((8, 8), (4, 4), (9, 9), (4, 4), shared=(1, 3)) == [1, 0, 0, 1]
    assert owners((2, 2), (4, 4), (3, 3), shared=(1,)) == [1, 0, 1]
