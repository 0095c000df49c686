from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.train.device import choose_device, sharing_cores


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


def test_a_containers_quota_is_shared_and_not_the_hosts_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Containers that each start a thread for every core of their host slow each other down."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("450000 100000\n")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with sharing_cores(2, 0, in_processes=True, root=tmp_path) as each:
        assert each == torch.get_num_threads() == 4
    torch.set_num_threads(64)
    with sharing_cores(2, 0, in_processes=False, root=tmp_path) as each:
        assert (each, torch.get_num_threads()) == (2, 4)
    with sharing_cores(2, 8, in_processes=False, root=tmp_path) as each:
        assert (each, torch.get_num_threads()) == (8, 16)


def test_processes_take_omp_num_threads_unless_torchrun_set_it_and_else_their_machines_cores(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(12)), raising=False)
    before = torch.get_num_threads()

    def chosen(omp: str, threads: int = 0) -> int:
        monkeypatch.setenv("OMP_NUM_THREADS", omp)
        with sharing_cores(3, threads, in_processes=True, root=Path("/nowhere")) as each:
            assert each == torch.get_num_threads()
            return each

    assert (chosen("1"), chosen("2"), chosen("what"), chosen("0")) == (1, 2, 12, 12)
    assert chosen("", threads=2) == 2
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert (chosen("1"), chosen("2")) == (12, 2)
    assert torch.get_num_threads() == before
