"""What the tests themselves do where a test ends its process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_test_that_ends_its_worker_fails_by_name_once_and_all_others_run(tmp_path: Path):
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_xdist_make_scheduler\n")
    for number in range(8):
        (tmp_path / f"test_{number}.py").write_text("def test_one(): pass\ndef test_two(): pass\n")
    ends = "import os\ndef test_before(): pass\ndef test_ends(): os._exit(1)\ndef test_after(): pass\n"
    (tmp_path / "test_3.py").write_text(ends)
    (tmp_path / "test_7.py").write_text(ends)
    words = (
        "-n",
        "2",
        "--dist",
        "loadfile",
        "--no-loadscope-reorder",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        tmp_path,
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *words, tmp_path],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"},
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert re.search("^2 failed, 16 passed in ", done.stdout, re.M), done.stdout + done.stderr
    failed = re.findall(r"^FAILED .*?(test_\d\.py::\w+)", done.stdout, re.M)
    assert sorted(failed) == ["test_3.py::test_ends", "test_7.py::test_ends"]
