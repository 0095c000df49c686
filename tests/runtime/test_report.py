"""The report of one's own training loop: one call writes the page of the steps that it saw."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import mse_loss

from penstock.base.errors import ConfigError, PenstockError
from penstock.parallel.mesh import MeshShape
from penstock.runtime import loop_report
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.options import ParallelOptions
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.show.analysis import StepAnalysis
from penstock.show.report import write
from tests.show.test_report import Reader
from tests.support import plain
from tests.support.simulated import built, timed

RANKS = 2


def shown(page: Path) -> tuple[str, dict]:
    """Return the text of a page as a reader sees it, and the data of its script."""
    reader = Reader(page.read_text())
    return "".join(reader.shown), json.loads(reader.scripts["penstock-data"])


def test_each_call_adds_the_last_step(tmp_path: Path):
    page = tmp_path / "report.html"
    with Pipeline(plain.model(4), mse_loss, microbatches=4, ranks=RANKS) as pipe:
        for step in range(20):
            pipe.step(*plain.batch(step, 8))
            if step in (0, 9):
                pipe.report(page)
        assert pipe.report(page) == page
    text, data = shown(page)
    assert [step["label"] for step in data["steps"]] == ["step 1", "step 10", "step 20"]
    assert all(set(step["bars"]["rank"]) == {0, 1} for step in data["steps"])
    assert "1f1b on 2 ranks, threads of one process" in text
    assert "cpu, float32" in text
    assert "Training" not in text


@pytest.mark.slow
def test_a_page_after_each_step_has_the_first_and_the_last_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(loop_report, "_MOST", 2)
    page = tmp_path / "report.html"
    with Pipeline(plain.model(4), mse_loss, microbatches=4, ranks=RANKS) as pipe:
        for step in range(5):
            pipe.step(*plain.batch(step, 8))
            pipe.report(page)
    assert [step["label"] for step in shown(page)[1]["steps"]] == ["step 1", "step 4", "step 5"]


def test_the_page_of_one_step_has_no_chart_of_all_steps(tmp_path: Path):
    with Pipeline(plain.model(4), mse_loss, microbatches=2, ranks=RANKS) as pipe:
        pipe.step(*plain.batch(0, 4))
        text, data = shown(pipe.report(tmp_path / "report.html"))
    assert len(data["steps"]) == 1
    assert "All steps" not in text


def test_without_a_step_there_is_nothing_to_report(tmp_path: Path):
    page = tmp_path / "report.html"
    with Pipeline(plain.model(4), mse_loss, microbatches=2, ranks=RANKS) as pipe:
        with pytest.raises(
            PenstockError, match=r"no step has run.*call pipe\.report\(\) after pipe\.step\(\)"
        ):
            pipe.report(page)
        pipe.evaluate(*plain.batch(0, 4))
        with pytest.raises(PenstockError, match="the last call was an evaluation"):
            pipe.report(page)
        pipe.step(*plain.batch(0, 4))
        with pytest.raises(ConfigError, match="cannot write the page"):
            pipe.report(tmp_path / "missing" / "report.html")
    with pytest.raises(PenstockError, match="this pipeline is closed"):
        pipe.report(page)
    assert not page.exists()


def reports(rank: int, folder: Path, dp: int) -> tuple[str, str, str]:
    torch.set_num_threads(1)
    page = folder / "report.html"
    mesh = None if dp == 1 else MeshShape(RANKS, dp, 1)
    with Pipeline(
        plain.model(4), mse_loss, microbatches=2, mesh=mesh, timeout=300,
        parallel=ParallelOptions(shard="none" if dp == 1 else "optimizer"),
    ) as pipe:  # fmt: skip
        optimizer = PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1)
        pipe.step(*plain.batch(0, 4 * dp))
        optimizer.step()
        with pytest.raises(ConfigError) as refused:
            pipe.report(folder / "missing" / "report.html")
        return str(pipe.report(page)), str(refused.value), pipe.layout


@pytest.mark.parametrize("dp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_rank_0_writes_the_page_of_all_ranks(tmp_path: Path, processes: LocalProcesses, dp: int):
    found = processes.run(RANKS * dp, reports, tmp_path, dp)
    assert len(set(found)) == 1
    page, refused, layout = found[0]
    assert page == str(tmp_path / "report.html")
    assert "missing" in refused
    text, data = shown(Path(page))
    assert data["steps"][0]["ranks"] == RANKS
    assert set(data["steps"][0]["bars"]["rank"]) == {0, 1}
    assert layout == (
        "1f1b on 2 ranks" if dp == 1 else "1f1b on 4 ranks (pp 2 x dp 2 x tp 1), optimizer sharded"
    )
    assert f"{layout}, {RANKS * dp} processes" in text


@pytest.mark.parametrize(
    ("api", "begins"),
    [("Pipeline", "Pipeline(..., "), ("Trainer", 'pipeline={..., "'), ("train", "penstock train --set ")],
)
def test_advice_is_in_the_words_of_the_api(tmp_path: Path, api: str, begins: str):
    trace = timed(built("1f1b", 4, 8), 4, 4, 4)
    step = StepAnalysis("step 1", replace(trace, info={**trace.info, "api": api}))
    assert step.to_try
    assert all(line.startswith(begins) for line in step.to_try)
    text, _ = shown(write(tmp_path / "page.html", [step], title="one"))
    others = {"Pipeline(...", "pipeline={...", "penstock train"} - {
        begins.partition(", ")[0].partition(" --")[0]
    }
    assert begins in text
    assert not [other for other in others if other in text]
