"""What is done to a run, where and when; and the part of it that runs inside the victim's process."""

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


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        action: one of `ACTIONS`.
        at: one of `PLACES`, or ``F+B``: within a stage's forward or backward, within the all-reduce of gradients, within the
            optimizer's step, or before anything is built.
        rank: of the process; None for any.
        stage, microbatch: with F and B; None for any.
        step: counted from 1, over the whole run; 0 for every step.
        again: whether it strikes whenever it can, and not once in the whole run.
    """

    action: str
    at: str
    rank: int | None = None
    stage: int | None = None
    microbatch: int | None = None
    step: int = 0
    again: bool = False

    def dump(self) -> str:
        """As one argument of a command."""
        return json.dumps(asdict(self))

    @staticmethod
    def read(text: str) -> Fault:
        """What `dump` wrote."""
        return Fault(**json.loads(text))


class Diary:
    """What happened in a process, one JSON object a line, at once on disk; read by whoever started it.

    Args:
        folder: of the run's diaries.
    """

    def __init__(self, folder: Path) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self._path = folder / f"rank-{self.rank}-{os.getpid()}.jsonl"

    def write(self, what: str, **more: object) -> None:
        """Note an event, with the time."""
        line = {"time": time.time(), "what": what, "rank": self.rank, "pid": os.getpid(), **more}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class Injector:
    """Strikes when the time has come.

    Args:
        fault: what to do; None only takes notes.
        folder: of the diaries; what has struck leaves its mark there, so that a restarted run is spared.
    """

    def __init__(self, fault: Fault | None, folder: Path) -> None:
        self.diary = Diary(folder)
        self.step = 0
        self._fault = fault
        self._mark = folder / "struck"
        self._lock = threading.Lock()

    def due(self, at: str, stage: int | None = None, microbatch: int | None = None) -> bool:
        """Whether the fault is to strike here and now; where it strikes once, it says so once."""
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
        """Do it, all but a NaN, which takes a value to be put into.

        Args:
            seconds: what it slows down took so long.
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
        """Whether values are to become NaN."""
        return self._fault is not None and self._fault.action == "nan"

    @property
    def slows(self) -> bool:
        """Whether ops are to take three times as long."""
        return self._fault is not None and self._fault.action == "slow"

    def around(self, at: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """A stage's method (stage, microbatch, messages, ...) that the fault may strike."""

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
        """A function that the fault may strike before it does anything."""

        def run(*args: Any, **named: Any) -> Any:
            if self.due(at):
                self.strike()
            return method(*args, **named)

        return run
