"""Detection of a launcher by its environment variables: it started several processes, and this one is one of them.

`penstock.runtime.start.launchers` has the launchers and their variables. Something that looks like a launcher and cannot be
used is refused on every rank, since each process would otherwise train by itself. A process group that is already
initialised counts more than any variable (`penstock.runtime.start.place.current_place`).
"""

from __future__ import annotations

import os
import socket
from dataclasses import replace

from penstock.base.errors import ConfigError
from penstock.runtime.start.launchers import Environment, Launch, count, is_several, launcher_of, pair


def find_launch(environment: Environment | None = None) -> Launch | None:
    """Return how a launcher started this process; None if it is not one of several."""
    env = os.environ if environment is None else environment
    rank, size = env.get("RANK"), env.get("WORLD_SIZE")
    if rank is not None and size is not None:
        return _with_address(_of_torch(env), env)
    launch = launcher_of(env)
    if launch is None:
        _require_unset(env)
        return None
    name, text = ("RANK", rank) if size is None else ("WORLD_SIZE", size)
    if text is not None and text != str(launch.rank if name == "RANK" else launch.size):
        other = "WORLD_SIZE" if size is None else "RANK"
        raise ConfigError(
            f"{name}={text}, but {launch.launcher} says rank {launch.rank} of {launch.size}; unset {name}, or set {other} "
            "as well"
        )
    return _with_address(launch, env)


OWN_LOCAL_RANK, OWN_LOCAL_SIZE = "PENSTOCK_LOCAL_RANK", "PENSTOCK_LOCAL_WORLD_SIZE"
"""Set for the processes of `LocalProcesses`."""


def meeting_url(environment: Environment | None = None) -> str:
    """Return the address where the processes of this run meet, as ``init_process_group`` takes it."""
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
    if name := next((name for name in ("LOCAL_RANK", OWN_LOCAL_RANK) if name in env), None):
        return count(env, name)
    launch = _usable_launch(env)
    return 0 if launch is None or launch.local_rank is None else launch.local_rank


def local_size(environment: Environment | None = None) -> int | None:
    """Return the number of this run's processes on this machine; None if unknown."""
    env = os.environ if environment is None else environment
    if name := next((name for name in ("LOCAL_WORLD_SIZE", OWN_LOCAL_SIZE) if name in env), None):
        return count(env, name)
    launch = _usable_launch(env)
    return None if launch is None else launch.local_size


def own_device(devices: int, environment: Environment | None = None) -> int:
    """Return the index of this process's GPU among those that it sees.

    Args:
        devices: number of GPUs it sees. Slurm may show each task its own GPUs alone (``--gpus-per-task``, ``--gpu-bind``);
            they then start at 0 for each task.
    """
    number = local_rank(environment)
    launch = _usable_launch(os.environ if environment is None else environment)
    return 0 if launch is not None and launch.own_devices and number >= devices > 0 else number


def has_own_device(devices: int, environment: Environment | None = None) -> bool:
    """Return whether there is a GPU for each of this run's processes on this machine."""
    launch = _usable_launch(os.environ if environment is None else environment)
    if launch is not None and launch.own_devices:
        return devices > 0
    return devices >= (local_size(environment) or 1)


def host_advice(environment: Environment | None = None) -> str:
    """Say what to set if torchrun runs each node by itself, or cannot replace a host; empty if nothing is missing."""
    env = os.environ if environment is None else environment
    if "TORCHELASTIC_RUN_ID" in env and env.get("GROUP_WORLD_SIZE") == "1":
        return _one_node_advice(env)
    restarts = is_several(env.get("GROUP_WORLD_SIZE")) and int(env.get("TORCHELASTIC_MAX_RESTARTS") or 0) > 0
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


def _one_node_advice(env: Environment) -> str:
    """Say that several torchruns make a run each; it may be meant so, and torchrun does not show if it is."""
    try:
        launch = launcher_of(env)
    except ConfigError:
        return ""
    if launch is None:
        return ""
    return (
        f"this torchrun makes a run of its own, of one node, though {launch.launcher} started {launch.size} processes; to "
        f"make them one run, give each torchrun --nnodes {launch.size}, --node-rank and --master-addr"
    )


def _usable_launch(env: Environment) -> Launch | None:
    """Return the launch; None if there is none, or a process group was initialised although the variables are refused."""
    try:
        return find_launch(env)
    except ConfigError:
        return None


def _of_torch(env: Environment) -> Launch:
    """Return the launch that RANK and WORLD_SIZE describe, checked against the launcher that started them."""
    by_torchrun = "TORCHELASTIC_RUN_ID" in env
    job = env.get("TORCHELASTIC_RUN_ID", "")
    rank, ranks = pair(env, "RANK", "WORLD_SIZE")
    by_rank = Launch(launcher="RANK and WORLD_SIZE", rank=rank, size=ranks, from_torch=True, job=job)
    try:
        launch = launcher_of(env)
    except ConfigError:
        if by_rank.size == 1 and not by_torchrun:
            raise  # each process would train by itself
        return by_rank  # RANK and WORLD_SIZE are the remedy
    if launch is None:
        return by_rank
    if (launch.rank, launch.size) == (by_rank.rank, by_rank.size):
        return replace(
            launch, launcher=by_rank.launcher, from_torch=True, address="", port=0, listed=False, job=job
        )
    if not by_torchrun and by_rank.size == 1:
        raise ConfigError(
            f"WORLD_SIZE=1, but {launch.launcher} started {launch.size} processes, and each would train by itself; unset "
            f"RANK and WORLD_SIZE to make them one run, or unset {launch.size_variable} for runs of their own"
        )
    return by_rank


def _require_unset(env: Environment) -> None:
    """Raise if no launcher is there, but one of torchrun's variables says that there are several processes."""
    rank, size = env.get("RANK"), env.get("WORLD_SIZE")
    if size == "1":
        return
    partly = next(
        ((name, text) for name, text in (("RANK", rank), ("WORLD_SIZE", size)) if text is not None), None
    )
    if partly is None and is_several(env.get("LOCAL_WORLD_SIZE")):
        partly = "LOCAL_WORLD_SIZE", env["LOCAL_WORLD_SIZE"]
    if partly is None:
        return
    name, text = partly
    missing = [other for other in ("RANK", "WORLD_SIZE") if other not in env]
    raise ConfigError(
        f"{name}={text} is set but {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not; set "
        f"{'both' if len(missing) == 1 else 'them'}, as torchrun does, or unset {name} to run in one process"
    )


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
