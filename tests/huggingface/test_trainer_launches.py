"""A script with `penstock.PipelineTrainer` under torchrun and accelerate launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.hf_models import distance
from tests.support.hf_trainer import assert_close, saved
from tests.support.lanes import exhaustive
from tests.support.launchers import free_port
from tests.support.trainer_under_torchrun import run

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "tests" / "support" / "trainer_under_torchrun.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
# Its --cpu starts one process; --multi_gpu starts several, also where there is no GPU.
ACCELERATE = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1", "--mixed_precision", "no",
              "--dynamo_backend", "no", "--num_processes"]  # fmt: skip
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def launched(launcher: list[str], processes: int, folder: Path, pipeline: Any, **more: Any) -> str:
    folder.mkdir()
    told = json.dumps({"pipeline": pipeline, **more})
    port = [] if "torch.distributed.run" in launcher else ["--main_process_port", free_port()]
    command = [sys.executable, *launcher, str(processes), *port, SCRIPT, str(folder), told]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def assert_same_run(one: Path, other: Path) -> None:
    ours, theirs = (
        [line for line in json.loads((folder / "logged.json").read_text()) if "loss" in line]
        for folder in (one, other)
    )
    assert_close(ours, theirs)
    assert [line["epoch"] for line in ours] == [line["epoch"] for line in theirs]
    assert len(ours) == 3
    assert distance(saved(one), saved(other)) < 2e-6


@pytest.mark.parametrize("launcher", [TORCHRUN, *exhaustive(ACCELERATE)], ids=["torchrun", "accelerate"])
def test_a_launch_of_two_ranks_is_one_pipeline(tmp_path: Path, launcher: list[str]):
    (tmp_path / "plain").mkdir()
    run(tmp_path / "plain", None)
    said = launched(launcher, 2, tmp_path / "piped", {"microbatches": 4, "schedule": "zb-v"})
    assert_same_run(tmp_path / "piped", tmp_path / "plain")
    assert (tmp_path / "piped" / "mesh.json").read_text() == "[2, 1]"
    assert sum(line.startswith("{'loss'") for line in said.splitlines()) == 3, said


@pytest.mark.exhaustive  # tests of replicas in processes are in `test_processes`
def test_two_pipelines_take_the_rows_of_two_processes_of_trainer(tmp_path: Path):
    """Also in the last step of an epoch, for which accelerate fills the rows up."""
    launched(TORCHRUN, 2, tmp_path / "plain", None)
    launched(TORCHRUN, 4, tmp_path / "piped", {"ranks": 2, "microbatches": 2})
    assert_same_run(tmp_path / "piped", tmp_path / "plain")
    assert (tmp_path / "piped" / "mesh.json").read_text() == "[2, 2]"


def test_a_failure_of_one_process_ends_the_others_with_its_cause(tmp_path: Path):
    """Without a launcher that would end them."""
    told = json.dumps({"pipeline": {"microbatches": 4}, "broken": 1})
    where = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    started = [
        subprocess.Popen(
            [sys.executable, SCRIPT, str(tmp_path), told], text=True, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
            env=ENVIRONMENT | where | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=400)[1] for process in started]
    assert [process.returncode for process in started] == [1, 1]
    assert "OSError: the disk of process 1 is gone" in said[1]
    assert "PeerError" in said[0]
    assert "the disk of process 1 is gone" in said[0]
