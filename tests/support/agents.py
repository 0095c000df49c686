"""Agents of torchrun, one for each host of a run, whose rendezvous is in a store of the test: any of them may go."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue
from threading import Thread

ROOT = Path(__file__).parents[2]
APART = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Environment in which a new host may take the place of one that is gone."""
_LIMIT = 600.0
"""Seconds; on a machine with other work, a start alone may take one minute."""


class Agent:
    """A torchrun with one process, and what its process says.

    Args:
        port: port of the store, on the loopback interface.
        errors: file for its standard error.
        nodes: number of hosts, as ``--nnodes`` takes it.
        program: arguments of torchrun after its own.
    """

    def __init__(self, port: int, errors: Path, nodes: str, *program: str, **environment: str) -> None:
        words = [
            f"--nnodes={nodes}", "--nproc-per-node=1", "--max-restarts=4", "--monitor-interval=0.1",
            "--local-addr=127.0.0.1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test",
            "--rdzv-conf=is_host=0,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=6",
        ]  # fmt: skip
        self.errors = errors
        with errors.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *words, *program],
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"} | environment,
                stdout=subprocess.PIPE, stderr=file, text=True,
            )  # fmt: skip
        self._lines: Queue[str] = Queue()
        self._reader = Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.strip())

    def said(self) -> str:
        """Its next line."""
        try:
            return self._lines.get(timeout=_LIMIT)
        except Empty:
            return f"nothing; {self.errors.read_text()}"

    def ended(self) -> int:
        """With which code it ends."""
        return self.process.wait(timeout=_LIMIT)

    def kill(self) -> None:
        """End it and its process, as where a host goes."""
        if self.process.poll() is None:
            pid = self.process.pid
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            self.process.kill()
            for child in children:
                with suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
