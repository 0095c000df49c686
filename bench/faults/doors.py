"""Rows 13 and 14: files that are read, and sockets that others could connect to."""

from __future__ import annotations

import ipaddress
import subprocess
import sys
from pathlib import Path

from tests.support.listening import listening

from bench.faults.fault import Fault
from bench.faults.runs import Victim
from bench.faults.table import Checks, Outcome, Row


def sockets(root: Path, quick: bool) -> Outcome:
    """Row 14: list the sockets while a rank hangs for a moment in the middle of a step."""
    checks, seen = Checks(), []
    for name, processes in (("threads", 0), ("processes", 2)):
        fault = Fault(action="slow", at="F+B", again=True)
        settings = {"train.steps": 10_000}
        victim = Victim(root=root / name, fault=fault, processes=processes, settings=settings).start()
        try:
            victim.until("step", step=3)
            ranks = {
                event["pid"] for event in victim.events()
            }  # torchrun's own store listens on all interfaces
            found = {address for pid in ranks for address in listening(pid)}
        finally:
            victim.kill()
        beyond = {address for address in found if not ipaddress.ip_address(address).is_loopback}
        checks.that(not beyond, f"{name} listen on {sorted(beyond)}")
        seen.append(f"{name}: {', '.join(sorted(found)) or 'none'}")
    return checks.outcome("; ".join(seen))


def malformed(root: Path, quick: bool) -> Outcome:
    """Row 13."""
    count = 200 if quick else 10_000
    done = subprocess.run(
        [sys.executable, "-m", "bench.faults.fuzz", "--count", str(count)],
        capture_output=True, text=True, timeout=7200,
    )  # fmt: skip
    checks = Checks()
    checks.that(done.returncode == 0, (done.stdout + done.stderr)[-2000:])
    return checks.outcome(" / ".join(done.stdout.strip().splitlines()))


ROWS = (
    Row(
        13,
        "malicious or malformed config, data, schedule, checkpoint, trace",
        "clear error or success",
        malformed,
    ),
    Row(14, "listening sockets of the ranks of a local run", "none beyond loopback", sockets),
)
