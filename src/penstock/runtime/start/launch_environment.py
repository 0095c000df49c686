"""What a launcher says in the environment: that it started several processes, and which of them this one is.

Read are the variables of torchrun, and of whatever sets RANK and WORLD_SIZE; of Open MPI; of PMI, which MPICH, Intel MPI and
Cray use; and of a Slurm step. The more specific launcher wins, since launchers start one another: ``mpirun`` and torchrun
reach other hosts through ``srun``, and leave Slurm's variables in place.

Slurm sets variables in many more places than in the tasks of a parallel start. The shell of ``salloc`` has SLURM_NTASKS, and
the script of ``sbatch`` has SLURM_PROCID=0 as well, though neither is one task of several. Only ``srun`` sets
SLURM_STEP_NUM_TASKS, so that is what counts (man page of srun, OUTPUT ENVIRONMENT VARIABLES).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.errors import ConfigError

Environment = Mapping[str, str]

_LOWEST_PORT, _PORTS, _STEPS = 16384, 16384, 16  # below the ports that Linux gives to outgoing connections


@dataclass(frozen=True)
class Launch:
    """This process among those that a launcher started.

    Attributes:
        launcher: what to call it in messages.
        rank, size: of this process, and how many there are.
        local_rank, local_size: the same on this machine; None where nothing says.
        address: host of rank 0, where the processes meet; empty where nothing says.
        port: there; 0 where nothing says.
        advice: how to set the address, where it is missing.
        own_devices: whether the launcher may have given each process GPUs of its own, which then start at 0.
        from_torch: whether torch reads the same variables by itself.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    address: str = ""
    port: int = 0
    advice: str = "set both, the same on every process"
    own_devices: bool = False
    from_torch: bool = False

    @property
    def url(self) -> str:
        """Where the processes meet, as ``init_process_group`` takes it.

        Raises:
            ConfigError: the launcher does not say, and nobody else does; says what to set.
        """
        if not self.address or not self.port:
            missing = [
                name for name, has in (("MASTER_ADDR", self.address), ("MASTER_PORT", self.port)) if not has
            ]
            raise ConfigError(
                f"{self.launcher} started {self.size} processes, but does not say where they meet: "
                f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set. MASTER_ADDR is the host of "
                f"rank 0, MASTER_PORT a free port there; {self.advice}"
            )
        if self.from_torch:
            return "env://"
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"tcp://{host}:{self.port}"


def find_launch(environment: Environment | None = None) -> Launch | None:
    """What started this process as one of several; None if nothing did.

    Args:
        environment: instead of this process's.

    Raises:
        ConfigError: variables that are no rank below a number of processes, or that contradict one another.
    """
    given = os.environ if environment is None else environment
    under = _open_mpi(given) or _pmi(given) or _slurm(given)
    rank, size = given.get("RANK"), given.get("WORLD_SIZE")
    if rank is None and size is None:
        return None if under is None else _with_address(under, given)
    if rank is not None and size is not None:
        found = Launch("RANK and WORLD_SIZE", *_pair(given, "RANK", "WORLD_SIZE"), from_torch=True)
        if under is not None and (under.rank, under.size) == (found.rank, found.size):
            found = replace(under, launcher=found.launcher, from_torch=True, address="", port=0)
        return _with_address(found, given)
    name, text = ("RANK", rank) if size is None else ("WORLD_SIZE", size)
    other = "WORLD_SIZE" if size is None else "RANK"
    if under is None:
        raise ConfigError(
            f"{name}={text} is set but {other} is not; set both, as torchrun does, or unset {name} to run in one process"
        )
    if text != str(under.rank if name == "RANK" else under.size):
        raise ConfigError(
            f"{name}={text}, but {under.launcher} says rank {under.rank} of {under.size}; unset {name}, or set {other} "
            "as well"
        )
    return _with_address(under, given)


def local_rank(environment: Environment | None = None) -> int:
    """This process's number on its machine; 0 where nothing says."""
    given = os.environ if environment is None else environment
    if "LOCAL_RANK" in given:
        return _count(given, "LOCAL_RANK")
    launch = find_launch(given)
    return 0 if launch is None or launch.local_rank is None else launch.local_rank


def local_size(environment: Environment | None = None) -> int | None:
    """How many processes of this run are on this machine; None where nothing says."""
    given = os.environ if environment is None else environment
    if "LOCAL_WORLD_SIZE" in given:
        return _count(given, "LOCAL_WORLD_SIZE")
    launch = find_launch(given)
    return None if launch is None else launch.local_size


def own_device(count: int, environment: Environment | None = None) -> int:
    """Which of the GPUs that this process sees is its own.

    Args:
        count: how many it sees. Slurm may show each task its own GPUs alone (``--gpus-per-task``, ``--gpu-bind``); they
            start at 0 for each then.
    """
    number = local_rank(environment)
    launch = find_launch(environment)
    return 0 if launch is not None and launch.own_devices and number >= count > 0 else number


def has_own_device(count: int, environment: Environment | None = None) -> bool:
    """Whether there is a GPU for each of this run's processes on this machine."""
    launch = find_launch(environment)
    if launch is not None and launch.own_devices:
        return count > 0
    return count >= (local_size(environment) or 1)


def host_advice(environment: Environment | None = None) -> str:
    """What to set so that a replaced host can join a run that torchrun restarts; empty where there is nothing to say."""
    given = os.environ if environment is None else environment
    several = (
        int(given.get("GROUP_WORLD_SIZE") or 1) > 1 and int(given.get("TORCHELASTIC_MAX_RESTARTS") or 0) > 0
    )
    if not several or given.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return ""
    return (
        "torchrun restarts this run after a failure, but a new host cannot take the place of one that is gone: set "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for every torchrun, and it can"
    )


def _open_mpi(given: Environment) -> Launch | None:
    prefix = "OMPI_COMM_WORLD_"
    if f"{prefix}RANK" not in given or f"{prefix}SIZE" not in given:
        return None
    rank, size = _pair(given, f"{prefix}RANK", f"{prefix}SIZE")
    if size == 1:
        return None
    return Launch(
        "Open MPI",
        rank,
        size,
        _optional(given, f"{prefix}LOCAL_RANK"),
        _optional(given, f"{prefix}LOCAL_SIZE"),
        advice="mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 hands them on",
    )


def _pmi(given: Environment) -> Launch | None:
    if "PMI_RANK" not in given or "PMI_SIZE" not in given:
        return None
    rank, size = _pair(given, "PMI_RANK", "PMI_SIZE")
    if size == 1:
        return None
    step = _slurm(given)
    if step is not None and (step.rank, step.size) == (rank, size):
        return step  # srun --mpi=pmi2 sets both; a launcher that srun started for it has other numbers
    return Launch(
        "PMI",
        rank,
        size,
        _optional(given, "MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        _optional(given, "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        advice="mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT 29500 hands them on",
    )


def _slurm(given: Environment) -> Launch | None:
    if "SLURM_PROCID" not in given or "SLURM_STEP_NUM_TASKS" not in given:
        return None
    rank, size = _pair(given, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    if size == 1:
        return None
    name = f"Slurm step {given.get('SLURM_JOB_ID', '?')}.{given.get('SLURM_STEP_ID', '?')}"
    if int(given.get("SLURM_HET_SIZE") or 1) > 1:
        raise ConfigError(
            f"{name} is of a heterogeneous job, whose parts number their tasks each for itself; set RANK, WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT for every task, or start torchrun in each part"
        )
    hosts = given.get("SLURM_STEP_NODELIST") or given.get("SLURM_JOB_NODELIST") or ""
    arbitrary = given.get("SLURM_DISTRIBUTION") == "arbitrary"
    advice = "export both before srun"
    if given.get("SLURM_STEP_NUM_NODES") == "1":
        address = "127.0.0.1"
    elif arbitrary:
        address = ""
        advice += " (with --distribution=arbitrary the host of rank 0 need not be the first of the step's node list)"
    else:
        address = first_host(hosts)
    job, step = given.get("SLURM_JOB_ID", ""), given.get("SLURM_STEP_ID", "")
    port = 0
    if job.isdecimal() and step.isdecimal():
        # The same for all tasks, and another one for each of a job's steps and for jobs that run beside it.
        port = _LOWEST_PORT + (int(job) * _STEPS + int(step) % _STEPS) % _PORTS
    return Launch(
        name,
        rank,
        size,
        _optional(given, "SLURM_LOCALID"),
        _tasks_here(given),
        address,
        port,
        advice,
        own_devices="SLURM_GPUS_PER_TASK" in given or "SLURM_GPU_BIND" in given,
    )


def first_host(hosts: str) -> str:
    """The first host of a list as Slurm writes it: ``node[003-007,9],login1`` begins with ``node003``."""
    first = re.match(r"(?:[^,\[\]]|\[[^\]]*\])*", hosts)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group()) if first else ""


def _tasks_here(given: Environment) -> int | None:
    """Tasks of the step on this node, of a list such as ``4(x2),3``: four on the first two nodes, three on the third."""
    node = _optional(given, "SLURM_NODEID")
    if node is None:
        return None
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", given.get("SLURM_STEP_TASKS_PER_NODE", "")):
        node -= int(times or 1)
        if node < 0:
            return int(tasks)
    return None


def _with_address(launch: Launch, given: Environment) -> Launch:
    """With the address and port that the user set, each in place of the launcher's."""
    port = given.get("MASTER_PORT", "")
    if port and not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ConfigError(f"MASTER_PORT={port!r} is no port; it must be a number from 1 to 65535")
    return replace(
        launch, address=given.get("MASTER_ADDR") or launch.address, port=int(port) if port else launch.port
    )


def _pair(given: Environment, rank: str, size: str) -> tuple[int, int]:
    number, count = given[rank], given[size]
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise ConfigError(
            f"{rank}={number!r} and {size}={count!r} are not a rank below a number of processes"
        )
    return int(number), int(count)


def _count(given: Environment, name: str) -> int:
    if not given[name].isdecimal():
        raise ConfigError(
            f"{name}={given[name]!r} is not a whole number; unset it, or set it as torchrun does"
        )
    return int(given[name])


def _optional(given: Environment, *names: str) -> int | None:
    return next((_count(given, name) for name in names if name in given), None)
