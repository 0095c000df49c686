"""What a run of the trainer leaves in its output folder: traces, metrics and a page that shows them."""

from __future__ import annotations

import math
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from penstock.base.errors import ConfigError
from penstock.show import run_page
from penstock.show.run import read_run
from tests.support.hf_trainer import PIPELINE, arguments, model, trainer
from tests.support.waiting import until


def reporting(folder: Path, steps: int, **pipeline: Any) -> Any:
    saving = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "save_strategy": "steps"}
    args = arguments(folder, max_steps=steps, **saving)
    return trainer(model(), args, PIPELINE | {"report": True} | pipeline)


def logged(history: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    return [(row["step"], row[name]) for row in history if name in row]


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The notes on pages that would be drawn: drawing takes seconds."""
    notes: list[str] = []
    monkeypatch.setattr(run_page, "write_report", lambda seen, path, note="": notes.append(note))
    return notes


def test_a_run_leaves_traces_metrics_and_a_page(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], pages: list[str]
):
    run = reporting(tmp_path, 4, trace_every=2)
    run.train()
    ranks = run.pipe.ranks
    assert f"pipeline: {run.pipe.schedule.name} on {ranks} ranks (threads)" in capfd.readouterr().err
    seen = read_run(tmp_path)
    assert sorted(seen.traces) == [1, 2, 4]
    assert all(trace.ranks == ranks for trace in seen.traces.values())
    assert seen.problems == ()
    history = run.state.log_history
    for name, ours in (("loss", "loss"), ("learning_rate", "lr"), ("grad_norm", "grad_norm")):
        lines = [(row["step"], row[ours]) for row in seen.metrics if row["kind"] == "train"]
        assert lines == [(step, pytest.approx(value)) for step, value in logged(history, name)]
    bits = [(row["step"], row["held_out_bits"]) for row in seen.metrics if row["kind"] == "held_out"]
    assert bits == [(step, pytest.approx(loss / math.log(2))) for step, loss in logged(history, "eval_loss")]
    assert pages == [""]


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_the_same_files(tmp_path: Path):
    reporting(tmp_path, 4).train()
    reporting(tmp_path, 6).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    seen = read_run(tmp_path)
    assert [row["step"] for row in seen.metrics if row["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    # The first and the last of each start, without the steps done again.
    assert sorted(seen.traces) == [1, 3, 6]
    assert "resumed" in str(seen.facts.lines)


def test_without_a_report_nothing_is_left(tmp_path: Path):
    reporting(tmp_path, 1, report=False).train()
    assert not {"traces", "metrics.jsonl", "run.json", "report.html"} & {
        path.name for path in tmp_path.iterdir()
    }


class At(transformers.TrainerCallback):
    """Does something after a step, once the report has seen it."""

    def __init__(self, step: int, job: Callable[[], None]) -> None:
        self.step, self.job = step, job

    def on_step_end(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.job()


@pytest.mark.slow
def test_the_page_is_drawn_during_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_page, "EVERY", 0)
    page = tmp_path / "report.html"
    run = reporting(tmp_path, 3)
    during: list[str] = []

    def look() -> None:
        until(page.exists, limit=300)
        during.append(page.read_text())

    run.add_callback(At(2, look))
    run.train()
    assert "The run is under way: step 2 of 3" in during[0]
    assert "The run is under way" not in page.read_text()
    assert run.pipe.schedule.name in page.read_text()


def stop() -> None:
    raise RuntimeError("stopped here")


def test_the_page_of_a_run_that_fails_says_so(tmp_path: Path, pages: list[str]):
    run = reporting(tmp_path, 2)
    run.add_callback(At(1, stop))
    with pytest.raises(RuntimeError, match="stopped here"):
        run.train()
    assert pages == ["The run ended before its last step: RuntimeError: stopped here."]


@pytest.mark.slow
def test_a_run_that_fails_ends_what_draws_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_page, "EVERY", 0)
    started: list[subprocess.Popen[str]] = []

    class Noted(subprocess.Popen[str]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr(run_page.subprocess, "Popen", Noted)
    run = reporting(tmp_path, 4)
    run.add_callback(At(2, stop))
    with pytest.raises(RuntimeError, match="stopped here"):
        run.train()
    assert [process.returncode for process in started] == [-signal.SIGKILL]
    assert "RuntimeError: stopped here" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(("name", "value"), [("trace_every", -1), ("trace_every", True), ("report", "yes")])
def test_other_values_are_refused(tmp_path: Path, name: str, value: object):
    with pytest.raises(ConfigError, match=rf"pipeline\['{name}'\] must be"):
        reporting(tmp_path, 1, **{name: value})
