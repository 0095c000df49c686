"""One step under torch's profiler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.runtime.workers.pool import LocalProcesses
from penstock.train.config.config import Config
from penstock.train.loop import train
from penstock.train.run_log import Reporter
from penstock.train.step_profiler import WARM
from tests.support.tiny_run import text_folder, tiny


def profiled(rank: int, config: Config) -> None:
    torch.set_num_threads(1)
    train(config, lambda steps, leads: Reporter(), profile=True)


def products(path: Path) -> list[dict[str, Any]]:
    """The matrix products in a Chrome trace."""
    events = json.loads(path.read_text("utf-8"))["traceEvents"]
    return [event for event in events if event.get("name") == "aten::mm" and event.get("ph") == "X"]


def test_the_profiled_step_has_the_operators_of_every_ranks_thread(tmp_path: Path):
    config = tiny(tmp_path, text_folder(tmp_path), train={"steps": WARM + 1, "log_every": 5})
    profiled(0, config)
    (path,) = (tmp_path / "runs" / "tiny" / "profile").iterdir()
    assert path.name == f"step-{WARM:06}.rank-0.json"
    assert len({event["tid"] for event in products(path)}) >= 2


@pytest.mark.slow
def test_a_short_run_profiles_its_last_step_and_every_process_its_own(
    tmp_path: Path, processes: LocalProcesses
):
    config = tiny(tmp_path, text_folder(tmp_path), runtime={"threads": 1})
    processes.run(2, profiled, config)
    found = sorted((tmp_path / "runs" / "tiny" / "profile").iterdir())
    assert [path.name for path in found] == ["step-000003.rank-0.json", "step-000003.rank-1.json"]
    assert all(products(path) for path in found)


def test_nothing_is_profiled_unasked(tmp_path: Path):
    train(tiny(tmp_path, text_folder(tmp_path)), lambda steps, leads: Reporter())
    assert not (tmp_path / "runs" / "tiny" / "profile").exists()
