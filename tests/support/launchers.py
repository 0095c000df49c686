"""The variables that Slurm sets, and a port to meet at."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

SALLOC = {
    "SLURM_JOB_ID": "31", "SLURM_JOBID": "31", "SLURM_JOB_NODELIST": "node[07-08]", "SLURM_NNODES": "2",
    "SLURM_NPROCS": "4", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip


SBATCH = SALLOC | {
    "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0", "SLURMD_NODENAME": "node07",
}  # fmt: skip


SRUN = SBATCH | {
    "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_GTIDS": "2,3", "SLURM_STEP_ID": "5",
    "SLURM_STEPID": "5", "SLURM_STEP_NODELIST": "node[07-08]", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip


def free_port() -> str:
    """Return a port that is free, below those that the kernel gives to connections: none of them takes it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(10_000, 16_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return str(port)
