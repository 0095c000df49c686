"""A folder with two checkpoints, which many tests damage or continue."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from penstock.checkpoint.checkpoints import Checkpoints
from tests.support.checkpoint_runs import adamw, pipeline, steps


@pytest.fixture(scope="session")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two") / "checkpoints"
    with pipeline(ranks=2) as pipe, Checkpoints(folder, pipe, adamw(pipe)) as checkpoints:
        for _ in range(2):
            steps(pipe, checkpoints.optimizer, 1)
            checkpoints.save()
    return folder


@pytest.fixture
def saved_twice(two_checkpoints: Path, tmp_path: Path) -> Path:
    """A copy for one test: steps 1 and 2 of a run on two ranks, with the state of its optimizer."""
    return Path(shutil.copytree(two_checkpoints, tmp_path / "checkpoints"))
