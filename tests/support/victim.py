"""``python -m tests.support.victim train ...``: the command, in which something happens to one rank before a step.

The environment's ``VICTIM`` says what: ``ATTEMPT:RANK:STEP:WHAT``, several with commas between them. Steps count from 0, as
batches do; attempts as TORCHELASTIC_RESTART_COUNT does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from penstock.cli import main
from penstock.train import signals, trainer
from penstock.train.config import file as config_file
from penstock.train.config.config import Config
from tests.support.waiting import until

PLAN = "VICTIM"
here: list[Noted] = []


class Noted(signals.Interrupts):
    def __enter__(self) -> Noted:
        here.append(self)
        super().__enter__()
        return self


def started(
    config: Config, plan: str, *launcher: str, words: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """The command in processes of its own, in which happens what `plan` says."""
    file = Path(config.train.folder).parent / f"{config.train.name}.toml"
    file.write_text(config_file.dump(config))
    command = [*(launcher or [sys.executable]), "-m", "tests.support.victim", "train", str(file), *words]
    environment = {**os.environ, PLAN: plan, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def term() -> None:
    """SIGTERM for whoever started this process, which is to pass it on; the step goes on once it is here."""
    os.kill(os.getppid(), signal.SIGTERM)
    until_asked()


def term_self() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    until_asked()


def interrupt_twice() -> None:
    """Ctrl-C twice, the second one in a wait in which no Python runs, and not taken for a copy of the first."""
    from torch.distributed import FileStore

    signals.SAME_REQUEST = 0.0
    os.kill(os.getpid(), signal.SIGINT)
    until_asked()
    os.kill(os.getpid(), signal.SIGINT)
    with TemporaryDirectory() as folder:
        FileStore(str(Path(folder) / "store"), 2).get("what nobody sets")


def until_asked() -> None:
    until(lambda: here[-1].asked(), 900)


def planned() -> dict[tuple[int, int, int], Callable[[], None]]:
    found = {}
    for part in filter(None, os.environ.get(PLAN, "").split(",")):
        attempt, rank, step, what = part.split(":")
        found[int(attempt), int(rank), int(step)] = globals()[what]
    return found


def run() -> None:
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or os.environ.get("SLURM_RESTART_COUNT", "0"))
    rank = int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID", "0"))
    plan = planned()
    training_batch = trainer.training_batch

    def disturbed(text: Any, config: Any, language: Any, step: int) -> Any:
        if (attempt, rank, step) in plan:
            plan[attempt, rank, step]()
        return training_batch(text, config, language, step)

    trainer.training_batch = disturbed
    signals.Interrupts = Noted  # takes notes
    sys.exit(main())


if __name__ == "__main__":
    run()
