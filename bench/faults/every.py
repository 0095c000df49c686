"""A run that meets a fault every so many seconds and goes on: ``python -m bench.faults --every 15``.

Two processes train under torchrun until the time is up. What ends torchrun itself is started again with the same command, as
Slurm and Kubernetes do. A run without faults of as many steps follows, and gives the expected weights.
"""

from __future__ import annotations

import math
import os
import random
import resource
import signal
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.faults.dying import weights
from bench.faults.runs import Ended, Victim
from penstock.checkpoint.find import is_whole, steps_in

PROCESSES = 2
SAVES = 10
SETTINGS: dict[str, object] = {
    "model.width": 128,
    "model.hidden": 256,
    "data.sequence": 128,
    # The learning rate must not depend on how many steps there will be.
    "optim.lr_schedule": "constant",
    "optim.warmup": 0.0,
    "runtime.timeout": 5,
    "train.steps": 1_000_000,
    "train.checkpoint_every": SAVES,
    "train.log_every": 20,
    "train.eval_every": 1_000_000,
}
KINDS = {
    "process": "SIGKILL of one rank; torchrun starts all again",
    "host": "SIGKILL of torchrun and its ranks; started again",
    "terminate": "SIGTERM to torchrun; the run saves, and is started again",
    "frozen": "SIGSTOP of one rank for good; torchrun ends it after 30 s",
    "pause": "SIGSTOP of one rank for 2 s, within the timeout of 5 s",
    "disk": "no file may grow beyond 2 MB until a save has failed",
}
ENDING = ("process", "host", "terminate", "frozen")
"""Kinds after which all ranks start again."""
PAUSE = 2.0  # seconds
ROOM = 2_000_000  # bytes: less than a stage's part of a checkpoint, more than a diary
QUICK_FAULTS, QUICK_EVERY, QUICK_SEQUENCE = 2, 1.0, 32
"""With ``--quick``: small steps and few faults."""


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """Options of a disturbed run; `seconds` and `every` are seconds."""

    every: float
    seconds: float
    faults: float = math.inf
    seed: int = 0
    settings: Mapping[str, object]


class Supervised:
    """A run that is started again whenever torchrun has ended."""

    def __init__(self, root: Path, settings: Mapping[str, object]) -> None:
        self.root, self._settings = root, settings
        self.victim = self.start()

    def start(self, **settings: object) -> Victim:
        """Start torchrun with the run's command, and changes of its settings."""
        self.victim = Victim(
            root=self.root, processes=PROCESSES, restarts=1000, settings={**self._settings, **settings}
        ).start()
        return self.victim

    def training(self) -> Sequence[int]:
        """Return the process ids of the ranks if all have done a step since the last fault that ended them, else none."""
        events = self.victim.events()
        ends = [event["time"] for event in events if event["what"] == "fault" and event["kind"] in ENDING]
        since = ends[-1] if ends else 0.0
        done = {event["pid"] for event in events if event["what"] == "step" and event["time"] > since}
        living = sorted(done.intersection(self.victim.processes_left()))
        return living if len(living) == PROCESSES else ()

    def strike(self, kind: str, chance: random.Random, pids: Sequence[int]) -> None:
        """Inject a fault into ranks that are training.

        Raises:
            ProcessLookupError: if the rank has ended meanwhile.
        """
        victim, one = self.victim, chance.choice(pids)
        victim.note("fault", kind=kind)
        if kind == "process":
            os.kill(one, signal.SIGKILL)
        elif kind == "host":
            victim.kill()
        elif kind == "terminate":
            victim.send(signal.SIGTERM)
            victim.wait(120.0)
        elif kind == "disk":
            room = [(pid, resource.prlimit(pid, resource.RLIMIT_FSIZE)) for pid in pids]
            for pid, (_, most) in room:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (ROOM, most))
            refused = self._refused()
            while self._refused() == refused and victim.running():
                time.sleep(0.1)
            for pid, limits in room:
                with suppress(ProcessLookupError):
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
        else:
            os.kill(one, signal.SIGSTOP)
            if kind == "pause":
                time.sleep(PAUSE)
                os.kill(one, signal.SIGCONT)

    def _refused(self) -> int:
        """Return the number of saves that failed, by what the run has said since torchrun was started."""
        said = [(self.root / name).read_text("utf-8", "replace") for name in ("out", "err")]
        return sum(text.count("no checkpoint was written") for text in said)

    def stop(self) -> Ended:
        """Stop the run once it trains, with its state saved."""
        while not self.training():
            if not self.victim.running():
                self.start()
            time.sleep(0.1)
        self.victim.send(signal.SIGTERM)
        return self.victim.wait(120.0)


def disturbed(root: Path, options: Disturbance) -> tuple[Ended, float]:
    """Train with faults until the time is up; return the run with its last weights, and the seconds that it trained.

    A fault is left out where the ranks are not training: it would only hide the one before. All kinds come once, in random
    order, before any comes again.
    """
    chance, run = random.Random(options.seed), Supervised(root, options.settings)
    kinds: list[str] = []
    began, ticks, struck = time.monotonic(), 0, 0
    while time.monotonic() < began + options.seconds and struck < options.faults:
        if not run.victim.running():
            run.start()
        elif time.monotonic() >= began + (ticks + 1) * options.every:
            ticks = int((time.monotonic() - began) / options.every)
            if pids := run.training():
                kinds = kinds or chance.sample(list(KINDS), len(KINDS))
                with suppress(ProcessLookupError):
                    run.strike(kinds.pop(), chance, pids)
                    struck += 1
        time.sleep(0.1)
    stopped = run.stop()
    took = time.monotonic() - began
    saved = next((step for step, path in steps_in(stopped.folder / "checkpoints") if is_whole(path)), 0)
    # All steps are done then: the weights are written.
    return run.start(**{"train.steps": saved}).wait(240.0), took


def seconds_a_step(ended: Ended) -> float:
    """Return the median time between two steps of one start, which no fault has lengthened."""
    spans = []
    for pid in {event["pid"] for event in ended.all("step")}:
        times = [event["time"] for event in ended.all("step") if event["pid"] == pid]
        spans += [after - before for before, after in pairwise(times)]
    return statistics.median(spans)


def seconds_lost(ended: Ended) -> dict[str, list[float]]:
    """Return for each kind of fault the seconds to the next step of a rank, for those that ended all ranks."""
    lost: dict[str, list[float]] = {kind: [] for kind in KINDS}
    steps = [event["time"] for event in ended.all("step")]
    starts = [event["time"] for event in ended.all("start")]
    for fault in ended.all("fault"):
        # A rank that is not the one struck may still end a step, so look from the next start on.
        since = (
            next((at for at in starts if at > fault["time"]), math.inf)
            if fault["kind"] in ENDING
            else fault["time"]
        )
        after = next((at for at in steps if at > since), math.nan)
        lost[fault["kind"]].append(after - fault["time"])
    return lost


def soak(root: Path, options: Disturbance) -> dict[str, Any]:
    """Run disturbed, then as many steps without faults."""
    ended, seconds = disturbed(root / "disturbed", options)
    done = [event["step"] for event in ended.all("step") if event["rank"] == 0]
    steps, each, lost = len(set(done)), seconds_a_step(ended), seconds_lost(ended)
    settings = {**options.settings, "train.steps": steps}
    clean = Victim(root=root / "clean", processes=PROCESSES, settings=settings).run(7200.0)
    found, expected = weights(ended.folder), weights(clean.folder)
    return {
        "share of progress": steps * each / seconds,
        "seconds": seconds,
        "steps": steps,
        "seconds per step": each,
        "steps redone": len(done) - steps,
        "starts": sum(event["rank"] == 0 for event in ended.all("start")) - 1,
        "faults": {kind: len(each) for kind, each in lost.items()},
        "seconds lost": {kind: statistics.median(each) for kind, each in lost.items() if each},
        "exit codes": [ended.code, clean.code],
        "left running": [*ended.left, *clean.left],
        "weights bit-equal": bool(expected) and found == expected,
    }


def table(result: Mapping[str, Any], options: Disturbance) -> list[str]:
    """Return the lines of the table."""
    lines = [
        f"a fault every {options.every:g} s, seed {options.seed}; {PROCESSES} processes, a checkpoint every {SAVES} steps",
        f"{'kind':<10} {'faults':>6}  {'next step after':>15}",
    ]
    for kind, count in result["faults"].items():
        after = result["seconds lost"].get(kind)
        lines.append(f"{kind:<10} {count:>6}  {'' if after is None else f'{after:.1f} s':>15}  {KINDS[kind]}")
    lines += [
        f"progress: {result['share of progress']:.1%} of {result['seconds']:.0f} s, {result['steps']:,} steps of "
        f"{result['seconds per step']:.4f} s",
        f"steps redone: {result['steps redone']}",
        f"starts: {result['starts']}",
        f"weights bit-equal to a run without faults: {result['weights bit-equal']}",
    ]
    return lines


def passed(result: Mapping[str, Any]) -> bool:
    """Return whether both runs ended well, left nothing running and have the same weights."""
    return bool(result["weights bit-equal"]) and not any(result["exit codes"]) and not result["left running"]


def disturbance(every: float, minutes: float, seed: int, quick: bool) -> Disturbance:
    """Return the options of the command line."""
    settings = SETTINGS | ({"data.sequence": QUICK_SEQUENCE} if quick else {})
    if quick:
        return Disturbance(
            every=QUICK_EVERY, seconds=math.inf, faults=QUICK_FAULTS, seed=seed, settings=settings
        )
    return Disturbance(every=every, seconds=60 * minutes, seed=seed, settings=settings)
