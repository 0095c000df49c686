"""Buckets are made in order, by size and by kind; and owners of whole matrices."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.parallel.replicas.layout import Slot, plan_buckets
from penstock.parallel.replicas.shards import choose_owners

CPU = torch.device("cpu")


def slots(*kib: float, dtype: torch.dtype = torch.float32) -> list[Slot]:
    return [Slot(int(k * 256), dtype, CPU) for k in kib]


def members(plans) -> list[tuple[int, ...]]:
    return [plan.members for plan in plans]


def test_the_first_bucket_is_smaller():
    plans = plan_buckets(slots(1, 1, 1, 1, 1, 1, 1), range(7), 4096, 2048)
    assert members(plans) == [(0, 1), (2, 3, 4, 5), (6,)]


def test_the_order_given_counts():
    assert members(plan_buckets(slots(1, 1, 1), [2, 0, 1], 2048, 2048)) == [(2, 0), (1,)]


def test_a_large_gradient_has_its_own_bucket_and_the_small_ones_around_it_stay_together():
    plans = plan_buckets(slots(1, 5, 1, 4, 1), range(5), 4096, 4096)
    assert members(plans) == [(1,), (3,), (0, 2, 4)]


def test_owners_do_not_mix():
    mixed = [Slot(64, torch.float32, CPU, owner=owner) for owner in (None, 0, 1, 0, None)]
    plans = plan_buckets(mixed, range(5))
    assert [(plan.members, plan.owner) for plan in plans] == [((2,), 1), ((1, 3), 0), ((0, 4), None)]


def test_dtypes_and_groups_do_not_mix():
    mixed = [
        *slots(1, 1),
        *slots(1, 1, dtype=torch.bfloat16),
        Slot(1, torch.float32, CPU, "other"),
        *slots(1),
    ]
    plans = plan_buckets(mixed, range(6))
    assert members(plans) == [(2, 3), (4,), (0, 1, 5)]
    assert [(p.dtype, p.group) for p in plans] == [
        (torch.bfloat16, None), (torch.float32, "other"), (torch.float32, None),
    ]  # fmt: skip


@given(
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=30),
    bucket=st.integers(1, 5000),
    first=st.integers(1, 5000),
    parts=st.integers(1, 5),
    seed=st.randoms(),
)
@settings(max_examples=30, derandomize=True)
def test_every_gradient_has_a_place_of_its_own(sizes, bucket, first, parts, seed):
    all_slots = [Slot(n, [torch.float32, torch.bfloat16][n % 2], CPU, parts=parts) for n in sizes]
    order = list(range(len(sizes)))
    seed.shuffle(order)
    plans = plan_buckets(all_slots, order, bucket, first)
    assert sorted(m for p in plans for m in p.members) == list(range(len(sizes)))
    place = {slot: n for n, slot in enumerate(order)}
    assert [place[p.members[-1]] for p in plans] == sorted(place[p.members[-1]] for p in plans)
    for n, plan in enumerate(plans):
        assert {all_slots[m].dtype for m in plan.members} == {plan.dtype}
        assert plan.elements % parts == 0
        end = 0
        for member, start in zip(plan.members, plan.starts, strict=True):
            assert start >= end
            assert start * plan.dtype.itemsize % 64 == 0
            end = start + sizes[member]
        assert end <= plan.elements
        held = sum(all_slots[m].bytes for m in plan.members)
        assert len(plan.members) == 1 or held <= (bucket if n else max(bucket, first))


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
