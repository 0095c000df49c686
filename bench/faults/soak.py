"""Row 16, by hand: for half an hour a kill, a stop or a delay every 30 seconds, at random.

    python -m bench.faults.soak [--minutes 30] [--every 30] [--seed 0]

A clean run of the same length comes first, and says what the weights should be and how long the steps should take.
Goodput is that time over the time of the run with the faults, start and end included on both sides.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench.compare import emit, machine
from bench.faults.dying import weights
from bench.faults.runs import Ended, Victim

PROCESSES = 2
SETTINGS: dict[str, object] = {
    "model.width": 128,
    "model.hidden": 256,
    "data.sequence": 128,
    "runtime.timeout": 5,
    "train.checkpoint_every": 20,
    "train.log_every": 20,
    "train.eval_every": 1_000_000,
}
ACTIONS = ("kill", "stop", "delay")
DELAY = 2.0
"""Seconds: shorter than the timeout, so that a delay alone ends nothing."""


def calibrate(root: Path) -> float:
    """Seconds a step takes here."""
    ended = run(root, 60, None)
    times = [event["time"] for event in ended.all("step") if event["rank"] == 0]
    return float(times[-1] - times[20]) / (len(times) - 21)


def victim(root: Path, steps: int, restarts: int) -> Victim:
    """A run of so many steps."""
    return Victim(
        root, processes=PROCESSES, restarts=restarts, settings={**SETTINGS, "train.steps": steps}
    ).start()


def run(root: Path, steps: int, chance: random.Random | None, every: float = 30.0) -> Ended:
    """Run to the end, disturbed every so many seconds if there is a chance."""
    started = victim(root, steps, 3)
    if chance is None:
        return started.wait(7200.0)
    began, number = time.monotonic(), 0
    while started.running():
        number += 1
        while started.running() and time.monotonic() < began + number * every:
            time.sleep(0.1)
        strike(started, chance)
    return started.wait(600.0)


def strike(started: Victim, chance: random.Random) -> None:
    """One fault for one rank that is training, if any is."""
    action = chance.choice(ACTIONS)
    pids = {event["pid"]: event["rank"] for event in started.events() if event["what"] == "step"}
    living = [pid for pid in started.processes_left() if pid in pids]
    if not living:
        return
    pid = chance.choice(sorted(living))
    try:
        started.send(signal.SIGKILL if action == "kill" else signal.SIGSTOP, pid=pid)
        if action == "delay":
            time.sleep(DELAY)
            started.send(signal.SIGCONT, pid=pid)
    except ProcessLookupError:
        return
    started.note("fault", action=action, struck=pids[pid])


def soak(root: Path, minutes: float, every: float, seed: int) -> dict[str, Any]:
    """Run clean, then disturbed."""
    # Restarts and steps done again take time as well: about two thirds are left for steps.
    steps = int(40 * minutes / calibrate(root / "calibrated"))
    clean = run(root / "clean", steps, None)
    ended = run(root / "disturbed", steps, random.Random(seed), every)
    wanted, found = weights(clean.folder), weights(ended.folder)
    clean_seconds, seconds = clean.over - clean.began, ended.over - ended.began
    return {
        "steps": steps,
        "seconds": seconds,
        "clean seconds": clean_seconds,
        "goodput": clean_seconds / seconds,
        "faults": dict(Counter(event["action"] for event in ended.all("fault"))),
        "starts": sum(event["rank"] == 0 for event in ended.all("start")),
        "exit code": ended.code,
        "left running": list(ended.left),
        "weights bit-equal": bool(wanted) and wanted == found,
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=30.0, help="seconds from one fault to the next")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-soak-") as folder:
        found = soak(Path(folder), options.minutes, options.every, options.seed)
    emit({**found, "machine": machine()}, [*(f"{k}: {v}" for k, v in found.items()), machine()], options.json)
    sys.exit(0 if found["weights bit-equal"] and found["exit code"] == 0 and not found["left running"] else 1)


if __name__ == "__main__":
    main()
