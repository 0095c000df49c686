"""The workflows of the repository, read as plain values."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def workflow(path: Path) -> dict[str, Any]:
    """Read a workflow. YAML takes its key `on` for True."""
    table = yaml.safe_load(path.read_text())
    return {("on" if key is True else key): value for key, value in table.items()}


def commands(path: Path) -> Iterator[list[str]]:
    """Yield the words of every command that a workflow runs."""
    for job in workflow(path)["jobs"].values():
        for step in job.get("steps", ()):
            for line in step.get("run", "").splitlines():
                yield shlex.split(line)
