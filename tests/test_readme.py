"""The README is short, its code runs as it is printed, and what it names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
(CODE,) = re.findall(r"^```python\n(.*?)^```", README, re.S | re.M)


def test_its_code_trains_as_plain_torch_does(capsys: pytest.CaptureFixture[str]):
    torch.manual_seed(0)
    names: dict[str, object] = {}
    exec(compile(CODE, "README.md", "exec"), names)
    torch.manual_seed(0)
    before, _, _ = CODE.partition("with penstock.Pipeline")
    plain: dict = {}
    exec(compile(before, "README.md", "exec"), plain)
    model, lines = plain["model"], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for x, y in plain["batches"]:
        losses = [
            torch.nn.functional.mse_loss(model(a), b) / 16
            for a, b in zip(x.split(2), y.split(2), strict=True)
        ]
        for loss in losses:
            loss.backward()
        lines.append(str(torch.stack(losses).detach().sum()))
        optimizer.step()
        optimizer.zero_grad()
    assert capsys.readouterr().out.splitlines() == lines
    assert all(
        torch.equal(ours, theirs)
        for ours, theirs in zip(names["model"].parameters(), model.parameters(), strict=True)
    )


def test_it_has_at_most_600_words_and_what_it_names_is_there():
    links = re.findall(r"\]\(([^)#]+)", README)
    assert len(links) > 10
    assert [link for link in links if not link.startswith("https://") and not (ROOT / link).exists()] == []
    commands = re.findall(r"^    make (\w+) ", README, re.M)
    assert commands == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{command}:", makefile, re.M) for command in commands)
    assert len(README.split()) <= 600


def test_its_figures_are_those_of_the_results():
    results = (ROOT / "bench" / "RESULTS.md").read_text()
    rows = re.findall(r"^\| .*\*\*([\d.]+)%?\*\* .*`python -m (bench\.\w+)` \|$", README, re.M)
    assert len(rows) == 5
    for figure, command in rows:
        measured = [
            line for line in results.splitlines() if f"`python -m {command}" in line and figure in line
        ]
        assert measured, f"{figure} of {command} is not in the summary of the results"
