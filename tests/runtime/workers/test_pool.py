"""Workers of a pool: they are as if new, though they may be forked from a process that an earlier pool started."""

from __future__ import annotations

import os
import random
import sys

import numpy as np
import torch

from penstock.runtime.start.launch_environment import local_rank, local_size
from penstock.runtime.workers.pool import LocalProcesses


def surroundings(rank: int) -> dict[str, object]:
    return {
        "variable": os.environ.get("PENSTOCK_TEST_VARIABLE"),
        "drawn": (random.random(), np.random.random(), torch.rand(()).item()),
        "threads": torch.get_num_threads(),
        "folder": os.getcwd(),
        "process": os.getpid(),
    }


def test_workers_have_the_environment_of_their_pools_first_call_and_draw_their_own_numbers(monkeypatch):
    seen = []
    for value in ("first", "second", None):
        if value is None:
            monkeypatch.delenv("PENSTOCK_TEST_VARIABLE")
        else:
            monkeypatch.setenv("PENSTOCK_TEST_VARIABLE", value)
        with LocalProcesses(2, threads=2) as pool:
            seen += [(value, one) for one in pool.run(2, surroundings)]
    assert [one["variable"] for value, one in seen] == [value for value, _ in seen]
    assert [len({one["drawn"][kind] for _, one in seen}) for kind in range(3)] == [6, 6, 6]
    assert {(one["threads"], one["folder"]) for _, one in seen} == {(2, os.getcwd())}
    assert len({one["process"] for _, one in seen}) == 6


def modules_at_start(rank: int) -> bool:
    return "torch._dynamo" in sys.modules


def test_a_worker_has_imported_what_its_first_optimizer_needs():
    with LocalProcesses(1) as pool:
        assert pool.run(1, modules_at_start) == [sys.platform == "linux"]


def place(rank: int) -> tuple[int, int | None]:
    return local_rank(), local_size()


def test_a_worker_knows_its_place_on_the_machine_by_which_it_takes_its_gpu(processes: LocalProcesses):
    assert processes.run(3, place) == [(0, 3), (1, 3), (2, 3)]
    assert processes.run(2, place) == [(0, 2), (1, 2)]
