"""The launchers that Penstock knows, the variables by which they tell a process its rank, and where the processes meet.

| launcher | rank, number of processes | rank on this machine | where they meet |
|---|---|---|---|
| torchrun, Ray Train, PyTorchJob, others | RANK, WORLD_SIZE | LOCAL_RANK | MASTER_ADDR, MASTER_PORT |
| ``mpirun`` of Open MPI | OMPI_COMM_WORLD_RANK, _SIZE | OMPI_COMM_WORLD_LOCAL_RANK | one machine: there |
| ``mpiexec`` of MPICH, Intel, Cray | PMI_RANK, PMI_SIZE | MPI_LOCALRANKID, PMI_LOCAL_RANK | as the user says |
| ``srun`` | SLURM_PROCID, SLURM_STEP_NUM_TASKS | SLURM_LOCALID | the first host of SLURM_STEP_NODELIST |

MASTER_ADDR and MASTER_PORT replace the address of every launcher. The first line that applies counts, since launchers start
one another: ``mpirun`` and torchrun reach other hosts through ``srun``, and leave Slurm's variables set. Where PMIX_RANK
(``prterun``) stands alone, nothing says the number of processes, so a rank above 0 is refused: the launcher then ends rank
0, which cannot know. Users of other launchers export torch's variables (docs/clusters.md).

Slurm sets variables in many more places than in the tasks of a parallel start. The shell of ``salloc`` has SLURM_NTASKS, and
the script of ``sbatch`` has SLURM_PROCID=0 as well, though neither is one of several tasks. Only ``srun`` sets
SLURM_STEP_NUM_TASKS, so that variable decides (man page of srun, OUTPUT ENVIRONMENT VARIABLES).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from zlib import crc32

from penstock.base.errors import ConfigError

Environment = Mapping[str, str]

# They end at 32767: from 32768 on, Linux gives ports to outgoing connections.
_LOWEST_PORT, _PORTS, _STEPS = 16384, 16384, 16


@dataclass(frozen=True, kw_only=True)
class Launch:
    """This process among the processes that a launcher started.

    Attributes:
        own_devices: whether the launcher may show each process its own GPUs alone, which then start at 0.
        listed: whether the address is a node's name from the launcher's list, which need not resolve.
        job: name of the launcher's job, the same for all its processes and no others; empty if unknown.
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
    size_variable: str = "WORLD_SIZE"
    listed: bool = False
    job: str = ""

    @property
    def url(self) -> str:
        """Address where the processes meet, as ``init_process_group`` takes it."""
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


def launcher_of(env: Environment) -> Launch | None:
    """Return how a launcher other than torchrun started this process; None if it is not one of several."""
    launch = next((launch for read in _LAUNCHERS if (launch := read(env)) is not None), None)
    if launch is None and not any(name in env for name in _SIZES):
        _refuse_unknown_size(env)
    return launch


def pair(env: Environment, rank: str, size: str) -> tuple[int, int]:
    """Return the rank and the number of processes in two variables that are set."""
    number, processes = env[rank], env[size]
    if not (number.isdecimal() and processes.isdecimal() and int(number) < int(processes)):
        raise ConfigError(
            f"{rank}={number!r} and {size}={processes!r} are not a rank below a number of processes; set both as torchrun "
            "does"
        )
    return int(number), int(processes)


def count(env: Environment, name: str) -> int:
    """Return the whole number in a variable that is set."""
    if not env[name].isdecimal():
        raise ConfigError(
            f"{name} must be a whole number, got {env[name]!r}; unset it, or set it as torchrun does"
        )
    return int(env[name])


def is_several(text: str | None) -> bool:
    """Return whether the value of a variable is a whole number above 1."""
    return text is not None and text.isdecimal() and int(text) > 1


def _open_mpi(env: Environment) -> Launch | None:
    prefix = "OMPI_COMM_WORLD_"
    if (several := _several(env, "Open MPI", f"{prefix}RANK", f"{prefix}SIZE")) is None:
        return None
    rank, size = several
    local_size = _optional(env, f"{prefix}LOCAL_SIZE")
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid")  # of Open MPI 5, and of 4
    is_local = local_size == size and bool(job)
    return Launch(
        launcher="Open MPI",
        rank=rank,
        size=size,
        local_rank=_optional(env, f"{prefix}LOCAL_RANK"),
        local_size=local_size,
        address="127.0.0.1" if is_local else "",
        port=_LOWEST_PORT + crc32(str(job).encode()) % _PORTS if is_local else 0,
        advice="mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 hands them on",
        size_variable=f"{prefix}SIZE",
        job=job or "",
    )


def _pmi(env: Environment) -> Launch | None:
    if (several := _several(env, "PMI", "PMI_RANK", "PMI_SIZE")) is None:
        return None
    rank, size = several
    step = _slurm(env)
    if step is not None and (step.rank, step.size) == several:
        return step  # srun --mpi=pmi2 sets both; a launcher started by srun has other numbers
    local_size = _optional(env, "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
    host = "127.0.0.1" if local_size == size else "HOST"
    return Launch(
        launcher="PMI",
        rank=rank,
        size=size,
        local_rank=_optional(env, "MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        local_size=local_size,
        advice=f"mpiexec -genv MASTER_ADDR {host} -genv MASTER_PORT 29500 hands them on",
        size_variable="PMI_SIZE",
    )


def _slurm(env: Environment) -> Launch | None:
    name = f"Slurm step {env.get('SLURM_JOB_ID', '?')}.{env.get('SLURM_STEP_ID', '?')}"
    if (several := _several(env, name, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")) is None:
        return None
    rank, size = several
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
        launcher=name,
        rank=rank,
        size=size,
        local_rank=_optional(env, "SLURM_LOCALID"),
        local_size=_tasks_here(env),
        address=address,
        port=port,
        advice=advice,
        own_devices="SLURM_GPUS_PER_TASK" in env or "SLURM_GPU_BIND" in env,
        size_variable="SLURM_STEP_NUM_TASKS",
        listed=bool(address) and address != "127.0.0.1",
        job=name,
    )


def _refuse_unknown_size(env: Environment) -> None:
    """Raise if PMIx says a rank above 0, and nothing how many processes there are."""
    rank = env.get("PMIX_RANK", "")
    if rank.isdecimal() and int(rank) > 0:
        raise ConfigError(
            f"PMIX_RANK={rank} says that this process is one of several, but not of how many; set RANK, WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT for every process, or unset PMIX_RANK to run in one process"
        )


_LAUNCHERS: tuple[Callable[[Environment], Launch | None], ...] = (_open_mpi, _pmi, _slurm)
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


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


def _several(env: Environment, launcher: str, rank: str, size: str) -> tuple[int, int] | None:
    """Return the rank and size in two variables; None if there is one process, or the size is not set."""
    if size not in env or (rank not in env and not is_several(env[size])):
        return None
    if rank not in env:
        raise ConfigError(
            f"{size}={env[size]} says that {launcher} started several processes, but {rank} is not set; set it, or unset "
            f"{size} to run in one process"
        )
    several = pair(env, rank, size)
    return None if several[1] == 1 else several


def _optional(env: Environment, *names: str) -> int | None:
    return next((count(env, name) for name in names if name in env), None)
