from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.base.errors import ConfigError
from penstock.runtime.workers import agreement
from penstock.runtime.workers.pool import LocalProcesses
from penstock.train.config.agreed import MAY_DIFFER, agreed_config
from penstock.train.config.file import load
from tests.support.groups import run_cases
from tests.support.launchers import free_port

DIFFERENT = [
    ("optim.arguments.momentum", "0.5", "0.6"),
    ("model.norm_epsilon", "1e-05", "1e-06"),
    ("schedule.name", "'gpipe'", "'1f1b'"),
    ("parallel.check_replicas", "100", "50"),
    ("train.folder", "'here'", "'there'"),
    ("runtime.device", "'cuda:0'", "'cpu'"),  # the kind of device, and not its index
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


def with_other_code(rank: int, name: str) -> str:
    kept = agreement.__version__, agreement.torch.__version__
    if rank and name == "Penstock":
        agreement.__version__ = "0.0.1"
    if rank and name == "torch":
        agreement.torch.__version__ = "1.13.0"
    try:
        return refused(rank, "train.name", "one", "one")
    finally:
        agreement.__version__, agreement.torch.__version__ = kept


def with_another_model(rank: int, folder: str) -> str:
    source = Path(folder, str(rank))
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 2 + rank}))
    with contextlib.chdir(source):
        return refused(rank, "model.config", "config.json", "config.json")


@pytest.mark.parametrize(
    ("function", "given", "said"),
    [
        (in_other_folder, [], "the folder of the run is /runs/one on rank 0"),
        (with_other_code, ["Penstock"], "differ: Penstock is"),
        (with_other_code, ["torch"], "differ: torch is"),
        (refused, ["optim.lr", "0.001", "-1"], "optim.lr must be greater than 0"),
        (with_another_model, [], "the file config.json of the model is digest"),
    ],
)
def test_all_hear_of_another_difference(
    processes: LocalProcesses, tmp_path: Path, function, given, said: str
):
    told = processes.run(2, function, *(given or [str(tmp_path)]))
    assert told[0] == told[1]
    assert said in told[0]
    if function is refused:
        assert told[0].startswith("the config of rank 1 (host ")


@pytest.mark.exhaustive  # beside the processes above
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
