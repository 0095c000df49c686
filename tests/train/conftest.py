"""Runs without the drawing of their page, which takes nine tenths of a small one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.atomic import write_text

DRAWN = "tests.train.report.test_traces"
"""The module whose runs end with a page that is drawn."""


def page_of_one_line(run: Any, path: Path) -> Path:
    write_text(path, f"<title>{run.title}</title>\n")
    return path


@pytest.fixture(scope="module", autouse=True)
def pages(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.module.__name__ != DRAWN:
            patch.setattr("penstock.train.report.traces.write_report", page_of_one_line)
        yield
