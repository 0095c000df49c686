"""Files and commands of the page on data run as they are printed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli import group
from tests.support import hf_folders

PAGE = Path(__file__).parents[1] / "docs" / "data.md"
SHORT = ["train.steps=2", "train.batch=8", "train.eval_batches=1", "train.report=false", "sample.length=4"]


@pytest.mark.slow
def test_the_files_and_commands_of_the_page_run_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    hf_folders.of_bytes(tmp_path).rename("my-llama")
    names: dict[str, object] = {"__name__": "a_page"}
    ran = 0
    for kind, block in re.findall(r"^```(python|sh)\n(.*?)^```", PAGE.read_text(), re.S | re.M):
        if kind == "python":
            exec(compile(block, "data.md", "exec"), names)
        for line in block.splitlines() if kind == "sh" else []:
            program, *arguments = shlex.split(line)
            assert program == "penstock"
            trains = arguments[0] == "train"
            named = any(argument.startswith("train.name=") for argument in arguments)
            more = [*SHORT, *([] if named else [f"train.name=run-{ran}"])] if trains else []
            result = CliRunner().invoke(group, [*arguments, *more], catch_exceptions=False)
            assert result.exit_code == 0, (line, result.output)
            assert "bits/" in result.output or "bits_per_byte" in result.output, line
            ran += 1
    assert ran == 7
