from __future__ import annotations

import pytest
import torch

from penstock.train.machine import choose_device, sharing_cores


def test_the_device_is_the_one_named_or_the_processs_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    def chosen(name: str, gpus: int, in_processes: bool) -> str:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        return str(choose_device(name, in_processes=in_processes))

    assert chosen("", 2, True) == chosen("cuda", 2, True) == "cuda:1"
    assert chosen("", 1, True) == "cpu"  # two processes, one GPU
    assert chosen("cuda:0", 1, True) == chosen("cuda", 1, False) == "cuda:0"
    assert chosen("", 2, False) == chosen("cpu", 2, True) == "cpu"


def test_threads_divide_what_is_set_and_it_is_put_back():
    torch.set_num_threads(4)
    with sharing_cores(2, 0, in_processes=False) as each:
        assert (each, torch.get_num_threads()) == (2, 4)
    with sharing_cores(2, 3, in_processes=False) as each:
        assert (each, torch.get_num_threads()) == (3, 6)
    with sharing_cores(8, 0, in_processes=False) as each:
        assert (each, torch.get_num_threads()) == (1, 8)
    assert torch.get_num_threads() == 4


def test_processes_share_the_machines_cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(12)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    before = torch.get_num_threads()
    with sharing_cores(6, 0, in_processes=True) as each:
        assert each == torch.get_num_threads() == 4
    with sharing_cores(6, 2, in_processes=True) as each:
        assert each == torch.get_num_threads() == 2
    assert torch.get_num_threads() == before
