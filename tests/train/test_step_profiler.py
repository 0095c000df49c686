"""One step under torch's profiler."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.train import step_profiler
from penstock.train.step_profiler import WARM, StepProfiler
from tests.support.tiny_run import text_folder, tiny
from tests.support.trainer import quietly


class Profile:
    """In the place of torch's profiler, which takes seconds to start."""

    def __init__(self, **options: object) -> None:
        self.options = options

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text("a trace")


@pytest.mark.parametrize(
    ("first", "steps", "profiled"), [(1, 30, WARM), (6, 30, 5 + WARM), (1, 3, 3), (1, WARM, WARM)]
)
def test_the_profiled_step_is_a_warm_one_or_the_last_of_a_shorter_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, steps: int, profiled: int
):
    monkeypatch.setattr(step_profiler, "profile", Profile)
    for run in (tmp_path, None):
        profiler = StepProfiler(run, steps, rank=1)
        for step in range(first, steps + 1):
            with profiler.of(step):
                pass
    assert [path.name for path in tmp_path.rglob("*.json")] == [f"step-{profiled:06}.rank-1.json"]


@pytest.mark.slow
def test_the_profiled_step_has_the_operators_of_every_ranks_thread(tmp_path: Path):
    config = tiny(tmp_path, text_folder(tmp_path), train={"steps": WARM + 1, "log_every": 5})
    quietly(config, profile=True)
    (path,) = (tmp_path / "runs" / "tiny" / "profile").iterdir()
    assert path.name == f"step-{WARM:06}.rank-0.json"
    events = json.loads(path.read_text("utf-8"))["traceEvents"]
    products = [event for event in events if event.get("name") == "aten::mm" and event.get("ph") == "X"]
    assert len({event["tid"] for event in products}) >= 2
