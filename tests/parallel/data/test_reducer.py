"""Replicas in processes: sums, parts, numbers, and errors when one of them is gone."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist

from penstock.base.errors import PeerError
from penstock.parallel.data.reducer import part_of
from penstock.runtime.workers.pool import LocalProcesses
from tests.support.replicas import reducer_of_all


def values(number: int) -> torch.Tensor:
    return torch.randn(12, generator=torch.Generator().manual_seed(number))


def collectives(rank: int) -> tuple:
    reducer = reducer_of_all()
    sums = [values(rank + 10 * n) for n in range(5)]
    for handle in [reducer.all_reduce(flat) for flat in sums]:  # several under way at once
        handle.wait()
    flat = values(rank)
    reducer.reduce_scatter(flat).wait()
    part = part_of(flat, rank, 2).clone()
    full = torch.zeros(12)
    part_of(full, rank, 2).copy_(part)
    reducer.all_gather(full).wait()
    owned = [values(rank), values(rank + 5)]
    for owner in range(2):
        reducer.reduce(owned[owner], owner).wait()
        reducer.broadcast(owned[owner], owner).wait()
    return sums, part, full, owned, reducer.exchange([rank, -7])(), reducer.gather({"rank": rank})


def test_sums_and_parts_of_sums_are_bit_for_bit_those_of_both_and_values_are_exchanged(
    processes: LocalProcesses,
):
    total = values(0) + values(1)
    for rank, (sums, part, full, owned, numbers, objects) in enumerate(processes.run(2, collectives)):
        for n, flat in enumerate(sums):
            assert torch.equal(flat, values(10 * n) + values(10 * n + 1))
        assert torch.equal(part, part_of(total, rank, 2))
        assert torch.equal(full, total)
        assert torch.equal(owned[0], total)
        assert torch.equal(owned[1], values(5) + values(6))
        assert numbers == [[0, -7], [1, -7]]
        assert objects == [{"rank": 0}, {"rank": 1}]


def broken(rank: int) -> list[str]:
    reducer = reducer_of_all()
    reducer.all_reduce(torch.ones(4)).wait()
    if rank == 1:
        dist.destroy_process_group()
        return []
    messages = []
    # The first finds out, the others know.
    for act in (reducer.all_reduce, reducer.all_reduce, reducer.reduce_scatter, reducer.all_gather):
        with pytest.raises(PeerError) as info:
            act(torch.ones(4)).wait()
        messages.append(str(info.value))
    return messages


def test_a_connection_that_is_broken_when_a_reduction_begins_is_anothers_failure(processes: LocalProcesses):
    messages, _ = processes.run(2, broken)
    assert all(text.startswith("the connection to another replica broke: ") for text in messages), messages
