"""The bench of a GPU: without one it says what it needs, and no part of it stops the others."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import pytest
import torch
from bench.compare import printed

from bench import gpu
from tests.support.commands import python

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
WAITS = "import signal; signal.pause()"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_card_one_line_says_what_it_needs(capfd: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        printed(gpu.measure(argparse.Namespace(device="cuda", only=None, limit=600.0)), quiet=True)
    assert ended.value.code == 2
    assert capfd.readouterr() == (
        "",
        "bench.gpu needs a CUDA device, and torch sees none; python -m bench.gpu --device cpu runs what a CPU can\n",
    )


def test_a_part_that_fails_or_hangs_does_not_stop_the_rest(monkeypatch: pytest.MonkeyPatch):
    # The one that hangs has started another process, which holds its output open.
    hangs = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {WAITS!r}]).wait()"
    programs = {"fails": "raise SystemExit('broken')", "hangs": hangs, "passes": "print('a table')"}
    shares = {"fails": 0.5, "hangs": 0.005, "passes": 0.5}
    monkeypatch.setattr(gpu, "PARTS", {name: gpu.Part((), share) for name, share in shares.items()})
    monkeypatch.setattr(gpu, "command_of", lambda name, device: [sys.executable, "-c", programs[name]])
    found = printed(gpu.measure(argparse.Namespace(device="cpu", only=None, limit=600.0)), quiet=True)
    results = {name: part["result"] for name, part in found["parts"].items()}
    assert results == {"fails": "failed", "hangs": "out of time", "passes": "passed"}
    assert found["failed"] == ["fails", "hangs"]
    assert found["parts"]["fails"]["lines"] == ["broken"]
    assert found["parts"]["passes"]["lines"] == ["a table"]


def test_the_files_of_the_tests_are_those_with_the_mark():
    files = gpu.files_of_tests()
    assert {"tests/runtime/test_gpu.py", "tests/parallel/test_gpu.py"} <= set(files)


@pytest.mark.exhaustive
def test_on_a_cpu_every_part_of_its_own_runs():
    # The others are benches, which tests/bench/test_commands.py runs.
    own = [name for name, part in gpu.PARTS.items() if "bench.gpu_parts" in part.command]
    words = ["-m", "bench.gpu", "--device", "cpu", *(f"--only={part}" for part in own), "--limit", "6000"]
    done = python(words, ROOT, ENVIRONMENT, seconds=3000)
    lines = done.stdout.splitlines()
    for part in own:
        assert any(line.startswith(f"| {part} | passed | ") for line in lines), done.stdout[-6000:]
    assert "failed: none" in lines
