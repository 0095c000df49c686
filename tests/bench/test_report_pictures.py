"""The pictures of the guide to the report are drawn from any two runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import python
from tests.support.measured import kept_run
from tests.support.programs import give_up

pytest.importorskip("selenium")

from tests.support.browser import missing

pytestmark = pytest.mark.exhaustive
ROOT = Path(__file__).parents[2]


def test_both_pictures_are_drawn_and_small(tmp_path: Path):
    if reason := missing():
        give_up(reason)
    runs = [str(kept_run(tmp_path, name)) for name in ("first", "second")]
    words = ["-m", "bench.report_pictures", *runs, "--folder", str(tmp_path / "pictures")]
    done = python(words, ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    for name in ("page.png", "compare.png"):
        content = (tmp_path / "pictures" / name).read_bytes()
        assert content.startswith(b"\x89PNG")
        assert 5_000 < len(content) < 300_000
