"""A bench that is ended, however, leaves none of its processes running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.children import MARK, having
from tests.support.lanes import exhaustive, slow
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
RUNS = {
    "pool": ("bench.mesh", "--zero", "--steps", "100000"),
    "sessions": ("bench.faults", "--every", "30", "--minutes", "60"),
}


# Python's own end on Ctrl-C, and the guard's after SIGKILL, of processes in sessions of their own.
@pytest.mark.parametrize(
    ("name", "number"),
    [
        *slow(("pool", signal.SIGINT), ("sessions", signal.SIGKILL)),
        *exhaustive(("pool", signal.SIGKILL), ("sessions", signal.SIGINT)),
        *exhaustive(*((name, signal.SIGTERM) for name in RUNS)),
    ],
)
def test_with_the_bench_all_its_processes_end(name: str, number: signal.Signals, tmp_path: Path):
    mark = f"test-{os.getpid()}-{time.time_ns()}"
    environment = {
        **os.environ,
        MARK: f"{os.environ.get(MARK, '')}/{mark}".strip("/"),
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
    }
    with subprocess.Popen(
        [sys.executable, "-m", *RUNS[name]], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as bench:  # fmt: skip
        try:
            until(lambda: len(having(MARK, mark)) >= 3, 120.0)  # with the bench's own
            bench.send_signal(number)
            assert bench.wait(60.0) != 0
        finally:
            bench.kill()
    until(lambda: not having(MARK, mark), 30.0)
