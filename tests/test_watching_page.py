"""docs/watching.md: its commands and code run as printed; the table of docs/reference/metrics.md is that of real lines."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest
import torch

from penstock.train.config.file import dump
from tests.support.commands import python
from tests.support.tiny_run import text_folder, tiny

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "watching.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.S | re.M)


def test_the_table_has_every_field_of_real_lines_and_no_other(tmp_path: Path):
    table = dict(
        re.findall(r"^\| `(\w+)` \| ([^|]*) \|", (DOCS / "reference" / "metrics.md").read_text(), re.M)
    )
    documented = {
        name: {"train", "held_out", "skipped", "final"}
        if kinds == "all"
        else set(re.findall(r"\b(?:train|held_out|skipped|final)\b", kinds))
        for name, kinds in table.items()
    }
    seen: dict[str, set[str]] = {}
    for line in lines_of_a_run_with_a_bad_step(tmp_path):
        for name in line:
            seen.setdefault(name, set()).add(line["kind"])
    # On GPUs alone, and of tests/train/test_meshes.py.
    for name in ("cuda_allocated", "cuda_peak", "expert_imbalance", "expert_tokens", "exchange_seconds"):
        assert documented.pop(name) == {"train"}
    assert seen == documented


def lines_of_a_run_with_a_bad_step(tmp_path: Path) -> list[dict[str, object]]:
    """The first step's loss is infinite: a weight is set to it, and put back."""
    from penstock.train import loop
    from penstock.train.run_log import Reporter

    build, spoiled = loop.build_pipeline, []

    def built(*arguments):
        pipe = build(*arguments)
        step = pipe.step

        def spoil(*values, **named):
            parameter = next(pipe.parameters())
            before = parameter.detach().clone()
            if not spoiled:
                parameter.data.fill_(torch.inf)
                spoiled.append(True)
            try:
                return step(*values, **named)
            finally:
                parameter.data.copy_(before)

        pipe.step = spoil
        return pipe

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "build_pipeline", built)
        config = tiny(tmp_path, text_folder(tmp_path), train={"skip_nonfinite": 1})
        loop.train(config, lambda steps, leads: Reporter())
    assert spoiled
    text = (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.slow
def test_its_commands_and_code_run_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    config = tiny(tmp_path, text_folder(tmp_path), train={"name": "", "folder": "runs", "report": True})
    (tmp_path / "my.toml").write_text(dump(config))
    example = next(code for code in blocks("python") if "class Notify" in code)
    assert len([line for line in example.splitlines() if line.strip()]) <= 15
    (tmp_path / "my_hooks.py").write_text(example)
    commands = [line for block in blocks("sh") for line in block.splitlines()]
    assert len(commands) == 2
    for line in commands:
        done = python(["-m", *shlex.split(line)], tmp_path, os.environ | {"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr
    names: dict[str, object] = {"__name__": "a_page"}
    for block in blocks("python"):
        exec(compile(block, "watching.md", "exec"), names)
    assert (tmp_path / "runs" / "first" / "report.html").exists()
    notes = (tmp_path / "runs" / "noted" / "notes.txt").read_text().splitlines()
    assert notes[0].startswith("step 3: ")
    assert notes[-1] == "done after step 3"
    assert (tmp_path / "own-run" / "notes.txt").read_text() == "done after step 3\n"
