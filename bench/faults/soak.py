"""Row 16, run by hand: for half an hour, a random kill, stop or delay every 30 seconds.

    python -m bench.faults.soak [--minutes 30] [--every 30] [--seed 0] [--keep FOLDER] [--quick] [--json]

A clean run of the same length comes first, and gives the expected weights. With --keep its folder stays, and the next call
uses that clean run. Goodput is the undisturbed time of the run's steps (the median of its own times between two saves)
divided by the whole time, start and end included.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench.compare import Figures, main
from bench.faults.dying import weights
from bench.faults.runs import Ended, Victim
from penstock.train.config.file import load

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
QUICK_STEPS, QUICK_FAULTS, QUICK_EVERY, QUICK_SEQUENCE = 60, 2, 0.5, 32
"""With ``--quick``: small steps and few faults."""

DELAY = 2.0
"""Seconds: shorter than the timeout, so that a delay alone ends nothing."""


def calibrate(root: Path) -> float:
    """Return the seconds of a step on this machine."""
    ended = run(root, 60)
    times = [event["time"] for event in ended.all("step") if event["rank"] == 0]
    return float(times[-1] - times[20]) / (len(times) - 21)


def victim(root: Path, steps: int, quick: bool) -> Victim:
    """Return a run of so many steps."""
    settings = {**SETTINGS, "train.steps": steps} | ({"data.sequence": QUICK_SEQUENCE} if quick else {})
    return Victim(root=root, processes=PROCESSES, restarts=1000, settings=settings).start()


def run(
    root: Path, steps: int, chance: random.Random | None = None, every: float = 30.0, quick: bool = False
) -> Ended:
    """Run to the end, with a fault every so many seconds if possible."""
    faults = QUICK_FAULTS if quick else math.inf
    started = victim(root, steps, quick)
    if chance is None:
        return started.wait(7200.0)
    began, number, struck = time.monotonic(), 0, 0
    while started.running() and struck < faults:
        number += 1
        while started.running() and time.monotonic() < began + number * every:
            time.sleep(0.1)
        struck += strike(started, chance, steps)
    return started.wait(7200.0)


def strike(started: Victim, chance: random.Random, steps: int) -> bool:
    """Inject one fault into one rank that is training, and return whether there was such a rank.

    After the last step the run is complete, and starting it again is refused.
    """
    events = started.events()
    done = [event for event in events if event["what"] == "step"]
    if any(event["step"] >= steps - 1 for event in done):
        return False
    # A rank that is killed or stopped ends all of them. Until they train again, another fault would hide that one.
    ends = [event["time"] for event in events if event["what"] == "fault" and event["action"] != "delay"]
    began = {event["pid"]: event["time"] for event in reversed(done)}
    if ends and max(began.values()) < ends[-1]:
        return False
    pids = {event["pid"]: event["rank"] for event in done}
    living = [pid for pid in started.processes_left() if pid in pids]
    if not living:
        return False
    action, pid = chance.choice(ACTIONS), chance.choice(sorted(living))
    try:
        started.send(signal.SIGKILL if action == "kill" else signal.SIGSTOP, pid=pid)
        if action == "delay":
            time.sleep(DELAY)
            started.send(signal.SIGCONT, pid=pid)
    except ProcessLookupError:
        return False
    started.note("fault", action=action, struck=pids[pid])
    return True


def seconds_a_step(ended: Ended) -> float:
    """Return the median over all undisturbed times between two saves of one process."""
    between, spans = int(str(SETTINGS["train.checkpoint_every"])), []
    for pid in {event["pid"] for event in ended.all("step")}:
        times = {e["step"]: e["time"] for e in ended.all("step") if e["pid"] == pid}
        spans += [times[n + between] - times[n] for n in times if n % between == 0 and n + between in times]
    return statistics.median(spans) / between


def clean_run(root: Path, minutes: float, quick: bool) -> tuple[int, dict[str, bytes]]:
    """Return the number of steps of a clean run, and its weights; an existing clean run is reused."""
    folder = root / "clean" / "runs" / "run"
    if not (found := weights(folder)):
        # Restarts and steps done again take time as well: about two thirds are left for steps.
        steps = QUICK_STEPS if quick else int(40 * minutes / calibrate(root / "calibrated"))
        found = weights(run(root / "clean", steps, quick=quick).folder)
    return load(folder / "config.toml").train.steps, found


def soak(root: Path, minutes: float, every: float, seed: int, quick: bool) -> dict[str, Any]:
    """Run clean, then disturbed."""
    steps, wanted = clean_run(root, minutes, quick)
    shutil.rmtree(root / "disturbed", ignore_errors=True)
    ended = run(root / "disturbed", steps, random.Random(seed), every, quick)
    found, seconds, each = weights(ended.folder), ended.over - ended.began, seconds_a_step(ended)
    return {
        "steps": steps,
        "seconds": seconds,
        "seconds per step": each,
        "goodput": steps * each / seconds,
        "faults": dict(Counter(event["action"] for event in ended.all("fault"))),
        "starts": sum(event["rank"] == 0 for event in ended.all("start")),
        "exit code": ended.code,
        "left running": list(ended.left),
        "weights bit-equal": bool(wanted) and wanted == found,
    }


def measure(options: argparse.Namespace) -> Figures:
    """Run clean, then disturbed."""
    every = options.every or (QUICK_EVERY if options.quick else 30.0)
    with contextlib.ExitStack() as stack:
        folder = options.keep or stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-soak-"))
        result = soak(Path(folder), options.minutes, every, options.seed, options.quick)
    for name, value in result.items():
        yield f"{name}: {value}"
    return result


def add(parser: argparse.ArgumentParser) -> None:
    """Add this bench's arguments."""
    parser.add_argument("--minutes", type=float, default=30.0, help="minutes of the disturbed run")
    parser.add_argument("--every", type=float, help="seconds from one fault to the next (default 30)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for the runs, which stays")


if __name__ == "__main__":
    found = main(measure, __doc__, add=add)
    sys.exit(0 if found["weights bit-equal"] and found["exit code"] == 0 and not found["left running"] else 1)
