"""Which processes a collective is of."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import distributed as dist

from penstock.runtime.health.hang import Timeout
from penstock.runtime.health.peers import PeerRegistry
from penstock.runtime.workers import collectives
from penstock.runtime.workers.collectives import Collectives
from penstock.runtime.workers.pool import LocalProcesses


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "cuda:nccl"])
@pytest.mark.parametrize("group", ["some", None])
def test_values_are_gathered_from_a_group_or_from_all(group, backend: str, monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple] = []

    def gather_values(value: object, members: object, *finish: object) -> list[object]:
        seen.append((members, len(finish)))
        return [value]

    monkeypatch.setattr(collectives, "gather_values", gather_values)
    monkeypatch.setattr(collectives, "dist", SimpleNamespace(get_backend_config=lambda members: backend))
    every = SimpleNamespace(everyone="all")
    assert Collectives.gather(every, 5, group, "compare") == [5]
    # Waits of a group for GPUs alone cannot be cut into short ones.
    assert seen == [(group or "all", int("cpu" in backend))]


def summed(rank: int) -> list[float]:
    """Return sums over pairs and over all, and what the second of a pair and of all has."""
    pair = [dist.new_group([first, first + 1]) for first in (0, 2)][rank // 2]
    run, found = Collectives(Timeout(60.0), PeerRegistry()), []
    for group in (pair, None):
        values = torch.tensor([2.0**rank])
        run.all_reduce(values, group, "add up")
        found.append(values.item())
    for group in (pair, None):
        values = torch.tensor([2.0**rank])
        run.broadcast(values, 1, group, "tell")
        found.append(values.item())
    return found


def test_values_are_added_up_and_told_in_a_group_or_in_all(processes: LocalProcesses):
    first, second = [3.0, 15.0, 2.0, 2.0], [12.0, 15.0, 8.0, 2.0]
    assert processes.run(4, summed) == [first, first, second, second]
