from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.base.errors import ConfigError
from penstock.runtime.start import agreement
from penstock.runtime.workers.pool import LocalProcesses
from penstock.train.config.agreed import MAY_DIFFER, agreed_config
from penstock.train.config.file import load
from tests.support.groups import run_cases
from tests.support.launchers import free_port

DIFFERENT = [
    ("optim.lr", "0.001", "0.002"),
    ("optim.arguments.momentum", "0.5", "0.6"),
    ("model.width", "128", "256"),
    ("model.norm_epsilon", "1e-05", "1e-06"),
    ("data.sequence", "64", "32"),
    ("schedule.name", "'gpipe'", "'1f1b'"),
    ("schedule.split", "'even'", "'measured'"),
    ("parallel.check_replicas", "100", "50"),
    ("train.steps", "10", "20"),
    ("train.seed", "1", "2"),
    ("train.checkpoint_every", "100", "0"),
    ("train.name", "'one'", "'other'"),
    ("train.folder", "'here'", "'there'"),
    ("runtime.precision", "'bf16'", "'fp32'"),
    ("runtime.device", "'cuda:0'", "'cpu'"),
]
SGD = ["optim.name=SGD", "optim.lr=0.1"]


def refused(rank: int, key: str, first: str, other: str) -> str:
    pairs = [f"{key}={other if rank else first}"]
    with pytest.raises(ConfigError) as info:
        agreed_config(lambda: load(None, [*(SGD if "arguments" in key else ()), *pairs]))
    return str(info.value)


def test_every_difference_is_refused_by_its_name_with_both_values(processes: LocalProcesses):
    for (key, first, other), told in zip(DIFFERENT, run_cases(processes, 2, refused, DIFFERENT), strict=True):
        assert told[0] == told[1], key
        shown = (first.split(":")[0].strip("'"), other.strip("'"))
        assert f"{key}" in told[0], key
        assert all(value in told[0].partition(" is ")[2] for value in shown), told[0]
        assert "on rank 0 (host " in told[0]
        assert "on rank 1 (host " in told[0]


def accepted(rank: int, key: str, first: str, other: str) -> str:
    return agreed_config(lambda: load(None, [f"{key}={other if rank else first}"])).train.name


def test_only_what_belongs_to_a_host_may_differ(processes: LocalProcesses):
    values = {
        "data.path": ("a", "b"), "data.held_out_path": ("a", "b"),
        "runtime.device": ("cuda:0", "cuda:1"), "runtime.threads": ("1", "2"), "train.log_level": ("info", "debug"),
    }  # fmt: skip
    assert set(values) == set(MAY_DIFFER)
    run_cases(processes, 2, accepted, [(key, *pair) for key, pair in values.items()])


def in_other_folder(rank: int, folder: str) -> str:
    with contextlib.chdir(folder if rank else "/"):
        return refused(rank, "train.name", "one", "one")


def test_one_name_in_two_current_folders_is_two_runs(processes: LocalProcesses, tmp_path: Path):
    told = processes.run(2, in_other_folder, str(tmp_path))
    assert told[0] == told[1]
    assert "the folder of the run is /runs/one on rank 0" in told[0]
    assert str(tmp_path) in told[0]


def with_other_code(rank: int, name: str) -> str:
    kept = agreement.penstock.__version__, agreement.torch.__version__
    if rank and name == "Penstock":
        agreement.penstock.__version__ = "0.0.1"
    if rank and name == "torch":
        agreement.torch.__version__ = "1.13.0"
    try:
        return refused(rank, "train.name", "one", "one")
    finally:
        agreement.penstock.__version__, agreement.torch.__version__ = kept


@pytest.mark.parametrize("name", ["Penstock", "torch"])
def test_versions_are_compared(processes: LocalProcesses, name: str):
    told = processes.run(2, with_other_code, name)
    assert told[0] == told[1]
    assert f"differ: {name} is" in told[0]


def test_all_hear_of_a_config_that_one_process_cannot_use(processes: LocalProcesses):
    told = processes.run(2, refused, "optim.lr", "0.001", "-1")
    assert told[0] == told[1]
    assert "the config of rank 1 (host " in told[0]
    assert "optim.lr" in told[0]


def with_another_model(rank: int, folder: str) -> str:
    source = Path(folder, str(rank))
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 2 + rank}))
    with contextlib.chdir(source):
        return refused(rank, "model.config", "config.json", "config.json")


def test_the_files_of_a_model_are_compared(processes: LocalProcesses, tmp_path: Path):
    told = processes.run(2, with_another_model, str(tmp_path))
    assert told[0] == told[1]
    assert "the file config.json of the model is digest" in told[0]


@pytest.mark.slow
def test_two_commands_with_other_learning_rates_are_refused_at_once(tmp_path: Path):
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "penstock", "train", "train.name=one", f"optim.lr={lr}"],
            env={**shared, "RANK": str(rank)}, cwd=tmp_path, text=True, stderr=subprocess.PIPE,
        )
        for rank, lr in enumerate((0.001, 0.002))
    ]  # fmt: skip
    try:
        told = [process.communicate(timeout=120)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [2, 2], told
    assert told[0] == told[1]
    assert "optim.lr is 0.001 on rank 0 (host " in told[0]
    assert "and 0.002 on rank 1 (host " in told[0]
    assert not list(tmp_path.iterdir())
