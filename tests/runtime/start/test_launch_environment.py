"""Which variables make a process one of several, and which do not; where the processes meet, or what to set.

Slurm's variables are those that its 22.05 set, seen in the tasks of ``srun``, in a script of ``sbatch`` and in ``salloc``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.base.errors import ConfigError
from penstock.runtime.start.launch_environment import (
    find_launch,
    has_own_device,
    host_advice,
    local_rank,
    local_size,
    meeting_url,
    own_device,
    unused_nodes,
)
from penstock.runtime.start.launchers import Launch, first_host
from penstock.runtime.start.meeting import STORE
from tests.support import plain
from tests.support.launchers import SALLOC, SBATCH, SRUN, free_port

ROOT = Path(__file__).parents[3]

INTERACTIVE = SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "4294967290"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
ONE_HOST = OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "29500",
}  # fmt: skip
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MEETING = {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "4000"}


def required(environment: dict[str, str]) -> Launch:
    found = find_launch(environment)
    assert found is not None
    return found


def without(environment: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}


@pytest.mark.parametrize(
    "environment",
    [
        {}, SALLOC, SBATCH, INTERACTIVE, ONE_HOST | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"}, {"WORLD_SIZE": "1"}, {"LOCAL_RANK": "0"}, {"LOCAL_WORLD_SIZE": "1"},
        {"PMI_FD": "6", "PMI_SIZE": "1"}, {"OMPI_UNIVERSE_SIZE": "8"}, {"PMIX_RANK": "0"},
        {"PMIX_RANK": "1", "PMI_SIZE": "1", "PMI_RANK": "0"}, {"PMIX_RANK": "none"},
    ],
)  # fmt: skip
def test_what_is_no_parallel_start_is_one_process_alone(environment: dict[str, str]):
    assert find_launch(environment) is None


def test_mpirun_on_one_machine_meets_there_at_a_port_of_its_own():
    ports = set()
    for job in ({"OMPI_MCA_ess_base_jobid": "1769865217"}, {"PMIX_NAMESPACE": "prterun-vm-1926@1"}):
        launch = required(ONE_HOST | job)
        assert launch.address == "127.0.0.1"
        assert 16384 <= launch.port < 32768
        ports.add(launch.port)
        elsewhere = required(ONE_HOST | job | {"OMPI_COMM_WORLD_SIZE": "4"})
        with pytest.raises(ConfigError, match="mpirun -x MASTER_ADDR=HOST"):
            _ = elsewhere.url
    assert len(ports) == 2


def test_a_task_of_a_slurm_step_has_its_rank_and_meets_on_the_first_host_at_a_port_of_the_steps_own():
    launch = required(SRUN)
    assert (launch.rank, launch.size, launch.local_rank, launch.local_size) == (2, 4, 0, 2)
    assert launch.url == f"tcp://node07:{16384 + 31 * 16 + 5}"
    assert required(SRUN | {"WORLD_SIZE": "4"}).rank == 2  # it agrees
    assert required(SRUN | MEETING).url == "tcp://10.0.0.9:4000"
    assert required(SRUN | {"SLURM_STEP_NUM_NODES": "1"}).url.startswith("tcp://127.0.0.1:")
    assert required(SRUN | {"MASTER_ADDR": "fe80::1"}).url.startswith("tcp://[fe80::1]:")
    ports = {required(SRUN | {"SLURM_JOB_ID": j, "SLURM_STEP_ID": s}).port for j in "123" for s in "012"}
    assert len(ports) == 9


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("node[003-007,9],login1", "node003"), ("a,b", "a"), ("r[1-2]n[3,4]x", "r1n3x"), ("", ""), ("vm", "vm")],
)
def test_the_first_host_of_a_list_as_slurm_writes_it(hosts: str, first: str):
    assert first_host(hosts) == first


def test_a_node_whose_name_does_not_resolve_is_refused_at_once_with_the_variable_to_set():
    step = SRUN | {"SLURM_STEP_NODELIST": "no-such-node.invalid"}
    with pytest.raises(
        ConfigError, match=r"31.5: the first node, no-such-node.invalid, .*; export MASTER_ADDR"
    ):
        meeting_url(step)
    assert meeting_url(SRUN | {"SLURM_STEP_NODELIST": "localhost"}).startswith("tcp://localhost:")
    assert meeting_url(SRUN | {"SLURM_STEP_NUM_NODES": "1"}).startswith("tcp://127.0.0.1:")
    # Torch waits for a name that the user gives: that of a service may come later.
    assert meeting_url(step | {"MASTER_ADDR": "later.invalid"}).startswith("tcp://later.invalid:")
    assert meeting_url(step | {"RANK": "2", "WORLD_SIZE": "4", **MEETING}) == meeting_url({}) == "env://"


def test_a_script_of_sbatch_that_forgets_srun_is_told_of_its_other_nodes():
    assert "31 has 2 nodes, and this run uses one of them: start it with srun" in unused_nodes(SALLOC)
    assert unused_nodes(SBATCH | {"SLURM_JOB_NUM_NODES": "3"}).startswith("Slurm job 31 has 3 nodes")
    one = {"SLURM_STEP_NUM_TASKS": "1"}  # several steps beside each other may have been meant
    for environment in ({}, SRUN, SRUN | one, SALLOC | {"SLURM_NNODES": "1"}, SALLOC | OPEN_MPI):
        assert unused_nodes(environment) == ""


def test_tasks_on_this_node_are_counted_from_the_steps_list():
    given = SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}
    assert [local_size(given | {"SLURM_NODEID": n}) for n in "0123"] == [4, 4, 3, None]


def test_a_launcher_that_slurm_started_counts_and_not_slurm():
    assert required(SRUN | OPEN_MPI).launcher == "Open MPI"
    assert required(SRUN | HYDRA).launcher == "PMI"
    assert (
        required(SRUN | {"PMI_RANK": "2", "PMI_SIZE": "4"}).launcher == "Slurm step 31.5"
    )  # srun --mpi=pmi2
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", **MEETING}
    launch = required(SRUN | torchrun)
    assert (launch.rank, launch.size, launch.url) == (5, 8, "env://")
    assert (local_rank(SRUN | torchrun), local_size(SRUN | torchrun)) == (1, None)


def test_rank_and_size_exported_by_a_script_keep_slurms_local_rank():
    launch = required(SRUN | {"RANK": "2", "WORLD_SIZE": "4", "SLURM_LOCALID": "1", **MEETING})
    assert (launch.rank, launch.local_rank, launch.local_size, launch.url) == (2, 1, 2, "env://")


@pytest.mark.parametrize(("environment", "rank", "size", "local"), [(OPEN_MPI, 3, 4, 1), (HYDRA, 1, 2, 1)])
def test_mpi_launchers_have_ranks_and_meet_where_the_user_says(
    environment: dict[str, str], rank: int, size: int, local: int
):
    launch = required(environment | MEETING)
    assert (launch.rank, launch.size, launch.local_rank, launch.local_size) == (rank, size, local, 2)
    assert launch.url == "tcp://10.0.0.9:4000"


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (OPEN_MPI, "Open MPI started 4 processes, .* MASTER_ADDR and MASTER_PORT are not set.*mpirun -x MASTER_ADDR"),
        (HYDRA | {"MASTER_ADDR": "a"}, "PMI started 2 processes, .* MASTER_PORT is not set.*mpiexec -genv"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT are not set"),
        (SRUN | {"SLURM_DISTRIBUTION": "arbitrary"}, "Slurm step 31.5 .* MASTER_ADDR is not set.*arbitrary"),
        (without(SRUN, "SLURM_JOB_ID"), "MASTER_PORT is not set.*export both before srun"),
    ],
)  # fmt: skip
def test_where_the_processes_meet_is_asked_for_by_name(environment: dict[str, str], said: str):
    with pytest.raises(ConfigError, match=said):
        _ = required(environment).url


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"RANK": "1"}, "RANK=1 is set but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 is set but RANK is not"),
        (SRUN | {"WORLD_SIZE": "8"}, "WORLD_SIZE=8, but Slurm step 31.5 says rank 2 of 4"),
        (SRUN | {"RANK": "0"}, "RANK=0, but Slurm step 31.5 says rank 2 of 4"),
        (SRUN | {"SLURM_PROCID": "4"}, "SLURM_PROCID='4' and SLURM_STEP_NUM_TASKS='4' are not a rank below"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "x"}, "OMPI_COMM_WORLD_RANK='x'"),
        (SRUN | {"SLURM_HET_SIZE": "2"}, "heterogeneous job"),
        (SRUN | {"MASTER_PORT": "eighty"}, "MASTER_PORT must be a port number from 1 to 65535, got 'eighty'"),
        (without(ONE_HOST, "OMPI_COMM_WORLD_RANK"), "Open MPI started several processes, but OMPI_COMM_WORLD_RANK is not"),
        ({"PMI_SIZE": "2"}, "PMI started several processes, but PMI_RANK is not set; set it, or unset PMI_SIZE"),
        (without(SRUN, "SLURM_PROCID"), "Slurm step 31.5 started several processes, but SLURM_PROCID is not set"),
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-a-1@1"}, "PMIX_RANK=1 says .* one of several, but not of how many"),
        ({"LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE=2 is set but RANK and WORLD_SIZE are not; set them"),
        (SRUN | {"RANK": "0", "WORLD_SIZE": "1"}, "WORLD_SIZE=1, but Slurm step 31.5 started 4 .* unset SLURM_STEP_NUM"),
        (SRUN | {"SLURM_LOCALID": "-1"}, "SLURM_LOCALID must be a whole number, got '-1'"),
    ],
)  # fmt: skip
def test_variables_that_contradict_one_another_or_are_half_a_launchers_are_refused(
    environment: dict[str, str], said: str
):
    with pytest.raises(ConfigError, match=said):
        find_launch(environment)


def test_gpus_that_slurm_binds_to_a_task_start_at_zero():
    second = SRUN | {"SLURM_LOCALID": "1"}
    bound = second | {"SLURM_GPUS_PER_TASK": "1"}
    assert (own_device(2, second), own_device(1, second)) == (1, 1)
    assert (own_device(1, bound), own_device(8, bound)) == (0, 1)
    assert (has_own_device(2, second), has_own_device(1, second)) == (True, False)
    assert (has_own_device(1, bound), has_own_device(0, bound)) == (True, False)
    assert (own_device(0, {}), has_own_device(1, {}), has_own_device(0, {})) == (0, True, False)


def test_a_run_that_cannot_take_a_replaced_host_is_told_what_to_set():
    names = ("GROUP_WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE")
    torchrun = dict(zip(names, ("2", "3", "True"), strict=True))
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in host_advice(torchrun)
    others = dict(zip(names, ("1", "0", "False"), strict=True))
    assert not any(host_advice(torchrun | {name: value}) for name, value in others.items())
    assert not host_advice({})


EXPORTED = dict(
    re.findall(
        r"^# ([^\n]*)\n(export [^\n]*)$", (ROOT / "docs" / "reference" / "launchers.md").read_text(), re.M
    )
)
"""Launcher and line of docs/reference/launchers.md."""
PMIX, SKYPILOT_IPS = {"PMIX_RANK": "3"}, {"SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5"}


@pytest.mark.parametrize(
    ("launcher", "environment", "address"),
    [
        ("MVAPICH2", {"MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_LOCAL_RANK": "1"}, "HOST"),
        ("jsrun", {"JSM_NAMESPACE_RANK": "3", "JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_LOCAL_RANK": "1"} | PMIX, "HOST"),
        ("flux run", {"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "1"}, "HOST"),
        ("PALS", {"PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1"}, "HOST"),
        ("Kubeflow", {"PET_NODE_RANK": "3", "PET_NNODES": "4", "PET_MASTER_ADDR": "a.b", "PET_MASTER_PORT": "29500"}, "a.b"),
        ("SkyPilot", {"SKYPILOT_NODE_RANK": "3", "SKYPILOT_NUM_NODES": "4"} | SKYPILOT_IPS, "10.0.0.4"),
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


def test_torchrun_inside_another_launcher_counts_also_in_one_that_is_refused():
    het = SRUN | {"SLURM_HET_SIZE": "2"}
    for environment in (SRUN | TORCHRUN, ONE_HOST | TORCHRUN, het | without(TORCHRUN, "TORCHELASTIC_RUN_ID")):
        launch = required(environment)
        assert (launch.rank, launch.size, launch.url) == (3, 4, "env://")


def test_one_run_for_each_node_is_said_since_it_may_be_meant():
    alone = TORCHRUN | {"GROUP_WORLD_SIZE": "1", "RANK": "0", "WORLD_SIZE": "2"}
    assert "Open MPI started 2 processes; to make them one run" in host_advice(ONE_HOST | alone)
    assert not host_advice(alone)
    assert not host_advice(ONE_HOST | TORCHRUN)
    assert not host_advice(ONE_HOST | alone | {"OMPI_COMM_WORLD_RANK": "x"})


def test_the_device_is_chosen_where_a_group_was_made_although_the_variables_are_refused():
    refused = SRUN | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "1"}
    with pytest.raises(ConfigError):
        find_launch(refused)
    assert own_device(2, refused) == 1


def processes(
    environments: list[dict[str, str]], command: list[str]
) -> list[subprocess.CompletedProcess[str]]:
    """What became of a command in each of some environments, at the same time."""
    inherited = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("SLURM_", "OMPI_", "PMI", "MASTER_")) and k != STORE
    }
    paths = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    started = [
        subprocess.Popen(
            command, env=inherited | paths | one, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for one in environments
    ]  # fmt: skip
    try:
        told = [process.communicate(timeout=120) for process in started]
        return [
            subprocess.CompletedProcess(command, p.returncode, *t) for p, t in zip(started, told, strict=True)
        ]
    finally:
        for process in started:
            process.kill()


LINES = [sys.executable, str(ROOT / "tests" / "support" / "under_torchrun.py")]


@pytest.mark.slow
def test_a_loop_under_srun_is_one_pipeline_of_all_tasks():
    step = SRUN | {
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0", "MASTER_PORT": free_port(),
    }  # fmt: skip
    ended = processes([step | {"SLURM_PROCID": r, "SLURM_LOCALID": r} for r in "01"], LINES)
    loss = plain.train(4, 4, steps=1)[0][0].mean().item()
    # gloo of torch 2.10 prints to stdout, too.
    assert [one.stdout.splitlines()[-1] for one in ended] == [f"rank {r} of 2: {loss!r}" for r in range(2)], (
        ended
    )


@pytest.mark.slow
def test_a_loop_under_mpirun_is_one_pipeline_of_all_processes_or_refused_on_all():
    ranks = [
        {"OMPI_COMM_WORLD_RANK": r, "OMPI_COMM_WORLD_LOCAL_RANK": r, "OMPI_COMM_WORLD_SIZE": "2"}
        for r in "01"
    ]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    told = [one.stdout.splitlines()[-1] for one in processes([one | meeting for one in ranks], LINES)]
    assert [line.split(":")[0] for line in told] == ["rank 0 of 2", "rank 1 of 2"]
    for one in processes(ranks, LINES):
        assert one.returncode == 1
        assert "ConfigError: Open MPI started 2 processes, but does not say where they meet" in one.stderr
