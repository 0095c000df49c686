"""What each launcher's variables mean, and that half a launcher is refused, on every rank, with what to set."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.runtime.start.launch_environment import find_launch, host_advice, own_device
from penstock.runtime.start.launchers import Launch
from tests.support.launchers import SALLOC, SBATCH, SRUN

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
TRAIN_JOB = {
    "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}  # fmt: skip
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
JSRUN = {
    "JSM_NAMESPACE_RANK": "3", "JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_LOCAL_RANK": "1", "PMIX_RANK": "3",
}  # fmt: skip
FLUX = {"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_NNODES": "2"}
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
    "SKYPILOT_NUM_GPUS_PER_NODE": "0",
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


@pytest.mark.parametrize(
    ("environment", "url"),
    [
        (TRAIN_JOB, "tcp://job-node-0-0.job:29400"),
        (without(TRAIN_JOB, "PET_NPROC_PER_NODE"), "tcp://job-node-0-0.job:29400"),
        (SKYPILOT, "tcp://10.0.0.4:29500"),
        (without(SKYPILOT, "SKYPILOT_NUM_NODES"), "tcp://10.0.0.4:29500"),
        (SKYPILOT | {"SKYPILOT_NUM_GPUS_PER_NODE": "1", "MASTER_PORT": "4000"}, "tcp://10.0.0.4:4000"),
    ],
    ids=["TrainJob", "torchrun's default", "SkyPilot", "addresses alone", "one GPU per node"],
)
def test_a_node_with_one_process_is_a_rank_and_needs_no_torchrun(environment: dict[str, str], url: str):
    launch = required(environment)
    assert (launch.rank, launch.size, launch.local_rank, launch.local_size, launch.url) == (1, 2, 0, 1, url)


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
    ("environment", "local_size", "said"),
    [
        (MVAPICH, 2, "MVAPICH2 started 4 processes, .* mpirun_rsh ... MASTER_ADDR=HOST"),
        (JSRUN, None, "jsrun started 4 processes, .* jsrun -E MASTER_ADDR=HOST"),
        (FLUX, None, "Flux started 4 processes, .* flux run --env=MASTER_ADDR=HOST"),
    ],
    ids=["MVAPICH2", "jsrun", "Flux"],
)
def test_other_launchers_have_ranks_and_ask_where_the_processes_meet(
    environment: dict[str, str], local_size: int | None, said: str
):
    launch = required(environment)
    assert (launch.rank, launch.size, launch.local_rank, launch.local_size) == (3, 4, 1, local_size)
    with pytest.raises(ConfigError, match=said):
        _ = launch.url
    met = required(environment | {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "4000"})
    assert met.url == "tcp://10.0.0.9:4000"


@pytest.mark.parametrize(
    "environment",
    [
        TRAIN_JOB | {"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "auto"},
        {"PET_NNODES": "1:1"},
        {"PET_NPROC_PER_NODE": "4"},
        {"PET_MASTER_ADDR": "10.0.0.1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"},
        SKYPILOT | {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.4"},
        {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_SETUP_NODE_RANK": "1", "SKYPILOT_SETUP_NODE_IPS": "10.0.0.4"},
        SALLOC, SBATCH, {"WORLD_SIZE": "1"}, {"LOCAL_RANK": "0"}, {"LOCAL_WORLD_SIZE": "1"},
        {"PMI_FD": "6", "PMI_SIZE": "1"}, {"OMPI_UNIVERSE_SIZE": "8"}, {"PMIX_RANK": "0"},
        {"PMIX_RANK": "1", "PMI_SIZE": "1", "PMI_RANK": "0"}, {"PALS_RANKID": "0"}, {"PALS_RANKID": "none"},
        {"FLUX_JOB_SIZE": "1", "FLUX_TASK_RANK": "0"}, {"FLUX_URI": "local:///tmp/flux"}, {"LSB_JOBID": "4"},
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
        (without(MVAPICH, "MV2_COMM_WORLD_RANK"), "MVAPICH2 started several processes, but MV2_COMM_WORLD_RANK is not set"),
        ({"FLUX_JOB_SIZE": "2"}, "Flux started several processes, but FLUX_TASK_RANK is not set"),
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-a-1@1"}, "PMIX_RANK=1 says .* one of several, but not of how many"),
        ({"PALS_RANKID": "3"}, "PALS_RANKID=3 says .* set RANK, WORLD_SIZE, MASTER_ADDR .* unset PALS_RANKID to run in one"),
        ({"LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE=2 is set but RANK and WORLD_SIZE are not; set them"),
        (TRAIN_JOB | {"PET_NPROC_PER_NODE": "auto"}, "PET_NPROC_PER_NODE=auto .* 2 nodes, but only torchrun starts them"),
        (TRAIN_JOB | {"PET_NNODES": "1:4"}, "PET_NNODES=1:4 says .* several.*torchrun -m penstock train"),
        (without(TRAIN_JOB, "PET_NODE_RANK"), r"PET_NODE_RANK \(not set\) must be"),
        (TRAIN_JOB | {"PET_NODE_RANK": "2"}, "PET_NODE_RANK='2' and PET_NNODES='2' are not a rank below"),
        ({"RANK": "1", "WORLD_SIZE": "4", "PET_NPROC_PER_NODE": "2"}, "not started by torchrun"),
        (SKYPILOT | {"SKYPILOT_NUM_GPUS_PER_NODE": "8"}, "2 nodes, which have 8 GPUs each.*torchrun --nnodes"),
        (SKYPILOT | {"SKYPILOT_NUM_NODES": "3"}, "SKYPILOT_NUM_NODES=3, but SKYPILOT_NODE_IPS has 2 addresses"),
        (SKYPILOT | {"SKYPILOT_NODE_RANK": "2"}, "SKYPILOT_NODE_RANK='2' and SKYPILOT_NUM_NODES='2' are not"),
        (SRUN | {"RANK": "0", "WORLD_SIZE": "1"}, "WORLD_SIZE=1, but Slurm step 31.5 started 4 .* unset SLURM_STEP_NUM"),
        (SKYPILOT | {"RANK": "0", "WORLD_SIZE": "1"}, "SkyPilot started 2 processes, and each would train by itself"),
        (SKYPILOT | {"SKYPILOT_NUM_GPUS_PER_NODE": "8", "RANK": "0", "WORLD_SIZE": "1"}, "which have 8 GPUs each"),
        (TRAIN_JOB | {"PET_NPROC_PER_NODE": "8", "RANK": "0", "WORLD_SIZE": "1"}, "PET_NPROC_PER_NODE=8 asks for processes"),
        (TRAIN_JOB | {"PET_NPROC_PER_NODE": "auto", "RANK": "0", "WORLD_SIZE": "1"}, "only torchrun starts them"),
    ],
)  # fmt: skip
def test_half_a_launcher_is_refused_with_what_to_set(environment: dict[str, str], said: str):
    with pytest.raises(ConfigError, match=said):
        find_launch(environment)


def test_without_an_address_the_nodes_are_told_what_to_set():
    for environment in (without(TRAIN_JOB, "PET_MASTER_ADDR"), without(SKYPILOT, "SKYPILOT_NODE_IPS")):
        with pytest.raises(ConfigError, match="MASTER_ADDR is not set"):
            _ = required(environment).url


@pytest.mark.parametrize(
    "outer", [SRUN, TRAIN_JOB | {"PET_NPROC_PER_NODE": "2"}, SKYPILOT, OPEN_MPI], ids=str
)
def test_torchrun_inside_another_launcher_counts(outer: dict[str, str]):
    launch = required(outer | TORCHRUN)
    assert (launch.rank, launch.size, launch.url) == (3, 4, "env://")


def test_rank_and_size_are_the_way_out_of_a_launcher_that_is_refused():
    launch = required(SRUN | {"SLURM_HET_SIZE": "2", **without(TORCHRUN, "TORCHELASTIC_RUN_ID")})
    assert (launch.rank, launch.size) == (3, 4)


def test_one_run_for_each_node_is_said_since_it_may_be_meant():
    alone = TORCHRUN | {"GROUP_WORLD_SIZE": "1", "RANK": "0", "WORLD_SIZE": "2"}
    assert "SkyPilot started 2 processes; to make them one run" in host_advice(SKYPILOT | alone)
    assert not host_advice(alone)
    assert not host_advice(SKYPILOT | TORCHRUN)
    assert not host_advice(SKYPILOT | alone | {"SKYPILOT_NODE_RANK": "x"})


def test_the_device_is_chosen_where_a_group_was_made_although_the_variables_are_refused():
    refused = SRUN | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "1"}
    with pytest.raises(ConfigError):
        find_launch(refused)
    assert own_device(2, refused) == 1
