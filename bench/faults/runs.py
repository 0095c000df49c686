"""Small training runs with a fault, in threads or in processes, and their results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.children import running_in

from bench.faults.fault import ECHO, Diary, Fault

MARK = "PENSTOCK_FAULT_RUN"
"""An environment variable that every process of a run inherits, by which those it leaves behind are found."""

WORDS = ("def", "return", "self", "value", "for", "in", "range", "if", "not", "None")
SETTINGS: dict[str, object] = {
    "model.width": 32,
    "model.layers": 4,
    "model.heads": 4,
    "model.kv_heads": 2,
    "model.hidden": 64,
    "data.held_out": 0.2,
    "data.sequence": 32,
    "schedule.microbatches": 4,
    "parallel.pp": 2,
    "train.steps": 12,
    "train.batch": 16,
    "train.name": "run",
    "train.log_every": 1,
    "train.eval_batches": 1,
    "train.trace_every": 0,
    "train.checkpoint_every": 5,
    "train.report": "false",
    "sample.length": 4,
}


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A run that has ended.

    Attributes:
        code: exit code of the process that was started; negative for the signal that ended it.
        began, over: start and end, in seconds of `time.time`.
        out, err: standard output and standard error.
        events: its processes' diaries, in order of time.
        left: process ids that it left running.
        folder: folder of the run.
    """

    code: int
    began: float
    over: float
    out: str
    err: str
    events: Sequence[Mapping[str, Any]]
    left: Sequence[int]
    folder: Path

    def all(self, what: str) -> list[Mapping[str, Any]]:
        """Return the events of a kind."""
        return [event for event in self.events if event["what"] == what]

    @property
    def struck(self) -> float:
        """Time at which the fault struck first."""
        return float(self.all("fault")[0]["time"])

    def losses(self) -> dict[int, float]:
        """Return the loss of each step; the last one of a step that ran twice."""
        return {event["step"]: event["loss"] for event in self.all("step") if event["loss"]}


@dataclass(kw_only=True)
class Victim:
    """A run that has not started yet.

    Args:
        root: folder for this run alone.
        fault: fault to inject; None for none.
        processes: number of processes under torchrun; 0 for threads of one process.
        restarts: restarts that torchrun may make; the run then resumes from its newest checkpoint.
        settings: changes of `SETTINGS`.
        resume: whether to resume the run of that name, as ``--resume`` does.
        echo: folder in which a resumed run saves the loaded state before it continues.
    """

    root: Path
    fault: Fault | None = None
    processes: int = 0
    restarts: int = 0
    settings: Mapping[str, object] = field(default_factory=dict)
    resume: bool = False
    echo: Path | None = None

    def __post_init__(self) -> None:
        self.diaries = self.root / "diaries"
        self.diaries.mkdir(parents=True, exist_ok=True)
        self._began = time.time()
        self._process: subprocess.Popen[str] | None = None

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return self.root / "runs" / "run"

    def start(self) -> Victim:
        """Start it as the leader of a new process group."""
        text = write_text(self.root)
        values = {**SETTINGS, "data.path": text, "train.folder": self.root / "runs", **self.settings}
        words = ["train", *[f"--set={key}={value}" for key, value in values.items()]]
        if self.resume or self.restarts:
            words.append("--resume")
        victim = ["-m", "bench.faults.victim", str(self.diaries), self.fault.dump() if self.fault else "none"]
        command = [sys.executable]
        if self.processes:
            command += [*TORCHRUN, f"--nproc-per-node={self.processes}", f"--max-restarts={self.restarts}"]
        command += victim
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            MARK: str(self.root),
            ECHO: str(self.echo or ""),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        with (self.root / "out").open("w") as out, (self.root / "err").open("w") as err:
            self._began = time.time()
            self._process = subprocess.Popen(
                [*command, *words], stdout=out, stderr=err, text=True, env=environment, start_new_session=True
            )
        return self

    def send(self, number: int, group: bool = False, pid: int | None = None) -> None:
        """Send a signal to the process that was started, to all of its group as from a terminal, or to another process.

        Raises:
            ProcessLookupError: if it is gone.
        """
        assert self._process is not None
        (os.killpg if group else os.kill)(pid or self._process.pid, number)

    def running(self) -> bool:
        """Return whether the process that was started still runs."""
        assert self._process is not None
        return self._process.poll() is None

    def processes_left(self) -> list[int]:
        """Return process ids of the run."""
        return running_in(MARK, str(self.root))

    def note(self, what: str, **more: object) -> None:
        """Write into the run's diaries from outside."""
        Diary(self.diaries).write(what, **more)

    def events(self) -> list[dict[str, Any]]:
        """Return the diaries so far, in order of time."""
        texts = [path.read_text("utf-8", "replace") for path in self.diaries.glob("*.jsonl")]
        # What follows the last end of a line is being written, or was when its process was killed.
        lines = [line for text in texts for line in text.rpartition("\n")[0].splitlines()]
        return sorted((json.loads(line) for line in lines), key=lambda event: float(event["time"]))

    def until_said(self, text: str) -> None:
        """Wait until the run has written a text to stderr."""
        while text not in (self.root / "err").read_text("utf-8", "replace") and self.running():
            time.sleep(0.01)

    def until(self, what: str, limit: float = 240.0, **more: object) -> dict[str, Any]:
        """Wait for an event, and return it.

        Raises:
            TimeoutError: if it does not come in time.
        """
        assert self._process is not None
        end = time.monotonic() + limit
        while time.monotonic() < end:
            for event in self.events():
                if event["what"] == what and all(event.get(k) == v for k, v in more.items()):
                    return event
            if not self.running():
                break
            time.sleep(0.01)
        raise TimeoutError(f"{what} {more} has not come; {(self.root / 'err').read_text()[-2000:]}")

    def wait(self, limit: float = 120.0) -> Ended:
        """Wait until the run has ended, and list the processes it has left running.

        Raises:
            TimeoutError: if it has not ended in time; all of it has been killed.
        """
        assert self._process is not None
        try:
            code = self._process.wait(limit)
        except subprocess.TimeoutExpired:
            self.kill()
            raise TimeoutError(f"not over after {limit:g} s; {self._said('err')[-2000:]}") from None
        over = time.time()
        end = time.monotonic() + 2.0
        while (left := running_in(MARK, str(self.root))) and time.monotonic() < end:
            time.sleep(0.05)
        self.kill()
        return Ended(
            code=code,
            began=self._began,
            over=over,
            out=self._said("out"),
            err=self._said("err"),
            events=self.events(),
            left=left,
            folder=self.folder,
        )

    def run(self, limit: float = 120.0) -> Ended:
        """Call `start` and `wait`."""
        return self.start().wait(limit)

    def kill(self) -> None:
        """End all remaining processes of the run."""
        while left := running_in(MARK, str(self.root)):
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        if self._process is not None:
            self._process.wait()

    def _said(self, name: str) -> str:
        return (self.root / name).read_text("utf-8", "replace")


TORCHRUN = ("-m", "torch.distributed.run", "--standalone")


def write_text(root: Path) -> Path:
    """Write a folder of ten small text files, each different from the others."""
    folder = root / "text"
    folder.mkdir(exist_ok=True)
    for n in range(10):
        lines = [
            " ".join(WORDS[(n * 7 + line * 3 + k * k) % len(WORDS)] for k in range(6)) for line in range(40)
        ]
        (folder / f"file_{n}.txt").write_text("\n".join(lines) + "\n", "utf-8")
    return folder
