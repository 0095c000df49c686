"""Replicas in processes: errors when one of them is gone."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist

from penstock.errors import PeerError
from penstock.parallel.data.reducer import GroupReducer
from penstock.runtime.workers.pool import LocalProcesses


def broken(rank: int, blocking: bool) -> list[str]:
    reducer = GroupReducer(timeout=300, blocking=blocking)
    reducer.all_reduce(torch.ones(4)).wait()
    if rank == 1:
        dist.destroy_process_group()
        return []
    messages = []
    begin = (
        reducer.all_reduce,
        reducer.all_reduce,
        reducer.reduce_scatter,
        reducer.all_gather,
    )  # the first finds out, the others know
    for act in begin:
        with pytest.raises(PeerError) as info:
            act(torch.ones(4)).wait()
        messages.append(str(info.value))
    return messages


@pytest.mark.parametrize("blocking", [False, True])
def test_a_connection_that_is_broken_when_a_reduction_begins_is_anothers_failure(
    processes: LocalProcesses, blocking: bool
):
    messages, _ = processes.run(2, broken, blocking)
    assert all(text.startswith("the connection to another replica broke: ") for text in messages), messages
