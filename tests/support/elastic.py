"""``python -m tests.support.elastic NOTES train ...``: the command, on hosts that come and go.

Each process notes its batches in the folder NOTES. In a world of three, the last rank's host is lost once, with its process
and its agent. A smaller world than four waits after some steps, for what joins it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from penstock.cli import main
from penstock.train import auto_plan, signals, trainer
from tests.support.victim import Noted, until_asked

FULL = 4
"""Ranks of the last world."""
STEPS = 4
"""Steps of a world before something happens to it."""


def digest_of(batch: Any) -> str:
    """Return a digest of the samples of a batch, and of their order."""
    return sha256(batch.x.numpy().tobytes()).hexdigest()


def run(notes: Path) -> None:
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    training_batch, lost = trainer.training_batch, notes / "lost"
    taken: list[int] = []

    def noted(data: Any, config: Any, model: Any, step: int) -> Any:
        batch = training_batch(data, config, model, step)
        taken.append(step)
        line = {"world": world, "rank": rank, "batch": step, "digest": digest_of(batch)}
        with (notes / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        if len(taken) == STEPS and world == 3 and not lost.exists():
            if rank == 2:
                lost.touch()
                os.kill(os.getppid(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
        elif len(taken) == STEPS and world < FULL and rank == 0:
            (notes / f"waiting-in-a-world-of-{world}").touch()
            until_asked()
        return batch

    trainer.training_batch = noted
    signals.Interrupts = Noted  # takes notes
    # What is measured need not be steady.
    auto_plan._SECONDS = 0.2
    auto_plan.measure_cluster = partial(auto_plan.measure_cluster, rounds=3)
    sys.exit(main())


if __name__ == "__main__":
    folder = Path(sys.argv.pop(1))
    run(folder)
