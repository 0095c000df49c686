"""Replicas in threads: reproducible sums, and no endless wait."""

from __future__ import annotations

import threading

import pytest
import torch

from penstock.errors import PeerError, WaitTimeoutError
from penstock.parallel.data.reducer import part_of
from tests.support.replicas import each, together


def values(rank: int, count: int = 12) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


def test_sums_are_in_the_order_of_the_replicas():
    def body(reducer):
        mine = [values(reducer.rank + 10 * n) for n in range(5)]
        for handle in [reducer.all_reduce(flat) for flat in mine]:  # several under way at once
            handle.wait()
        return mine

    for actual in together(3, body):
        for n, flat in enumerate(actual):
            assert torch.equal(flat, (values(10 * n) + values(10 * n + 1)) + values(10 * n + 2))


def test_each_gets_its_part_of_the_sum_and_all_get_all_parts():
    def body(reducer):
        flat = values(reducer.rank)
        reducer.reduce_scatter(flat).wait()
        mine = part_of(flat, reducer.rank, 3).clone()
        full = torch.zeros(12)
        part_of(full, reducer.rank, 3).copy_(mine)
        reducer.all_gather(full).wait()
        return mine, full

    total = (values(0) + values(1)) + values(2)
    for rank, (mine, full) in enumerate(together(3, body)):
        assert torch.equal(mine, part_of(total, rank, 3))
        assert torch.equal(full, total)


def test_numbers_are_exchanged():
    actual = together(3, lambda r: r.exchange([r.rank, -7])())
    assert actual == [[[0, -7], [1, -7], [2, -7]]] * 3


def test_who_did_not_come_is_named():
    here = threading.Barrier(3)

    def body(reducer):
        here.wait(60)
        if reducer.rank != 1:
            reducer.all_reduce(values(0)).wait()

    first, absent, third = each(3, body, timeout=1.0)
    assert absent is None
    for error in (first, third):
        assert type(error) is WaitTimeoutError
        assert "replica(s) [1]" in str(error)


def test_a_failure_ends_every_wait_at_once_now_and_later():
    def body(reducer):
        if reducer.rank == 1:
            reducer.fail("out of memory")
            return None
        with pytest.raises(PeerError, match="replica 1 failed: out of memory"):
            reducer.all_reduce(values(0)).wait()
        with pytest.raises(PeerError, match="replica 1 failed: out of memory"):
            reducer.exchange([1])()
        return True

    assert together(3, body) == [True, None, True]


def test_a_sum_that_cannot_be_made_fails_on_all():
    errors = each(2, lambda r: r.all_reduce(values(0, 3 + r.rank)).wait())
    for error in errors:
        assert type(error) is PeerError
        assert "the replicas' sum failed" in str(error)
