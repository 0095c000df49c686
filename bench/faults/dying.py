"""Rows 1, 2, 10 and 11: processes that are killed, stopped or told to end."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

from safetensors.torch import load_file

from bench.faults.fault import Fault
from bench.faults.runs import Ended, Victim
from bench.faults.table import Checks, Outcome, Row
from penstock.checkpoint.find import damage, read_manifest, steps_in
from penstock.train.signals import SAME_REQUEST, ExitCode

KILLED_IN = ("F", "B", "reduction", "optimizer")
MESH: dict[str, object] = {"parallel.pp": 2, "parallel.dp": 2}
LONGER: dict[str, object] = {"train.batch": 32, "data.sequence": 256}
"""Two steps take longer than a save in the background then: one that is under way is lost with the process."""


def weights(run: Path) -> dict[str, bytes]:
    """Return a run's last weights, by name."""
    return {
        name: tensor.numpy().tobytes()
        for path in sorted(run.glob("model*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def redone(ended: Ended) -> int:
    """Return the largest number of steps that a restart had to repeat."""
    most = done = 0
    for event in ended.all("step"):
        if event["step"] <= done:
            most = max(most, done - event["step"] + 1)
        done = max(done, event["step"]) if event["step"] > done else event["step"]
    return most


def killed(root: Path, quick: bool) -> Outcome:
    """Row 1: two pipelines of two ranks, in four processes."""
    processes, settings = (2, LONGER) if quick else (4, MESH | LONGER)
    plain = weights(Victim(root=root / "plain", processes=processes, settings=settings).run().folder)
    checks, knows, again, most = Checks(), [], [], 0
    checks.that(bool(plain), "the undisturbed run has no weights")
    cases = [(1, "B")] if quick else [(rank, at) for at in KILLED_IN for rank in range(processes)]
    for rank, at in cases:
        case = f"rank {rank} in {at}"
        microbatch = 1 if at in "FB" else None
        fault = Fault(action="kill", at=at, rank=rank, microbatch=microbatch, step=7)
        ended = Victim(
            root=root / f"{rank}-{at}", fault=fault, processes=processes, restarts=3, settings=settings
        ).run(240.0)
        first = {event["pid"] for event in ended.all("start")[:processes]}
        told = [event for event in ended.all("end") if event["pid"] in first]
        steps = [event["time"] for event in ended.all("step") if event["pid"] not in first]
        checks.that(ended.code == 0, f"{case}: exit code {ended.code}: {ended.err[-300:]}")
        checks.that(bool(told), f"{case}: no other rank has told an error")
        checks.that(bool(steps), f"{case}: not trained again")
        if told and steps:
            knows.append(max(event["time"] for event in told) - ended.struck)
            again.append(min(steps) - ended.struck)
            checks.that(knows[-1] < 2.0, f"{case}: others knew after {knows[-1]:.1f} s")
            checks.that(again[-1] < 15.0, f"{case}: trained again after {again[-1]:.1f} s")
            said = " ".join(event["message"] for event in told)
            named = rf"(rank {rank}|process {rank} \([^)]*\)) has ended \(process id {ended.all('fault')[0]['pid']}\), "
            doing = rf"in op \d+{at}1 \(stage \d+, microbatch 1\) of step 7" if at in "FB" else ""
            checks.that(re.search(named + doing, said) is not None, f"{case} is not named: {said}")
        again_done = redone(ended)
        most = max(most, again_done)
        checks.that(again_done <= 5, f"{case}: {again_done} steps done again")
        checks.that(weights(ended.folder) == plain, f"{case}: other weights than the undisturbed run")
        checks.that(not ended.left, f"{case}: left running {ended.left}")
    return checks.outcome(
        f"{len(cases)} kills: others knew in {max(knows, default=0):.1f} s at most, training again in "
        f"{min(again, default=0):.1f}-{max(again, default=0):.1f} s, {most} step(s) redone, weights bit-equal, no orphan"
    )


def stopped(root: Path, quick: bool) -> Outcome:
    """Row 2: torchrun waits 30 s for a process that cannot end."""
    checks = Checks()
    fault = Fault(action="stop", at="F", rank=1, microbatch=2, step=3)
    limits = {"runtime.timeout": 5, "runtime.first_timeout": 60}
    ended = Victim(root=root, fault=fault, processes=2, settings=limits).run()
    took, others = ended.over - ended.struck, [event["time"] - ended.struck for event in ended.all("end")]
    checks.that(len(others) == 1 and others[0] < 8.0, f"the other rank ended after {others} s")
    checks.that(took < 45.0, f"torchrun ended after {took:.1f} s")
    checks.that(ended.code > 0, f"exit code {ended.code}")
    checks.that("most recent call first" in ended.err, "no stacks")
    checks.that("rank 1" in ended.err, "the stopped rank is not named")
    checks.that(not ended.left, f"left running {ended.left}")
    return checks.outcome(
        f"the other rank ended after {max(others, default=0):.1f} s, torchrun after {took:.1f} s, stacks printed"
    )


def terminated(root: Path, quick: bool) -> Outcome:
    """Row 10: the first rank is slow, so the other one almost always waits for it."""
    checks, told = Checks(), ""
    settings = {"train.steps": 100_000, "train.checkpoint_every": 0}
    fault = Fault(action="slow", at="F+B", rank=0, again=True)
    victim = Victim(root=root, fault=fault, processes=2, settings=settings).start()
    victim.until("step", step=7)
    began = time.time()
    victim.send(signal.SIGTERM)
    ended = victim.wait(120.0)
    took = ended.over - began
    last = max(event["step"] for event in ended.all("step"))
    saved = steps_in(ended.folder / "checkpoints")
    codes = [event["code"] for event in ended.all("exit")]
    checks.that(took < (100.0 if quick else 25.0), f"ended after {took:.1f} s")
    checks.that(codes == [ExitCode.STOPPED] * 2, f"exit codes {codes}: {ended.err[-3000:]}")
    # a colon as torchrun reports a worker that failed: its own traceback shows a line with the word alone
    checks.that(re.search(r"exitcode\s*:", ended.err) is None, ended.err[-3000:])
    checks.that(ended.code != 0, f"exit code {ended.code}")
    checks.that(bool(saved), "nothing saved")
    for step, path in saved[:1]:
        checks.that(last - step <= 1, f"step {step} saved of {last}")
        checks.that(not damage(path, read_manifest(path)), "the checkpoint is damaged")
        told = f"{took:.1f} s, exit codes {codes} ({ended.code}), step {step} of {last} saved"
    checks.that(not ended.left, f"left running {ended.left}")
    return checks.outcome(told)


def interrupted(root: Path, quick: bool) -> Outcome:
    """Row 11: both signals arrive within one long step."""
    checks = Checks()
    settings = {"train.steps": 100_000, "train.checkpoint_every": 3}
    victim = Victim(root=root, fault=Fault(action="hang", at="F", stage=1, step=8), settings=settings).start()
    victim.until("fault")
    before = steps_in(victim.folder / "checkpoints")
    victim.send(signal.SIGINT, group=True)
    victim.until_said("finishing this step")
    time.sleep(SAME_REQUEST + 0.3)  # before that it is a copy of the first
    began = time.time()
    victim.send(signal.SIGINT, group=True)
    ended = victim.wait(30.0)
    took = ended.over - began
    checks.that(took < (20.0 if quick else 1.0), f"out after {took:.1f} s")
    checks.that(ended.code in (130, -signal.SIGINT), f"exit code {ended.code}")
    checks.that(bool(before), "no checkpoint was there")
    after = steps_in(ended.folder / "checkpoints")  # one that was being saved in the background may have come
    checks.that(set(before) <= set(after), "a checkpoint is gone")
    for _, path in before:
        checks.that(not damage(path, read_manifest(path)), f"{path.name} is damaged")
    checks.that(not ended.left, f"left running {ended.left}")
    return checks.outcome(
        f"out {took:.2f} s after the second one, exit code {ended.code}, old checkpoints intact"
    )


ROWS = (
    Row(
        1,
        "kill -9 each rank in F, B, reduction, optimizer of step 7",
        "known < 2 s, again < 15 s, bit-equal",
        killed,
    ),
    Row(2, "SIGSTOP one rank, timeout 5 s", "the others end < 8 s, torchrun < 45 s, stacks printed", stopped),
    Row(
        10,
        "SIGTERM to the launcher mid-receive",
        "saved, documented code, < 25 s, <= 1 step lost",
        terminated,
    ),
    Row(11, "Ctrl-C twice", "out at once, old checkpoint intact", interrupted),
)
