"""Values of a config that depend on how the command was started."""

from __future__ import annotations

import re

import pytest

from penstock.base import host
from penstock.base.errors import ConfigError
from penstock.parallel.mesh import MeshShape
from penstock.train.config.config import Config, from_mapping
from penstock.train.config.resolve import describe, find_mesh, resolve, shape_of
from penstock.train.config.sections import ParallelConfig

EP = {"dp": 2, "cp": 2, "ep": 4, "order": "cp,pp,dp,tp"}


@pytest.mark.parametrize(
    ("given", "processes", "shape"),
    [
        ({}, None, MeshShape(2)),
        ({"pp": 3}, None, MeshShape(3)),
        ({}, 5, MeshShape(5)),
        ({"pp": 3}, 3, MeshShape(3)),
        ({"dp": 2, "tp": 2}, 8, MeshShape(2, 2, 2)),
        ({"pp": 2, "dp": 3, "order": "dp, pp, tp"}, 6, MeshShape(2, 3, 1, ("dp", "pp", "tp"))),
        (EP, 4, MeshShape(1, 2, 1, ("cp", "pp", "dp", "tp"), 4, 2)),
    ],
)
def test_the_mesh_is_what_is_given_and_the_pipeline_what_is_left(given, processes, shape: MeshShape):
    assert find_mesh(ParallelConfig(**given), processes) == shape
    batch = {"schedule": {"microbatches": 12}, "train": {"batch": 12}}
    assert shape_of(resolve(from_mapping({"parallel": given, **batch}), processes).parallel) == shape


@pytest.mark.parametrize(
    ("given", "processes", "said"),
    [
        ({"pp": 2, "dp": 2, "tp": 2}, 6, "a mesh of pp 2 x dp 2 x tp 2 has 8 ranks, but the launch has 6 processes"),
        ({"pp": 2, "dp": 2}, 8, "start 4 processes, or take dp = 4"),
        ({"cp": 4}, 6, "6 processes cannot be divided into pipelines with parallel.dp = 1, parallel.cp = 4 and"),
        ({"dp": 2, "tp": 2}, 6, "parallel.tp = 2; start 4 or a multiple of it"),
        ({"dp": 2}, None, "a mesh of pp 2 x dp 2 x tp 1 needs 4 processes, one for each rank"),
        ({"pp": 3}, 2, "parallel.pp is 3, but the launch has 2 processes; leave it unset or start 3"),
    ],
)  # fmt: skip
def test_a_mesh_that_does_not_fit_the_processes_is_refused(given, processes, said: str):
    with pytest.raises(ConfigError, match=re.escape(said)):
        resolve(from_mapping({"parallel": given}), processes)


def test_a_mesh_is_described_by_its_ranks_and_axes():
    described = [describe(MeshShape(*sizes)) for sizes in ((1,), (4,), (2, 2, 2))]
    assert described == ["1 rank", "4 ranks", "8 ranks (pp 2 x dp 2 x tp 2)"]


def test_unset_pipeline_ranks_of_threads_are_at_most_the_blocks():
    assert resolve(from_mapping({"model": {"layers": 1}}), None).parallel.pp == 1


def test_unset_virtual_stages_are_the_familys():
    def virtual_stages(**schedule: str) -> int | None:
        return resolve(from_mapping({"schedule": schedule}), None).parallel.virtual_stages

    assert virtual_stages() == 1
    assert virtual_stages(name="interleaved-1f1b") == 2
    assert virtual_stages(name="mine.csv") == 1


def test_an_unset_prompt_suits_the_vocabulary():
    assert resolve(Config(), None).sample.prompt == "def "
    assert resolve(from_mapping({"model": {"vocabulary": 1000}}), None).sample.prompt == "0"
    assert resolve(from_mapping({"model": {"config": "c.json"}}), None).sample.prompt == ""
    assert resolve(from_mapping({"sample": {"prompt": ""}}), None).sample.prompt == ""


def test_held_out_batches_must_fit_the_memory(monkeypatch: pytest.MonkeyPatch):
    config = from_mapping({"train": {"batch": 8, "eval_batches": 10**6}, "data": {"sequence": 12}})
    needed = 8 * 10**6 * 12 * 24
    monkeypatch.setattr(host, "memory", lambda: host.Memory(needed, needed))
    resolve(config, None)
    monkeypatch.setattr(host, "memory", lambda: host.Memory(needed - 1, needed - 1))
    with pytest.raises(ConfigError, match=r"train.eval_batches 1,000,000 of train.batch 8 samples"):
        resolve(config, None)
