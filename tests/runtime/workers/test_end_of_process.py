"""The end of a process: no thread of a communicator is left when the interpreter ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.runtime.start.meeting import STORE
from tests.support.lanes import exhaustive

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


def run_processes(words: list[str], folder: Path, processes: int = 2) -> list[tuple[int, str]]:
    """Return exit codes and outputs of processes that meet through a file."""
    environment = {**os.environ, STORE: str(folder / "store"), "WORLD_SIZE": str(processes)}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.ends_as_it_is", *words],
            cwd=ROOT,
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(processes)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in started]
    return [(process.returncode, output) for process, output in zip(started, outputs, strict=True)]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    ("state", "axes"),
    [("open", ["dp=2"]), ("closed", ["pp=2"]), *exhaustive(("open", ["pp=2"]), ("closed", ["dp=2"]))],
)
def test_no_thread_of_gloo_is_left_at_the_end(state: str, axes: list[str], tmp_path: Path):
    # One that drops a tensor while the interpreter ends would abort the process.
    for code, output in run_processes([state, *axes], tmp_path):
        assert code == 0, output
        assert "threads of gloo: 0" in output


@pytest.mark.parametrize("start", exhaustive(*range(12)))
def test_processes_end_with_0_while_the_machine_is_busy(start: int, tmp_path: Path):
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        results = run_processes([("open", "closed")[start % 2], "pp=2"], tmp_path)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert [code for code, _ in results] == [0, 0], results
