"""A cluster's file from real processes, which planning reads back."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import distributed as dist

from penstock.base.errors import ConfigError
from penstock.measure import device_rates, link_speeds, measured_cluster
from penstock.measure.measured_cluster import Measurement, require_writable, rounded, write_measured_cluster
from penstock.measure.rounds import Rounds
from penstock.plan.cluster import LinkSpeed, read_cluster
from penstock.plan.prediction import predict
from penstock.profile.model_profile import of_shape
from penstock.runtime.workers.pool import LocalProcesses
from penstock.runtime.workers.world import World
from tests.support.lanes import exhaustive
from tests.support.planning import SMALL


def measured(rank: int, place: Path, path: Path, machines: list[str]) -> Measurement:
    size = len(machines)
    rounds = Rounds(dist.FileStore(str(place / "store"), size), rank, size, 120.0)
    world = World(rank, size, 120.0) if size > 1 else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured_cluster, "_KERNELS", 120 / 0.015)  # 15 ms for each kernel, once
        patch.setattr(device_rates, "_PASSES", 1)
        patch.setattr(link_speeds, "_ROUNDS", 1)
        return write_measured_cluster(rounds, world, machines, path)


@pytest.mark.slow
@pytest.mark.parametrize("machines", [["a", "b"], *exhaustive(["a"], ["a", "a"])], ids="".join)
def test_the_file_reads_back_and_predicts(machines: list[str], tmp_path: Path, processes: LocalProcesses):
    path = tmp_path / "mine.toml"
    answers = processes.run(len(machines), measured, tmp_path, path, machines)
    assert all(answer == answers[0] for answer in answers)
    assert not answers[0].trouble
    cluster = read_cluster(path)
    nodes = len(set(machines))
    assert (cluster.name, cluster.devices, cluster.nodes) == ("mine", len(machines), nodes)
    assert 0.1 <= cluster.error < 1
    assert cluster.device.matmul == answers[0].table["device"]["matmul"]
    assert (cluster.network == LinkSpeed()) == (nodes == 1)
    assert (cluster.node == LinkSpeed()) == (machines != ["a", "a"])
    prediction = predict(of_shape(SMALL), cluster, f"pp={len(machines)}", sequence=32, batch=8)
    assert 1e-6 < prediction.step_seconds < 60
    assert prediction.fits
    assert {entry.name for entry in tmp_path.iterdir()} <= {"mine.toml", "store"}


def test_machines_of_different_sizes_are_no_cluster(tmp_path: Path, processes: LocalProcesses):
    answers = processes.run(3, measured, tmp_path, tmp_path / "mine.toml", ["a", "a", "b"])
    assert answers[0].trouble == [(0, "the machines have 1, 2 ranks; start as many on each")]
    assert all(answer == answers[0] for answer in answers)
    assert not (tmp_path / "mine.toml").exists()


@pytest.mark.slow
def test_a_file_that_cannot_be_written_is_trouble_on_every_rank(tmp_path: Path, processes: LocalProcesses):
    answers = processes.run(2, measured, tmp_path, tmp_path / "gone" / "mine.toml", ["a", "a"])
    assert all(answer == answers[0] for answer in answers)
    ((rank, reason),) = answers[0].trouble
    assert rank == 0
    assert "FileNotFoundError" in reason
    assert answers[0].table == {}


def test_paths_are_checked_before_anything_is_measured(tmp_path: Path):
    require_writable(tmp_path / "mine.toml")
    (tmp_path / "folder.toml").mkdir()
    for path, message in (
        (tmp_path / "mine.txt", "must end in .toml"),
        (tmp_path / "a\0.toml", "must end in .toml"),
        (tmp_path / "none" / "mine.toml", "there is no folder .*none; make it"),
        (tmp_path / "folder.toml", "must be the path of a file, got the folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            require_writable(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder.toml"]


def test_numbers_are_rounded_to_what_was_measured():
    table = {"a": 123456.0, "b": 7, "c": {"d": 1.23456e-6}, "e": "x"}
    assert rounded(table) == {"a": 123500.0, "b": 7, "c": {"d": 1.235e-6}, "e": "x"}
