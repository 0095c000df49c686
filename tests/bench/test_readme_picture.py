"""The picture of the README is what its command draws."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from bench.readme_picture import FOLDER, write


def test_the_picture_is_drawn_again_with_the_same_words_and_bars(tmp_path: Path):
    pytest.importorskip("matplotlib")
    drawn, kept = ((folder / "timeline.svg").read_text() for folder in (write(tmp_path).parent, FOLDER))
    for pattern in (r"<text [^>]*>([^<]*)</text>", r"fill: #\w+"):
        assert re.findall(pattern, drawn) == re.findall(pattern, kept)
    assert "stage after stage" in drawn
