"""Ranks take a share of the cores, whichever launchers started them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from penstock.base import host
from penstock.base.errors import ConfigError
from penstock.runtime.options import ExecutionOptions
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.start.cpu_threads import share_cores, threads_of_ranks
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import plain


@pytest.fixture(autouse=True)
def put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    yield
    torch.set_num_threads(before)


def container(root: Path, quota: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/\n")
    (root / "sys/fs/cgroup/cpu.max").write_text(f"{quota}\n")
    return root


def test_threads_of_one_process_divide_its_number_or_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    torch.set_num_threads(8)
    small = container(tmp_path, "450000 100000")
    assert threads_of_ranks(2, root=tmp_path / "none") == 4
    assert threads_of_ranks(2, root=small) == 2
    assert threads_of_ranks(16, root=small) == 1
    assert threads_of_ranks(2, 5, root=small) == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert threads_of_ranks(2, root=small) == 4


def test_processes_of_two_launchers_on_one_machine_share_its_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each launcher knows of its own process only; the exchange knows of both."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(12)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    torch.set_num_threads(12)
    assert share_cores(lambda value: [value, value, value], root=tmp_path) == 4
    assert torch.get_num_threads() == 4
    assert share_cores(lambda value: [value], root=tmp_path) == 4  # never more than was set
    assert share_cores(lambda value: [value] * 3, 7, root=tmp_path) == torch.get_num_threads() == 7
    monkeypatch.setenv("OMP_NUM_THREADS", "12")
    torch.set_num_threads(12)
    assert share_cores(lambda value: [value] * 3, root=tmp_path) == 12


def limits(cpus: range, *quotas: tuple[str, float], machine: str = "a") -> host.CoreLimits:
    return host.CoreLimits(machine, tuple(cpus), quotas)


@pytest.mark.parametrize(
    ("processes", "shares"),
    [
        ([limits(range(8))], [8]),
        ([limits(range(8))] * 3, [2, 2, 2]),
        ([limits(range(8)), limits(range(8), machine="b")], [8, 8]),
        # srun binds each task to cores of its own.
        ([limits(range(4)), limits(range(4, 8))], [4, 4]),
        ([limits(range(8)), limits(range(6, 8))], [7, 1]),
        # Two containers, each with its own quota; then two processes in one of them.
        ([limits(range(64), ("1:7", 4.0)), limits(range(64), ("1:9", 6.5))], [4, 6]),
        ([limits(range(64), ("1:7", 5.0))] * 2, [2, 2]),
        # A quota of the group above all containers.
        ([limits(range(64), ("1:7", 8.0), ("1:1", 8.0)), limits(range(64), ("1:9", 8.0), ("1:1", 8.0))], [4, 4]),
        ([limits(range(2), ("1:7", 0.5))] * 2, [1, 1]),
    ],
)  # fmt: skip
def test_no_core_is_given_twice(processes: list[host.CoreLimits], shares: list[int]):
    assert [host.core_share(one, processes) for one in processes] == shares


def test_a_groups_quota_has_an_identifier_of_its_own(tmp_path: Path):
    first, second = (container(tmp_path / name, "300000 100000") for name in ("a", "b"))
    (one,), (other,) = (host.core_limits(root).quotas for root in (first, second))
    assert one[1] == other[1] == 3.0
    assert one[0] != other[0]
    assert host.core_limits(first).quotas == (one,)


def threads_used(pipe: Pipeline) -> list[int]:
    return pipe.on_ranks(lambda rank: torch.get_num_threads())


def pipeline(**options: int) -> Pipeline:
    return Pipeline(
        plain.model(4), torch.nn.functional.mse_loss, microbatches=2, ranks=2, execution=ExecutionOptions(**options)
    )  # fmt: skip


def test_the_rank_threads_of_a_pipeline_have_the_number_it_says():
    torch.set_num_threads(6)
    with pipeline() as pipe:
        quota = host.core_quota()
        assert (
            threads_used(pipe)
            == [pipe.threads] * 2
            == [3 if quota is None else min(3, max(1, int(quota) // 2))] * 2
        )
    with pipeline(threads=5) as pipe:
        assert threads_used(pipe) == [5, 5] == [pipe.threads] * 2
    with pytest.raises(
        ConfigError, match="threads must be a number of CPU threads per rank, or 0 for a share, got -1"
    ):
        pipeline(threads=-1)


def in_a_process(rank: int) -> tuple[int, int, int]:
    os.environ.pop("OMP_NUM_THREADS", None)
    torch.set_num_threads(64)
    with pipeline() as pipe:
        return pipe.threads, torch.get_num_threads(), host.cores()


def test_a_pipeline_of_processes_lowers_their_threads_to_their_share(processes: LocalProcesses):
    for threads, used, cores in processes.run(2, in_a_process):
        assert threads == used == max(1, cores // 2)
