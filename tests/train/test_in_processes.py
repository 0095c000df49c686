"""Runs in two processes: their weights, logs, traces, profiles and callbacks are of one run."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.base.errors import ConfigError
from penstock.huggingface import weights
from penstock.runtime.workers.pool import LocalProcesses
from penstock.show.run import read_run
from penstock.train.callbacks.callback import Callback, StepEvent
from penstock.train.config.config import Config
from penstock.train.evaluate import evaluate
from penstock.train.loop import Outcome
from tests.support.tiny_run import text_folder
from tests.support.trainer import config_of, lines, quietly, run, same, stopped_at
from tests.support.unsplit import unsplit

pytestmark = pytest.mark.slow

Told = list[tuple[int, tuple[int, ...]]]


class Memory(Callback):
    """Keeps the memory of each step."""

    def __init__(self) -> None:
        self.told: Told = []

    def on_step(self, event: StepEvent) -> None:
        self.told.append((event.step, event.rss))


def in_a_process(rank: int, config: Config) -> tuple[Outcome | None, Told]:
    torch.set_num_threads(1)
    memory = Memory()
    outcome = quietly(config, profile=True, callbacks=[memory])
    return outcome, memory.told


def config_in(root: Path, resume: str = "") -> Config:
    told = {"report": True, "log_level": "debug", "log_every": 2}
    return config_of(root, root / "text", "run", 5, resume, train=told, runtime={"threads": 1})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, processes: LocalProcesses) -> tuple[Path, list]:
    """The root of a run of five steps, and what each process returned."""
    root = tmp_path_factory.mktemp("trained")
    text_folder(root)
    return root, processes.run(2, in_a_process, config_in(root))


def test_the_weights_are_those_of_the_unsplit_loop_and_one_process_has_the_outcome(trained):
    root, ((leader, told), (other, of_other)) = trained
    losses, norms, last, bits = unsplit(config_in(root))
    folder, logged = root / "runs" / "run", [1, 3, 4]
    assert other is None
    assert leader.held_out_bits == pytest.approx(bits, abs=1e-5)
    assert [line["loss"] for line in lines(folder, "train")] == [losses[n] for n in logged]
    assert [line["grad_norm"] for line in lines(folder, "train")] == [norms[n] for n in logged]
    assert all(0 <= line["bubble"] < 1 for line in lines(folder, "train"))
    saved = weights.load(folder)
    assert saved.keys() == last.keys()
    assert all(torch.equal(saved[n], w) for n, w in last.items())
    assert sorted(path.name for path in folder.glob("model*")) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    # Rank 0 alone calls the callbacks, with the memory of all.
    assert of_other == []
    assert [(step, len(rss)) for step, rss in told] == [(1, 0), (2, 2), (3, 0), (4, 2), (5, 2)]


def test_every_process_has_a_log_and_a_profile_of_its_own_and_the_trace_is_one_by_one_clock(trained):
    root, ((leader, _), _) = trained
    assert Path(leader.report).exists()
    found = read_run(leader.folder)
    assert list(found.traces) == [1, 5]
    for trace in found.traces.values():
        assert len(trace) == 2 * 2 * 4
        assert set(trace.rank.tolist()) == {0, 1}
        assert trace.info["split"] == [
            ["embedding", "blocks.0", "blocks.1"],
            ["blocks.2", "blocks.3", "head"],
        ]
        assert trace.info["clock_error"] == 0.0  # one machine has one clock
    for rank in (0, 1):
        assert "step 3 done, loss" in (root / "runs" / "run" / "logs" / f"rank-{rank}.log").read_text()
    profiles = sorted((root / "runs" / "run" / "profile").iterdir())
    # A short run profiles its last step.
    assert [path.name for path in profiles] == ["step-000005.rank-0.json", "step-000005.rank-1.json"]
    for path in profiles:
        events = json.loads(path.read_text("utf-8"))["traceEvents"]
        assert any(event.get("name") == "aten::mm" and event.get("ph") == "X" for event in events)


def test_a_run_goes_on_and_what_is_missing_at_its_end_is_written(
    trained, tmp_path: Path, processes: LocalProcesses
):
    root, _ = trained
    shutil.copytree(root, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "runs" / "run"
    stopped_at(tmp_path, folder, 2)
    processes.run(2, in_a_process, config_in(tmp_path, str(folder)))
    same(folder, root / "runs" / "run")
    kept = (folder / "metrics.jsonl").read_bytes()
    for path in (*folder.glob("model*"), folder / "sample.txt", folder / "report.html"):
        path.unlink()
    processes.run(2, in_a_process, config_in(tmp_path, str(folder)))
    same(folder, root / "runs" / "run")
    assert (folder / "metrics.jsonl").read_bytes() == kept
    assert (folder / "report.html").is_file()
    assert (folder / "sample.txt").is_file()


def evaluated(rank: int, folder: Path, data: Path) -> float | None:
    torch.set_num_threads(1)
    results = evaluate(folder, [str(data)], ["parallel.dp=2", "parallel.pp=1"])
    return None if results is None else results[0].loss


def test_an_evaluation_in_processes_has_one_result_on_the_leader(trained, processes: LocalProcesses):
    root, _ = trained
    folder, data = root / "runs" / "run", root / "text" / "file_0.txt"
    leader, other = processes.run(2, evaluated, folder, data)
    (alone,) = evaluate(folder, [str(data)], ["parallel.pp=1"]) or [None]
    assert alone is not None
    assert leader == pytest.approx(alone.loss, rel=1e-5)
    assert other is None


def with_other_data_on_rank_1(rank: int, config: Config, other: Path) -> str:
    if rank == 1:
        config = replace(config, data=replace(config.data, path=str(other)))
    with pytest.raises(ConfigError) as info:
        run(config)
    return str(info.value)


def test_processes_that_read_other_data_are_refused(tmp_path: Path, processes: LocalProcesses):
    (tmp_path / "copy").mkdir()
    text, other = text_folder(tmp_path), text_folder(tmp_path / "copy")
    changed = other / "file_3.txt"
    changed.write_text(changed.read_text().replace("return", "RETURN"))
    told = processes.run(2, with_other_data_on_rank_1, config_of(tmp_path, text, "two", 2), other)
    assert told[0] == told[1]
    assert re.search(r"the data .* is 10 files with .* on rank 0 .* 10 files with .* on rank 1", told[0])
    assert not (tmp_path / "runs").exists()
