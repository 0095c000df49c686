"""Parts of the exhaustive tests: each case is in one of them, and CI can draw each."""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import is_in_part, part_of

ROOT = Path(__file__).parents[2]


def test_every_case_is_in_one_part_and_parts_are_of_one_size():
    names = [f"tests/zoo/test_zoo.py::test_threads[seed {seed}]" for seed in range(600)]
    each = [sum(is_in_part(name, part, 6) for part in range(6)) for name in names]
    assert each == [1] * len(names)
    assert all(70 < sum(is_in_part(name, part, 6) for name in names) < 130 for part in range(6))


@pytest.mark.parametrize("commit", ["0000006", "0000007", "fffffff"])
def test_the_commit_chooses_a_part(commit: str):
    (chosen,) = re.findall(r"^part=(.*)$", (ROOT / ".ci" / "run").read_text(), re.M)
    script = f"git() {{ echo {commit}; }}; echo {chosen}"
    told = subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True).stdout.strip()
    assert part_of(told) == (int(commit, 16) % 6, 6)


@pytest.mark.parametrize("text", ["6/6", "1", "-1/6", "a/b"])
def test_a_part_that_does_not_exist_is_refused(text: str):
    with pytest.raises(argparse.ArgumentTypeError, match="must be N/M with N from 0 to M - 1"):
        part_of(text)
