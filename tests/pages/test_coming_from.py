"""The pages on coming from another tool: their programs print the same losses, and every name of ours in them exists."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import tomllib
from pathlib import Path

import click
import pytest
import torch
from torch import nn

import penstock
from penstock.base.errors import ConfigError
from penstock.schedule.families import FAMILIES
from penstock.train.config.config import Config, from_mapping
from tests.support.documentation import DOCS
from tests.support.lanes import exhaustive
from tests.support.page import Reader, require_options

PAGES = {
    "torch_pipelining.md": 20, "accelerate.md": 25, "megatron.md": 50, "deepspeed.md": 35, "torchtitan.md": 25,
    "nemo.md": 20,
}  # fmt: skip
"""Pages, each with the least number of our names in its tables."""


# The first has programs of both sides, torch's and ours.
@pytest.mark.slow
@pytest.mark.parametrize("page", [*list(PAGES)[:1], *exhaustive(*list(PAGES)[1:])])
def test_programs_and_commands_of_a_page_run_and_both_programs_print_the_same_losses(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if page == "accelerate.md":
        pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    reader = Reader(tmp_path)
    reader.follow(f"coming_from/{page}")
    assert reader.outputs
    if page in ("torch_pipelining.md", "accelerate.md", "torchtitan.md"):
        outputs = [output for command, output in reader.outputs.items() if ".py" in command]
        first, *others = (re.findall(r"^loss (\S+)", output, re.M) for output in outputs)
        assert first
        assert others
        assert all(other == first for other in others)


def our_names(page: str) -> list[str]:
    """Everything in code in the columns headed Penstock."""
    found: list[str] = []
    ours = False
    for line in (DOCS / "coming_from" / page).read_text().splitlines():
        columns = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(columns) > 1 and columns[1] == "Penstock":
            ours = True
        elif not columns:
            ours = False
        elif ours:
            found += re.findall(r"`([^`]+)`", columns[1])
    return found


class Names:
    """What the names of the tables are: the public ones, and a pipeline, its optimizer and the result of a step."""

    def __init__(self) -> None:
        with penstock.Pipeline([nn.Linear(2, 2)], nn.functional.mse_loss, microbatches=1) as self.pipe:
            self.result = self.pipe.step(torch.ones(1, 2), torch.ones(1, 2))
        self.optimizer = penstock.PipelineOptimizer
        self.penstock, self.torch, self.nn = penstock, torch, nn

    def find(self, node: ast.expr) -> object:
        if isinstance(node, ast.Attribute):
            return getattr(self.find(node.value), node.attr)
        assert isinstance(node, ast.Name), ast.dump(node)
        return getattr(self, node.id, None) or getattr(penstock, node.id)

    def require(self, code: str) -> None:
        """Raise AssertionError or AttributeError unless every name in an expression, or keyword, exists."""
        try:
            tree = ast.parse(code, mode="eval").body
        except SyntaxError:
            tree = ast.parse(f"penstock.Pipeline({code})", mode="eval").body
        if isinstance(tree, ast.Name) and not hasattr(self, tree.id) and not hasattr(penstock, tree.id):
            assert tree.id in inspect.signature(penstock.Pipeline).parameters, code
            return
        if isinstance(tree, ast.Attribute):
            self.find(tree)
        for call in ast.walk(tree):
            if isinstance(call, ast.Call):
                takes = inspect.signature(self.find(call.func)).parameters
                free = any(p.kind is p.VAR_KEYWORD for p in takes.values())
                assert free or {keyword.arg for keyword in call.keywords} <= set(takes), code


@pytest.fixture(scope="module")
def names() -> Names:
    return Names()


def require_name(code: str, names: Names) -> None:
    """Raise an error unless a config key, command, option, schedule, or Python name exists."""
    sections = {field.name for field in dataclasses.fields(Config)}
    key = re.fullmatch(r"(\w+)\.(\w+)(?: = (.+))?", code)
    if code in FAMILIES:
        return
    if code.startswith("--"):
        require_options(["train", code])
    elif code.startswith("penstock "):
        require_options(code.split()[1:])
    elif key and key[1] in sections:
        section, name, value = key.groups()
        assert name in {field.name for field in dataclasses.fields(getattr(Config(), section))}, code
        if value:
            from_mapping({section: tomllib.loads(f"{name} = {value}")})
    elif not code.startswith(("torchrun ", "python ", "lambda", "if ")):
        names.require(code)


def test_every_name_of_ours_in_the_tables_exists(names: Names):
    for page, least in PAGES.items():
        codes = our_names(page)
        assert len(codes) >= least
        for code in codes:
            require_name(code, names)


def test_a_name_that_does_not_exist_is_noticed(names: Names):
    of_the_config = (
        "optim.rate",
        'train.reduction = "median"',
        "--no-such",
        "penstock plan --no-such",
        "f2b",
    )
    for code in (*of_the_config, "Pipeline(layers, chunks=8)", "chunks=8", "pipe.losses", "penstock.Pipe"):
        with pytest.raises((AssertionError, AttributeError, ConfigError, click.UsageError)):
            require_name(code, names)
