"""What each launcher's variables mean, and that half a launcher is refused, on every rank, with what to set."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from penstock.base.errors import ConfigError
from penstock.runtime.start.launch_environment import find_launch, host_advice, local_rank, own_device
from penstock.runtime.start.launchers import Launch
from tests.support.launchers import SALLOC, SBATCH, SRUN

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "29500",
}  # fmt: skip


def required(environment: dict[str, str]) -> Launch:
    launch = find_launch(environment)
    assert launch is not None
    return launch


def without(environment: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}


def test_mpirun_on_one_machine_meets_there_at_a_port_of_its_own():
    ports = set()
    for job in ({"OMPI_MCA_ess_base_jobid": "1769865217"}, {"PMIX_NAMESPACE": "prterun-vm-1926@1"}):
        launch = required(OPEN_MPI | job)
        assert launch.address == "127.0.0.1"
        assert 16384 <= launch.port < 32768
        ports.add(launch.port)
        elsewhere = required(OPEN_MPI | job | {"OMPI_COMM_WORLD_SIZE": "4"})
        with pytest.raises(ConfigError, match="mpirun -x MASTER_ADDR=HOST"):
            _ = elsewhere.url
    assert len(ports) == 2


@pytest.mark.parametrize(
    "environment",
    [
        SALLOC, SBATCH, {"WORLD_SIZE": "1"}, {"LOCAL_RANK": "0"}, {"LOCAL_WORLD_SIZE": "1"},
        {"PMI_FD": "6", "PMI_SIZE": "1"}, {"OMPI_UNIVERSE_SIZE": "8"}, {"PMIX_RANK": "0"},
        {"PMIX_RANK": "1", "PMI_SIZE": "1", "PMI_RANK": "0"}, {"PMIX_RANK": "none"},
    ],
    ids=str,
)  # fmt: skip
def test_variables_that_say_nothing_of_several_processes_are_no_alarm(environment: dict[str, str]):
    assert find_launch(environment) is None


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (without(OPEN_MPI, "OMPI_COMM_WORLD_RANK"), "Open MPI started several processes, but OMPI_COMM_WORLD_RANK is not"),
        ({"PMI_SIZE": "2"}, "PMI started several processes, but PMI_RANK is not set; set it, or unset PMI_SIZE"),
        (without(SRUN, "SLURM_PROCID"), "Slurm step 31.5 started several processes, but SLURM_PROCID is not set"),
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-a-1@1"}, "PMIX_RANK=1 says .* one of several, but not of how many"),
        ({"LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE=2 is set but RANK and WORLD_SIZE are not; set them"),
        (SRUN | {"RANK": "0", "WORLD_SIZE": "1"}, "WORLD_SIZE=1, but Slurm step 31.5 started 4 .* unset SLURM_STEP_NUM"),
    ],
)  # fmt: skip
def test_half_a_launcher_is_refused_with_what_to_set(environment: dict[str, str], said: str):
    with pytest.raises(ConfigError, match=said):
        find_launch(environment)


EXPORTED = dict(
    re.findall(
        r"^# ([^\n]*)\n(export [^\n]*)$",
        (Path(__file__).parents[3] / "docs" / "clusters.md").read_text(),
        re.M,
    )
)
"""Launcher and line of docs/clusters.md."""


@pytest.mark.parametrize(
    ("launcher", "environment", "address"),
    [
        ("MVAPICH2", {"MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_LOCAL_RANK": "1"}, "HOST"),
        (
            "jsrun",
            {
                "JSM_NAMESPACE_RANK": "3", "JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_LOCAL_RANK": "1", "PMIX_RANK": "3",
            },
            "HOST",
        ),
        ("flux run", {"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "1"}, "HOST"),
        ("PALS", {"PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1"}, "HOST"),
        ("Kubeflow", {"PET_NODE_RANK": "3", "PET_NNODES": "4", "PET_MASTER_ADDR": "a.b", "PET_MASTER_PORT": "29500"}, "a.b"),
        (
            "SkyPilot",
            {"SKYPILOT_NODE_RANK": "3", "SKYPILOT_NUM_NODES": "4", "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5"},
            "10.0.0.4",
        ),
    ],
)  # fmt: skip
def test_other_launchers_are_torchs_variables_after_the_documented_line(
    launcher: str, environment: dict[str, str], address: str
):
    (line,) = [line for name, line in EXPORTED.items() if launcher in name]
    shell = ["bash", "-euc", f"{line}\nenv -0"]
    path = {"PATH": "/usr/bin:/bin"}
    out = subprocess.run(shell, env=environment | path, check=True, capture_output=True, text=True).stdout
    exported = dict(entry.split("=", 1) for entry in out.split("\0") if entry)
    launch = required(exported)
    assert (launch.rank, launch.size) == (3, 16 if launcher == "PALS" else 4)
    assert (launch.address, launch.port, launch.url) == (address, 29500, "env://")
    assert local_rank(exported) == (1 if address == "HOST" else 0)


@pytest.mark.parametrize("outer", [SRUN, OPEN_MPI], ids=str)
def test_torchrun_inside_another_launcher_counts(outer: dict[str, str]):
    launch = required(outer | TORCHRUN)
    assert (launch.rank, launch.size, launch.url) == (3, 4, "env://")


def test_rank_and_size_are_the_way_out_of_a_launcher_that_is_refused():
    launch = required(SRUN | {"SLURM_HET_SIZE": "2", **without(TORCHRUN, "TORCHELASTIC_RUN_ID")})
    assert (launch.rank, launch.size) == (3, 4)


def test_one_run_for_each_node_is_said_since_it_may_be_meant():
    alone = TORCHRUN | {"GROUP_WORLD_SIZE": "1", "RANK": "0", "WORLD_SIZE": "2"}
    assert "Open MPI started 2 processes; to make them one run" in host_advice(OPEN_MPI | alone)
    assert not host_advice(alone)
    assert not host_advice(OPEN_MPI | TORCHRUN)
    assert not host_advice(OPEN_MPI | alone | {"OMPI_COMM_WORLD_RANK": "x"})


def test_the_device_is_chosen_where_a_group_was_made_although_the_variables_are_refused():
    refused = SRUN | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "1"}
    with pytest.raises(ConfigError):
        find_launch(refused)
    assert own_device(2, refused) == 1
