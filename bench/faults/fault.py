"""A fault of a run, with its place and time, and the code that injects it inside the victim's process."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ECHO = "PENSTOCK_FAULT_ECHO"
"""An environment variable: the folder in which a resumed run saves what it has loaded."""

PLACES = ("F", "B", "reduction", "optimizer", "start")
ACTIONS = ("kill", "stop", "raise", "hang", "nan", "slow")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
        action: one of `ACTIONS`.
        at: one of `PLACES`, or ``F+B``: within a stage's forward or backward, within the all-reduce of gradients, within the
            optimizer's step, or before anything is built.
        rank: rank of the process; None for any.
        stage, microbatch: stage and microbatch, for F and B; None for any.
        step: number of the step in the whole run, from 1; 0 for every step.
        again: whether it strikes whenever it can, instead of once in the whole run.
    """

    action: str
    at: str
    rank: int | None = None
    stage: int | None = None
    microbatch: int | None = None
    step: int = 0
    again: bool = False

    def dump(self) -> str:
        """Return it as one argument of a command."""
        return json.dumps(asdict(self))

    @staticmethod
    def read(text: str) -> Fault:
        """Return the fault that `dump` wrote."""
        return Fault(**json.loads(text))


class Diary:
    """Events in a process, written to disk at once as one JSON object per line; read by the process that started it.

    Args:
        folder: folder of the run's diaries.
    """

    def __init__(self, folder: Path) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self._path = folder / f"rank-{self.rank}-{os.getpid()}.jsonl"

    def write(self, what: str, **more: object) -> None:
        """Write an event, with the time."""
        line = {"time": time.time(), "what": what, "rank": self.rank, "pid": os.getpid(), **more}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class Injector:
    """Strikes at the right time.

    Args:
        fault: fault to inject; None only takes notes.
        folder: folder of the diaries; a fault that has struck leaves a mark there, so that a restarted run is spared.
    """

    def __init__(self, fault: Fault | None, folder: Path) -> None:
        self.diary = Diary(folder)
        self.step = 0
        self._fault = fault
        self._mark = folder / "struck"
        self._lock = threading.Lock()

    def due(self, at: str, stage: int | None = None, microbatch: int | None = None) -> bool:
        """Return whether the fault strikes here and now; a fault that strikes once is due once."""
        fault = self._fault
        if fault is None or at not in fault.at.split("+") or fault.rank not in (None, self.diary.rank):
            return False
        if fault.stage not in (None, stage) or fault.microbatch not in (None, microbatch):
            return False
        if fault.step not in (0, self.step):
            return False
        if fault.again:
            return True
        with self._lock:
            try:
                self._mark.touch(exist_ok=False)
            except FileExistsError:
                return False
        return True

    def strike(self, seconds: float = 0.0) -> None:
        """Inject the fault, except for a NaN, which needs a value to put it into.

        Args:
            seconds: duration of the call that a slow fault slows down.
        """
        assert self._fault is not None
        action = self._fault.action
        if action != "slow":
            self.diary.write("fault", step=self.step, action=action)
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif action == "raise":
            raise RuntimeError("the stage's own code fails here")
        elif action == "hang":
            threading.Event().wait(3600.0)
        elif action == "slow":
            time.sleep(2.0 * seconds)

    @property
    def poisons(self) -> bool:
        """True if values must become NaN."""
        return self._fault is not None and self._fault.action == "nan"

    @property
    def slows(self) -> bool:
        """True if ops must take three times as long."""
        return self._fault is not None and self._fault.action == "slow"

    def around(self, at: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a stage's method (stage, microbatch, messages, ...) that the fault may strike."""

        def run(stage: Any, microbatch: int, messages: Any, *args: Any, **named: Any) -> Any:
            if not self.due(at, stage.index, microbatch):
                return method(stage, microbatch, messages, *args, **named)
            if self.poisons:
                self.diary.write("fault", step=self.step, action="nan")
                for message in messages:
                    message.leaves[0].data.fill_(float("nan"))
                return method(stage, microbatch, messages, *args, **named)
            if self.slows:
                began = time.perf_counter()
                found = method(stage, microbatch, messages, *args, **named)
                self.strike(time.perf_counter() - began)
                return found
            self.strike()
            return method(stage, microbatch, messages, *args, **named)

        return run

    def before(self, at: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that the fault may strike before it starts."""

        def run(*args: Any, **named: Any) -> Any:
            if self.due(at):
                self.strike()
            return method(*args, **named)

        return run
