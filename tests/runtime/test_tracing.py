"""Which steps are timed: all where it costs nothing, and on a GPU those that were asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.nn.functional import mse_loss

from penstock.base.errors import PenstockError
from penstock.runtime.op_compiler import OpRecords
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.show.run import read_run
from tests.huggingface.test_run_report import reporting
from tests.support import plain
from tests.support.tiny_run import text_folder, tiny
from tests.support.trainer import lines, quietly


@pytest.fixture
def only_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time a step only if it was asked for, as on a GPU."""
    begin = OpRecords.begin
    monkeypatch.setattr(OpRecords, "begin", lambda records, timed: begin(records, bool(timed)))


def refusals(pipe: Pipeline, folder: Path) -> list[str]:
    calls: list[Callable[[], Any]] = [
        pipe.trace,
        pipe.gather_trace,
        lambda: pipe.report(folder / "report.html"),
    ]
    said = []
    for call in calls:
        with pytest.raises(PenstockError) as refused:
            call()
        said.append(str(refused.value))
    return said


def untimed_then_timed(rank: int, folder: Path) -> tuple[list[str], int]:
    with Pipeline(plain.model(4), mse_loss, microbatches=4, ranks=2, timeout=300) as pipe:
        pipe.tracing = False
        pipe.step(*plain.batch(0, 8))
        said = refusals(pipe, folder)
        pipe.tracing = True
        pipe.step(*plain.batch(1, 8))
        trace = pipe.gather_trace()
        assert (trace.end >= trace.start).all()
        return said, len(trace)


def test_a_step_that_was_not_timed_has_no_trace(tmp_path: Path):
    said, events = untimed_then_timed(0, tmp_path)
    assert all("set pipe.tracing = True before a step" in text for text in said)
    assert events == 16


@pytest.mark.slow
def test_in_processes_every_rank_is_told(tmp_path: Path, processes: LocalProcesses):
    for said, events in processes.run(2, untimed_then_timed, tmp_path):
        assert all("set pipe.tracing = True before a step" in text for text in said)
        assert events == 16


def test_by_default_a_step_is_timed_where_that_costs_nothing():
    with Pipeline(plain.model(4), mse_loss, microbatches=4, ranks=2) as pipe:
        assert pipe.tracing is None
        pipe.step(*plain.batch(0, 8))
        assert pipe.trace() is not None


@pytest.mark.usefixtures("only_what_is_asked_for")
def test_a_run_times_the_steps_that_it_logs_and_keeps(tmp_path: Path):
    train = {"steps": 5, "log_every": 2, "trace_every": 3}
    quietly(tiny(tmp_path, text_folder(tmp_path), train=train))
    folder = tmp_path / "runs" / "tiny"
    assert list(read_run(folder).traces) == [1, 3, 5]
    logged = lines(folder, "train")
    assert [line["step"] for line in logged] == [2, 4, 5]
    assert all(0 <= line["bubble"] < 1 for line in logged)


@pytest.mark.usefixtures("only_what_is_asked_for")
def test_a_trainer_times_the_steps_that_it_keeps(tmp_path: Path):
    run = reporting(tmp_path, 4, trace_every=3)
    run.train()
    assert list(read_run(tmp_path).traces) == [1, 3, 4]
