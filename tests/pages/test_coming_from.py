"""The pages on coming from another tool: their programs print the same losses, and every name of ours in them exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.page import Reader


def losses(output: str) -> list[str]:
    return re.findall(r"^loss (\S+)", output, re.M)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["torch_pipelining.md"])
def test_both_programs_of_a_page_print_the_same_losses(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    reader = Reader(tmp_path)
    reader.follow(f"coming_from/{page}")
    printed = [losses(output) for command, output in reader.outputs.items() if ".py" in command]
    assert len(printed) >= 2 and printed[0]
    assert all(other == printed[0] for other in printed)
