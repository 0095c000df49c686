"""The workflows: valid, safe by an audit, and every command they run exists."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from penstock.cli import COMMANDS
from tests.support.github import ROOT, WORKFLOWS, commands, workflow

PINNED = re.compile(r"\S+@[0-9a-f]{40}  # v\d+\.\d+\.\d+$")
TOOLS = {"build": "build", "twine": "twine", "pip": "pip"}
"""Modules that a workflow runs after it has installed the package that has them."""


def tool(name: str) -> str:
    """Return the path of a command installed beside this Python, or skip the test."""
    path = shutil.which(name, path=str(Path(sys.executable).parent))
    if path is None:
        pytest.skip(f"no {name} here: make setup-ci")
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("github-workflows", [".github/workflows/*.yml"]),
        ("dependabot", [".github/dependabot.yml"]),
        ("github-issue-forms", [".github/ISSUE_TEMPLATE/bug.yml", ".github/ISSUE_TEMPLATE/feature.yml"]),
        ("github-issue-config", [".github/ISSUE_TEMPLATE/config.yml"]),
        ("citation-file-format", ["CITATION.cff"]),
    ],
)
def test_files_follow_their_schemas(schema, files):
    paths = [str(path) for pattern in files for path in ROOT.glob(pattern)]
    assert paths
    check = [tool("check-jsonschema"), "--builtin-schema", f"vendor.{schema}", *paths]
    result = subprocess.run(check, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_an_audit_finds_no_weakness():
    audit = [tool("zizmor"), "--offline", "--persona", "auditor", "--no-progress", str(ROOT / ".github")]
    result = subprocess.run(audit, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_bounded_and_pinned_and_its_commands_exist(path):
    table = workflow(path)
    assert table["permissions"] == {}
    assert "group" in table["concurrency"]
    for name, job in table["jobs"].items():
        if "uses" not in job:
            assert job["timeout-minutes"] <= 90, name
            assert not re.search("latest", job["runs-on"]), name
    for line in path.read_text().splitlines():
        if used := re.match(r"\s*(?:- )?uses: (.+)", line):
            assert used[1].startswith("./") or PINNED.match(used[1]), line

    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for words in commands(path):
        match words:
            case ["make", target, *_]:
                assert target in targets, words
            case ["python", "-m", module, *_]:
                assert module in TOOLS or importlib.util.find_spec(module), words
            case ["penstock", command, *_]:
                assert command in COMMANDS or command == "--version", words
            case ["sudo", *rest]:
                assert rest[0] == "ln" or (ROOT / rest[-1]).is_file(), words
            case _:
                assert words[0] in {"check-wheel-contents"}, words


def test_every_python_runs_with_the_newest_and_the_oldest_versions():
    matrix = workflow(ROOT / ".github/workflows/tests.yml")["jobs"]["linux"]["strategy"]["matrix"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    supported = [c.rsplit(" ", 1)[1] for c in project["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert matrix["python"] == supported
    assert project["requires-python"] == f">={supported[0]}"
    assert all((ROOT / name).is_file() for name in matrix["constraints"])


def test_only_the_publishing_job_has_an_identity():
    rights = {
        (path.stem, name): job.get("permissions")
        for path in WORKFLOWS
        for name, job in workflow(path)["jobs"].items()
        if job.get("permissions") not in ({}, {"contents": "read"})
    }
    assert rights == {("release", "publish"): {"id-token": "write"}}
    publish = workflow(ROOT / ".github/workflows/release.yml")["jobs"]["publish"]
    assert publish["environment"] == "pypi"
    assert publish["needs"] == "package"
