"""Detection of a launcher by its environment variables: it started several processes, and this one is one of them.

The variables are those of torchrun, and of anything else that sets RANK and WORLD_SIZE; of Open MPI; of PMI, which MPICH,
Intel MPI and Cray use; and of a Slurm step. The more specific launcher wins, since launchers start one another: ``mpirun``
and torchrun reach other hosts through ``srun``, and leave Slurm's variables set.

Slurm sets variables in many more places than in the tasks of a parallel start. The shell of ``salloc`` has SLURM_NTASKS, and
the script of ``sbatch`` has SLURM_PROCID=0 as well, though neither is one of several tasks. Only ``srun`` sets
SLURM_STEP_NUM_TASKS, so that variable decides (man page of srun, OUTPUT ENVIRONMENT VARIABLES).
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.errors import ConfigError

Environment = Mapping[str, str]

_LOWEST_PORT, _PORTS, _STEPS = 16384, 16384, 16  # below the ports that Linux gives to outgoing connections


@dataclass(frozen=True)
class Launch:
    """This process among the processes that a launcher started.

    Attributes:
        launcher: name of the launcher in messages.
        rank, size: rank of this process and number of processes.
        local_rank, local_size: the same on this machine; None if unknown.
        address: host of rank 0, where the processes meet; empty if unknown.
        port: port on that host; 0 if unknown.
        advice: text that says how to set a missing address.
        own_devices: whether the launcher may show each process its own GPUs alone, which then start at 0.
        from_torch: whether torch itself reads the same variables.
        listed: whether the address is a node's name from the launcher's list, which need not resolve.
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
    listed: bool = False

    @property
    def url(self) -> str:
        """Address where the processes meet, as ``init_process_group`` takes it.

        Raises:
            ConfigError: if neither the launcher nor the user sets it; says which variables to set.
        """
        if not self.address or not self.port:
            variables = {"MASTER_ADDR": self.address, "MASTER_PORT": self.port}
            missing = [name for name, value in variables.items() if not value]
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
    """Return how a launcher started this process; None if it is not one of several.

    Args:
        environment: environment variables (default: those of this process).

    Raises:
        ConfigError: if variables are not a rank below a number of processes, or contradict one another.
    """
    env = os.environ if environment is None else environment
    launch = _open_mpi(env) or _pmi(env) or _slurm(env)
    rank, size = env.get("RANK"), env.get("WORLD_SIZE")
    if rank is None and size is None:
        return None if launch is None else _with_address(launch, env)
    if rank is not None and size is not None:
        by_rank = Launch("RANK and WORLD_SIZE", *_pair(env, "RANK", "WORLD_SIZE"), from_torch=True)
        if launch is not None and (launch.rank, launch.size) == (by_rank.rank, by_rank.size):
            by_rank = replace(launch, launcher=by_rank.launcher, from_torch=True, address="", port=0)
        return _with_address(by_rank, env)
    name, text = ("RANK", rank) if size is None else ("WORLD_SIZE", size)
    other = "WORLD_SIZE" if size is None else "RANK"
    if launch is None:
        raise ConfigError(
            f"{name}={text} is set but {other} is not; set both, as torchrun does, or unset {name} to run in one process"
        )
    if text != str(launch.rank if name == "RANK" else launch.size):
        raise ConfigError(
            f"{name}={text}, but {launch.launcher} says rank {launch.rank} of {launch.size}; unset {name}, or set {other} "
            "as well"
        )
    return _with_address(launch, env)


def meeting_url(environment: Environment | None = None) -> str:
    """Return the address where the processes of this run meet, as ``init_process_group`` takes it.

    Args:
        environment: environment variables (default: those of this process).

    Raises:
        ConfigError: as `find_launch` and `Launch.url`, or if Slurm's name of the first node does not resolve. Torch would
            try until the timeout. For other names that is right: a service of Kubernetes gets its name later.
    """
    launch = find_launch(environment)
    if launch is None:
        return "env://"
    url = launch.url
    if launch.listed:
        try:
            socket.getaddrinfo(launch.address, launch.port)
        except OSError as error:
            raise ConfigError(
                f"{launch.launcher}: the first node, {launch.address}, must have a name that resolves: {error.strerror}; "
                "export MASTER_ADDR before srun, in a job's script as $(srun --nodes=1 --ntasks=1 --relative=0 hostname)"
            ) from error
    return url


def local_rank(environment: Environment | None = None) -> int:
    """Return this process's rank on its machine; 0 if unknown."""
    env = os.environ if environment is None else environment
    if "LOCAL_RANK" in env:
        return _count(env, "LOCAL_RANK")
    launch = find_launch(env)
    return 0 if launch is None or launch.local_rank is None else launch.local_rank


def local_size(environment: Environment | None = None) -> int | None:
    """Return the number of this run's processes on this machine; None if unknown."""
    env = os.environ if environment is None else environment
    if "LOCAL_WORLD_SIZE" in env:
        return _count(env, "LOCAL_WORLD_SIZE")
    launch = find_launch(env)
    return None if launch is None else launch.local_size


def own_device(count: int, environment: Environment | None = None) -> int:
    """Return the index of this process's GPU among those that it sees.

    Args:
        count: number of GPUs it sees. Slurm may show each task its own GPUs alone (``--gpus-per-task``, ``--gpu-bind``);
            they then start at 0 for each task.
        environment: environment variables (default: those of this process).
    """
    number = local_rank(environment)
    launch = find_launch(environment)
    return 0 if launch is not None and launch.own_devices and number >= count > 0 else number


def has_own_device(count: int, environment: Environment | None = None) -> bool:
    """Return whether there is a GPU for each of this run's processes on this machine."""
    launch = find_launch(environment)
    if launch is not None and launch.own_devices:
        return count > 0
    return count >= (local_size(environment) or 1)


def host_advice(environment: Environment | None = None) -> str:
    """Say what to set so that a replacement host can join a run that torchrun restarts; empty if nothing is missing."""
    env = os.environ if environment is None else environment
    restarts = (
        int(env.get("GROUP_WORLD_SIZE") or 1) > 1 and int(env.get("TORCHELASTIC_MAX_RESTARTS") or 0) > 0
    )
    if not restarts or env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return ""
    return (
        "torchrun restarts this run after a failure, but a new host cannot take the place of one that is gone: set "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for every torchrun, and it can"
    )


def unused_nodes(environment: Environment | None = None) -> str:
    """Say how to use the other nodes of a Slurm job whose script started this process without ``srun``; empty if none."""
    env = os.environ if environment is None else environment
    nodes = env.get("SLURM_JOB_NUM_NODES") or env.get("SLURM_NNODES") or "1"
    if nodes == "1" or "SLURM_STEP_NUM_TASKS" in env or find_launch(env) is not None:
        return ""
    return (
        f"Slurm job {env.get('SLURM_JOB_ID', '?')} has {nodes} nodes, and this run uses one of them: start it with srun, "
        "and every task is a rank"
    )


def _open_mpi(env: Environment) -> Launch | None:
    prefix = "OMPI_COMM_WORLD_"
    if (pair := _several(env, f"{prefix}RANK", f"{prefix}SIZE")) is None:
        return None
    return Launch(
        "Open MPI",
        *pair,
        _optional(env, f"{prefix}LOCAL_RANK"),
        _optional(env, f"{prefix}LOCAL_SIZE"),
        advice="mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 hands them on",
    )


def _pmi(env: Environment) -> Launch | None:
    if (pair := _several(env, "PMI_RANK", "PMI_SIZE")) is None:
        return None
    step = _slurm(env)
    if step is not None and (step.rank, step.size) == pair:
        return step  # srun --mpi=pmi2 sets both; a launcher started by srun has other numbers
    return Launch(
        "PMI",
        *pair,
        _optional(env, "MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        _optional(env, "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        advice="mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT 29500 hands them on",
    )


def _slurm(env: Environment) -> Launch | None:
    if (pair := _several(env, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")) is None:
        return None
    name = f"Slurm step {env.get('SLURM_JOB_ID', '?')}.{env.get('SLURM_STEP_ID', '?')}"
    if int(env.get("SLURM_HET_SIZE") or 1) > 1:
        raise ConfigError(
            f"{name} belongs to a heterogeneous job, whose components number their tasks separately; set RANK, WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT for every task, or start torchrun in each component"
        )
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
    arbitrary = env.get("SLURM_DISTRIBUTION") == "arbitrary"
    advice = "export both before srun"
    if env.get("SLURM_STEP_NUM_NODES") == "1":
        address = "127.0.0.1"
    elif arbitrary:
        address = ""
        advice += " (with --distribution=arbitrary the host of rank 0 need not be the first of the step's node list)"
    else:
        address = first_host(hosts)
    job, step = env.get("SLURM_JOB_ID", ""), env.get("SLURM_STEP_ID", "")
    port = 0
    if job.isdecimal() and step.isdecimal():
        # The same for all tasks, but different for each step of a job and for jobs that run at the same time.
        port = _LOWEST_PORT + (int(job) * _STEPS + int(step) % _STEPS) % _PORTS
    return Launch(
        name,
        *pair,
        _optional(env, "SLURM_LOCALID"),
        _tasks_here(env),
        address,
        port,
        advice,
        listed=bool(address) and address != "127.0.0.1",
        own_devices="SLURM_GPUS_PER_TASK" in env or "SLURM_GPU_BIND" in env,
    )


def first_host(hosts: str) -> str:
    """Return the first host of a list as Slurm writes it: ``node003`` for ``node[003-007,9],login1``."""
    first = re.match(r"(?:[^,\[\]]|\[[^\]]*\])*", hosts)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group()) if first else ""


def _tasks_here(env: Environment) -> int | None:
    """Return the step's tasks on this node, from a list such as ``4(x2),3``: 4 on the first two nodes, 3 on the third."""
    node = _optional(env, "SLURM_NODEID")
    if node is None:
        return None
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", "")):
        node -= int(times or 1)
        if node < 0:
            return int(tasks)
    return None


def _with_address(launch: Launch, env: Environment) -> Launch:
    """Replace the launcher's address and port by those that the user set."""
    port = env.get("MASTER_PORT", "")
    if port and not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ConfigError(f"MASTER_PORT must be a port number from 1 to 65535, got {port!r}")
    address = env.get("MASTER_ADDR", "")
    return replace(
        launch,
        address=address or launch.address,
        port=int(port) if port else launch.port,
        listed=launch.listed and not address,
    )


def _several(env: Environment, rank: str, size: str) -> tuple[int, int] | None:
    """Return the rank and size in two variables; None if they are not set, or there is one process."""
    pair = _pair(env, rank, size) if rank in env and size in env else (0, 1)
    return None if pair[1] == 1 else pair


def _pair(env: Environment, rank: str, size: str) -> tuple[int, int]:
    number, count = env[rank], env[size]
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise ConfigError(
            f"{rank}={number!r} and {size}={count!r} are not a rank below a number of processes; set both as torchrun does"
        )
    return int(number), int(count)


def _count(env: Environment, name: str) -> int:
    if not env[name].isdecimal():
        raise ConfigError(
            f"{name} must be a whole number, got {env[name]!r}; unset it, or set it as torchrun does"
        )
    return int(env[name])


def _optional(env: Environment, *names: str) -> int | None:
    return next((_count(env, name) for name in names if name in env), None)
