"""The recipes run as they are written, but for paths: one config trained by each launcher gives the same weights."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from penstock.checkpoint.find import FOLDER, steps_in
from penstock.huggingface import weights
from penstock.train.config.file import dump
from tests.support import commands
from tests.support.commands import finish
from tests.support.launchers import free_port
from tests.support.programs import program
from tests.support.tiny_run import text_folder, tiny
from tests.support.trainer import lines

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
LAUNCHED = ("SLURM_", "OMPI_", "PMI", "PET_", "SKYPILOT_", "MASTER_", "PENSTOCK_")
STEPS = 4


def trainjob() -> dict[str, Any]:
    return dict(yaml.safe_load((RECIPES / "kubeflow" / "trainjob.yaml").read_text()))


def skypilot() -> dict[str, Any]:
    return dict(yaml.safe_load((RECIPES / "skypilot" / "penstock.yaml").read_text()))


def environment(bin_: Path, **more: str) -> dict[str, str]:
    """The environment of a node: commands from `bin_`, and no launcher's variables but those given."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHED)}
    paths = {"PATH": f"{bin_}:{inherited['PATH']}", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    return {**inherited, **paths, "OMP_NUM_THREADS": "1", **more}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config, its data, and the commands that an installation has."""
    root = tmp_path_factory.mktemp("recipes")
    config = tiny(root, text_folder(root), train={"steps": STEPS, "checkpoint_every": 1})
    (root / "my.toml").write_text(dump(config))
    (root / "bin").mkdir()
    for name, module in (("penstock", "penstock"), ("torchrun", "torch.distributed.run")):
        command = root / "bin" / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        command.chmod(0o755)
    return root


@pytest.fixture(scope="module")
def threads(root: Path) -> Path:
    """The same run in threads, without a launcher."""
    command = ["penstock", "train", "my.toml", f"train.folder={root}", "train.name=threads"]
    node = environment(root / "bin")
    subprocess.run(command, cwd=root, env=node, check=True, capture_output=True, timeout=120)
    return root / "threads"


def require_same(run: Path, other: Path) -> None:
    first, second = weights.load(run), weights.load(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def require_done(process: subprocess.Popen[str]) -> str:
    out = finish(process, 240)
    assert process.returncode == 0, out
    return out


def start(command: list[str], root: Path, **more: str) -> subprocess.Popen[str]:
    return commands.start(command, root, environment(root / "bin", **more))


@pytest.fixture
def schema() -> Any:
    """The model of a TrainJob's schema."""
    return pytest.importorskip("kubeflow_trainer_api.models").TrainerV1alpha1TrainJob


@pytest.mark.slow
def test_the_trainjob_fits_the_schema_of_its_kind(schema: Any):
    job = trainjob()
    assert schema.from_dict(job).to_dict() == job  # an unknown field would be left out
    assert job["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    reserved = {"PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"}
    assert not reserved & {variable["name"] for variable in job["spec"]["trainer"].get("env", [])}
    job["spec"]["trainer"]["numProcsPerNode"] = 8  # a field that the schema does not have is noticed
    assert schema.from_dict(job).to_dict() != job


def test_the_skypilot_task_has_the_fields_of_a_task():
    """As in SkyPilot 0.14's schema of a task, which is part of a package of 400 MB."""
    task = skypilot()
    assert set(task) <= {
        "name", "workdir", "num_nodes", "resources", "file_mounts", "setup", "run", "envs", "secrets", "volumes", "config",
    }  # fmt: skip
    resources = {"accelerators", "cpus", "memory", "use_spot", "job_recovery", "infra", "disk_size"}
    assert set(task["resources"]) <= resources
    assert isinstance(task["num_nodes"], int)
    assert all(isinstance(value, str) for value in task["envs"].values())
    assert all(path.startswith("/") for path in task["volumes"])


@pytest.mark.exhaustive  # as under torchrun alone, in tests/train/test_torchrun.py
def test_a_pod_of_the_trainjob_stopped_by_sigterm_is_resumed_by_its_next_start(root: Path):
    trainer = trainjob()["spec"]["trainer"]
    command = [part.replace("/runs", str(root)) for part in (*trainer["command"], *trainer["args"])]
    run = root / "first"
    variables = {
        "PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "localhost",
        "PET_MASTER_PORT": free_port(),
    }  # fmt: skip
    steps = len(trainer["command"])  # --resume stays last: what follows it would be the run to resume
    first = start([*command[:steps], "train.steps=100000", *command[steps:]], root, **variables)
    try:
        deadline = time.monotonic() + 120
        while not list(steps_in(run / FOLDER)) and first.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        first.send_signal(signal.SIGTERM)
        out = finish(first, 120)
    finally:
        first.kill()
    assert first.returncode != 0, out
    assert steps_in(run / FOLDER), out
    stopped, _ = max(steps_in(run / FOLDER))
    again = [*command[:steps], f"train.steps={stopped + 2}", *command[steps:]]
    out = require_done(start(again, root, **variables))
    assert "resuming from" in out
    trained = [line["step"] for line in lines(run, "train")]
    assert trained == list(range(1, stopped + 3))  # no step twice, and none left out


@pytest.mark.exhaustive  # under torchrun, too
def test_two_nodes_of_skypilot_train_one_model(root: Path, threads: Path):
    task = skypilot()
    port = free_port()
    envs = {**task["envs"], "RUNS": str(root), "NAME": "sky", "MASTER_PORT": port}
    nodes = {"NUM_NODES": "2", "NODE_IPS": "127.0.0.1\n127.0.0.1", "NUM_GPUS_PER_NODE": "0"}
    envs |= {f"SKYPILOT_{name}": value for name, value in nodes.items()}
    command = ["bash", "-c", task["run"]]
    for process in [start(command, root, **envs, SKYPILOT_NODE_RANK=rank) for rank in "01"]:
        require_done(process)
    require_same(root / "sky", threads)


# A loop under mpirun is in tests/runtime/start/test_launch_environment.py.
@pytest.mark.exhaustive
@pytest.mark.parametrize("named", [False, True], ids=["one machine", "named hosts"])
def test_mpirun_of_open_mpi_needs_no_address_on_one_machine(root: Path, threads: Path, named: bool):
    (root / "bin" / "mpirun").unlink(missing_ok=True)
    (root / "bin" / "mpirun").symlink_to(program("mpirun.openmpi", "mpirun", package="openmpi-bin"))
    variables = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if named:
        variables |= {"HOSTS": "localhost:2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    name = "hosts" if named else "mpi"
    script = [str(RECIPES / "mpi" / "train.sh"), "2", "my.toml", f"train.folder={root}", f"train.name={name}"]
    require_done(start(script, root, **variables))
    require_same(root / name, threads)


@pytest.mark.exhaustive  # its variables are in tests/runtime/start/test_launch_environment.py
def test_mpiexec_of_mpich_is_refused_on_every_rank_until_it_has_an_address(root: Path, threads: Path):
    train = ["penstock", "train", "my.toml", f"train.folder={root}", "train.name=mpich"]
    hydra = program("mpiexec.hydra", package="mpich")
    refused = start([hydra, "-n", "2", *train], root)
    out = finish(refused, 120)
    assert refused.returncode != 0
    assert out.count("PMI started 2 processes, but does not say where they meet") == 2
    assert "mpiexec -genv MASTER_ADDR 127.0.0.1" in out
    assert not (root / "mpich").exists()
    meeting = ["-genv", "MASTER_ADDR", "127.0.0.1", "-genv", "MASTER_PORT", free_port()]
    require_done(start([hydra, *meeting, "-n", "2", *train], root))
    require_same(root / "mpich", threads)
