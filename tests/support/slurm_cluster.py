"""A Slurm cluster of five nodes on this machine, on the loopback interface, without root's services, systemd or munge."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Self

from tests.support import slurm_packages
from tests.support.children import running_in
from tests.support.launchers import free_port
from tests.support.programs import give_up

ENDS = ("CANCELLED", "COMPLETED", "FAILED", "NODE_FAIL", "TIMEOUT")
NODES = ("n1", "n2", "n3", "n4", "n5")

CONFIG = """\
ClusterName=penstock
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
# a job that was requeued waits that many seconds and one more
AuthInfo=cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
PluginDir={plugins}
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=30
SlurmdTimeout=60
MinJobAge=600
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n
SlurmdLogFile={folder}/%n.log
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=test Nodes=n[1-3] Default=YES OverSubscribe=FORCE:16
PartitionName=cheap Nodes=n[4-5] PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=n[4-5] PriorityTier=2 PreemptMode=OFF
"""


class SlurmCluster:
    """The cluster, while the context lasts; nothing that it started is left afterwards.

    Jobs of the partition ``test``, on nodes n1 to n3, share their nodes. On n4 and n5, jobs of ``urgent`` preempt those of
    ``cheap``.

    Without Slurm's packages the test is skipped, and under ``CI`` it fails.

    Args:
        environment: environment variables of the daemons and commands, added to those of this process.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        if slurm_packages.programs() is None:
            give_up("Slurm is not unpacked: python -m tests.support.slurm_packages")
        self._folder = Path(mkdtemp(prefix="slurm-"))  # short, as sockets' names are in it
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def _start(self) -> None:
        programs = slurm_packages.programs()
        config = self._folder / "slurm.conf"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH", "SRUN"))}
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        self.environment = inherited | self._environment | {"SLURM_CONF": str(config), "PATH": path}
        host = socket.gethostname()
        nodes = "\n".join(
            f"NodeName={name} NodeAddr=127.0.0.1 NodeHostname={host} Port={free_port()} CPUs=4 State=UNKNOWN"
            for name in NODES
        )
        places = {"plugins": slurm_packages.plugins(), "port": free_port(), "folder": self._folder}
        config.write_text(CONFIG.format(host=host, user=getpass.getuser(), nodes=nodes, **places))
        for name in ("state", *NODES):
            (self._folder / name).mkdir()
        self._daemon("slurmctld", "slurmctld", "-D", "-i")
        for name in NODES:
            self.start_node(name)
        self.until(lambda: set(self.states()) == {"idle"}, "all nodes idle")

    def start_node(self, name: str) -> None:
        """Start the daemon of a node."""
        stepd = slurm_packages.folder() / "bin" / "slurmstepd"
        self._daemon(name, "slurmd", "-D", "-N", name, "-d", str(stepd))

    def kill_node(self, name: str) -> None:
        """Kill the daemon of a node and all that runs there."""
        daemon = self._daemons.pop(name)
        daemon.kill()
        daemon.wait()
        _kill(running_in("SLURMD_NODENAME", name))

    def _daemon(self, name: str, *command: str) -> None:
        with (self._folder / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )  # fmt: skip

    def run(self, *command: str, cwd: Path | None = None, **variables: str) -> str:
        """Run a command that asks something of Slurm, and return what it printed."""
        environment = self.environment | variables
        result = subprocess.run(
            command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=120
        )
        assert result.returncode == 0, f"{command}: {result.stderr}{self.logs()}"
        return result.stdout.strip()

    def states(self) -> list[str]:
        """Return the state of each node."""
        return self.run("sinfo", "--noheader", "--Node", "--format=%T").split()

    def ended(self, number: str, limit: float = 400.0) -> dict[str, str]:
        """Wait until a job has ended and is not to be requeued, and return its fields."""
        self.until(lambda: self.job(number)["JobState"] in ENDS, f"job {number} ended", limit)
        return self.job(number)

    def job(self, number: str) -> dict[str, str]:
        """Return the fields of a job, as ``scontrol show job`` prints them."""
        fields = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(field.split("=", 1) for field in fields if "=" in field)

    def until(self, holds: Callable[[], bool], condition: str, limit: float = 300.0) -> None:
        """Wait until a condition is true."""
        end = time.monotonic() + limit
        while not holds():
            assert time.monotonic() < end, f"waited {limit:g} s, but not {condition}{self.logs()}"
            time.sleep(0.1)

    def logs(self) -> str:
        """Return the last lines of the daemons' logs."""
        logs = [path for path in sorted(self._folder.glob("*.*")) if path.suffix in (".log", ".out")]
        return "".join(f"\n--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in logs)

    def _end(self) -> None:
        # The daemons first: they would start jobs again.
        _kill(daemon.pid for daemon in self._daemons.values())
        config = str(self._folder / "slurm.conf")
        end = time.monotonic() + 20
        while (left := running_in("SLURM_CONF", config)) and time.monotonic() < end:
            _kill(left)
            time.sleep(0.05)
        for daemon in self._daemons.values():
            daemon.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
        assert not left, f"left running: {left}"


def _kill(processes: Iterable[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
