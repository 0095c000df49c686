"""Traces of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.parallel.mesh import MeshShape
from penstock.runtime.kept_traces import KeptTraces
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.show.run import read_run
from penstock.trace.events import Trace
from penstock.train.config.config import Config
from penstock.train.loop import Outcome, train
from penstock.train.run_log import Reporter
from tests.support import plain
from tests.support.tiny_run import text_folder, tiny

SPLIT = [["embedding", "blocks.0", "blocks.1"], ["blocks.2", "blocks.3", "head"]]


def run(config: Config) -> Outcome:
    outcome = train(config, lambda steps, leads: Reporter())
    assert outcome is not None
    return outcome


def assert_whole(trace: Trace, ranks: int = 2, microbatches: int = 4) -> None:
    assert trace.ranks == ranks
    assert len(trace) == ranks * 2 * microbatches
    assert set(trace.rank.tolist()) == set(range(ranks))


@pytest.mark.slow
@pytest.mark.parametrize(("every", "kept"), [(2, [1, 2, 4, 5]), (0, [1, 5]), (100, [1, 5])])
def test_the_first_step_the_last_and_every_nth_are_kept(tmp_path: Path, every: int, kept: list[int]):
    config = tiny(tmp_path, text_folder(tmp_path), train={"steps": 5, "trace_every": every})
    outcome = run(config)
    found = read_run(outcome.folder)
    assert list(found.traces) == kept
    assert found.problems == ()
    for trace in found.traces.values():
        assert_whole(trace)
        assert trace.info["split"] == SPLIT


def in_a_process(rank: int, config: Config) -> Outcome | None:
    torch.set_num_threads(1)
    return train(config, lambda steps, leads: Reporter())


@pytest.mark.slow
def test_processes_keep_one_trace_of_all_by_one_clock(tmp_path: Path, processes: LocalProcesses):
    config = tiny(tmp_path, text_folder(tmp_path), runtime={"threads": 1}, train={"report": True})
    leader, other = processes.run(2, in_a_process, config)
    assert other is None
    assert Path(leader.report).exists()
    found = read_run(leader.folder)
    assert list(found.traces) == [1, 3]
    for trace in found.traces.values():
        assert_whole(trace)
        assert trace.info["split"] == SPLIT
        assert trace.info["clock_error"] == 0.0  # one machine has one clock


def side_by_side(rank: int, folder: Path) -> int:
    torch.set_num_threads(1)
    with Pipeline(
        plain.model(4), torch.nn.functional.mse_loss, microbatches=4, mesh=MeshShape(2, 2, 1), timeout=300
    ) as pipe:
        kept = KeptTraces(folder, 2, 0, rank == 0, pytest.fail)
        for step in (1, 2):
            pipe.step(*plain.batch(step, 8))
            kept.after(step, pipe)
        return pipe.replica


@pytest.mark.slow
def test_of_pipelines_side_by_side_the_first_is_kept(tmp_path: Path, processes: LocalProcesses):
    assert processes.run(4, side_by_side, tmp_path) == [0, 1, 0, 1]
    found = read_run(tmp_path)
    assert list(found.traces) == [1, 2]
    for trace in found.traces.values():
        assert_whole(trace)
        assert trace.info["split"] == [["0", "1"], ["2", "3"]]
