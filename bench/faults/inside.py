"""Rows 3, 4, 5 and 9: a stage that raises, a thread that hangs, a slow rank, a NaN."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from bench.faults.fault import Fault
from bench.faults.runs import Ended, Victim
from bench.faults.table import Checks, Outcome, Row
from penstock.checkpoint.find import path_of, read_manifest
from penstock.train.signals import ExitCode


def told(ended: Ended) -> float:
    """Return seconds from the fault to the last process's error; infinite if a process reported none."""
    ends = ended.all("end")
    sound = ends and all(event["error"] for event in ends)
    return max(float(event["time"]) for event in ends) - ended.struck if sound else float("inf")


def raises(root: Path, quick: bool) -> Outcome:
    """Row 3."""
    checks, took = Checks(), []
    soon = 20.0 if quick else 1.0  # a test may share its cores
    for name, processes in (("thread", 0),) if quick else (("thread", 0), ("process", 2)):
        fault = Fault(action="raise", at="F", stage=1, microbatch=2, step=3)
        ended = Victim(root=root / name, fault=fault, processes=processes).run()
        took.append(f"{name} {told(ended):.2f} s")
        checks.that(told(ended) < soon, f"{name}: the error came after {told(ended):.2f} s")
        checks.that(ended.code == 1, f"{name}: exit code {ended.code}")
        checks.that(not ended.left, f"{name}: left running {ended.left}")
        said = (
            "rank 1, stage 1, microbatch 2, op 1F2 of step 3: RuntimeError: the stage's own code fails here"
        )
        checks.that(all(said in event["message"] for event in ended.all("end")), f"{name}: not named")
        checks.that(said in ended.err, f"{name}: not printed")
        checks.that('raise RuntimeError("the stage' in ended.err, f"{name}: no traceback of the stage's code")
    return checks.outcome(f"error on every rank after: {', '.join(took)}")


def hangs(root: Path, quick: bool) -> Outcome:
    """Row 4."""
    limits = {"runtime.timeout": 5, "runtime.first_timeout": 30}
    ended = Victim(
        root=root, fault=Fault(action="hang", at="F", stage=1, microbatch=2, step=3), settings=limits
    ).run()
    checks, took = Checks(), ended.over - ended.struck
    checks.that(took < 7.0, f"ended after {took:.1f} s")
    checks.that(ended.code > 0, f"exit code {ended.code}")
    checks.that("bench/faults/fault.py" in ended.err, "no stacks with the place that hangs")
    checks.that("1F2" in ended.err, "the op is not named")
    checks.that(not ended.left, f"left running {ended.left}")
    return checks.outcome(f"exit code {ended.code} after {took:.1f} s, stacks dumped")


def slow(root: Path, quick: bool) -> Outcome:
    """Row 5."""
    settings = {
        "runtime.timeout": 20 if quick else 5,
        "train.trace_every": 4,
        "model.width": 64,
        "model.hidden": 128,
    }
    checks = Checks()
    fault = Fault(action="slow", at="F+B", stage=1, again=True)
    ended = Victim(root=root, fault=fault, settings=settings).run()
    checks.that(ended.code == 0, f"exit code {ended.code}: {ended.err[-500:]}")
    command = [sys.executable, "-m", "penstock", "trace", str(ended.folder)]
    trace = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    named = re.search(r"Stage 1 takes [\d.]+ times the median", trace)
    checks.that(named is not None, f"penstock trace does not name it: {trace[:500]}")
    return checks.outcome(f"no alarm, exit code {ended.code}; penstock trace: {named and named.group()}")


def not_a_number(root: Path, quick: bool) -> Outcome:
    """Row 9."""
    checks = Checks()
    settings = {"train.checkpoint_every": 1, "train.keep_last": 0}
    ended = Victim(
        root=root,
        fault=Fault(action="nan", at="F", stage=1, microbatch=1, step=7),
        processes=0 if quick else 2,
        settings=settings,
    ).run()
    ends = ended.all("end")
    codes = {event["code"] for event in ended.all("exit")}
    checks.that(codes == {ExitCode.NOT_FINITE}, f"exit codes {codes}")
    checks.that({e["error"] for e in ends} == {"NonFiniteError"}, f"{[e['error'] for e in ends]}")
    checks.that(len({e["message"] for e in ends}) == 1, "ranks tell different things")
    checks.that(all("step 7: the loss of microbatch 1 is NaN" in e["message"] for e in ends), "not named")
    last = path_of(ended.folder / "checkpoints", 6)
    checks.that(read_manifest(last).step == 6, "the step before has no checkpoint")
    checks.that(not path_of(ended.folder / "checkpoints", 7).exists(), "the step itself has a checkpoint")
    return checks.outcome(
        f"{len(ends)} of {1 if quick else 2} processes stopped in {told(ended):.2f} s, alike; no step 7"
    )


ROWS = (
    Row(3, "a stage raises in a thread; in a process", "original traceback < 1 s, nothing left", raises),
    Row(4, "a thread hangs, watchdog 5 s", "exit < 7 s, not zero, stacks dumped", hangs),
    Row(5, "one rank 3 x slower", "no false alarm; the trace names it", slow),
    Row(
        9,
        "NaN in one microbatch on the last stage",
        "all stop before the optimizer, weights unchanged",
        not_a_number,
    ),
)
