"""Links between real processes, which stand for ranks of one machine or of several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed as dist

from penstock.measure import link_speeds
from penstock.measure.link_speeds import device_round_trips, measure_links
from penstock.runtime.workers.pool import LocalProcesses
from penstock.runtime.workers.world import World

CPU = torch.device("cpu")


def measured(rank: int, machines: list[str]) -> dict[str, Any]:
    world = World(rank, len(machines), 30.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link_speeds, "_ROUNDS", 2)
        return measure_links(world, machines, CPU, 30.0)


def test_one_machine_has_links_within_it(processes: LocalProcesses):
    first, second = processes.run(2, measured, ["a", "a"])
    assert first == second
    assert set(first) == {"node"}
    assert set(first["node"]) == {"latency", "bandwidth"}
    assert min(first["node"].values()) > 0


@pytest.mark.slow
def test_several_machines_have_links_between_them_and_reductions(processes: LocalProcesses):
    answers = processes.run(4, measured, ["a", "a", "b", "b"])
    assert all(answer == answers[0] for answer in answers)
    assert set(answers[0]) == {"node", "network"}
    assert set(answers[0]["network"]) == {"latency", "bandwidth", "reduce_bandwidth"}
    assert all(value > 0 for link in answers[0].values() for value in link.values())
    lonely = processes.run(3, measured, ["a", "b", "c"])[2]
    assert set(lonely) == {"network"}


def trips(rank: int) -> list[float]:
    World(rank, 2, 30.0)
    payload = torch.full((1000,), rank, dtype=torch.uint8)
    times = device_round_trips(1 - rank, payload, 4, rank == 0)
    assert payload.eq(0).all()  # rank 1 received rank 0's
    dist.barrier()
    return times


def test_values_on_devices_go_through_the_process_group(processes: LocalProcesses):
    for times in processes.run(2, trips):
        assert len(times) == 4
        assert min(times) > 0
