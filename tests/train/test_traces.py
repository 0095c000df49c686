"""Traces of a run: those of the first step, the last and every nth."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.parallel.mesh import MeshShape
from penstock.runtime.kept_traces import KeptTraces
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.show.run import read_run
from tests.support import plain


def keep(folder: Path, mesh: MeshShape, steps: int, every: int, writes: bool) -> int:
    torch.set_num_threads(1)
    loss_fn = torch.nn.functional.mse_loss
    with Pipeline(plain.model(4), loss_fn, microbatches=4, mesh=mesh, timeout=300) as pipe:
        kept = KeptTraces(folder, steps, every, writes, pytest.fail, api="train")
        for step in range(1, steps + 1):
            pipe.step(*plain.batch(step, 8))
            kept.after(step, pipe)
        return pipe.replica


def assert_whole(folder: Path, steps: list[int]) -> None:
    found = read_run(folder)
    assert list(found.traces) == steps
    assert found.problems == ()
    for trace in found.traces.values():
        assert (trace.ranks, len(trace)) == (2, 2 * 2 * 4)
        assert set(trace.rank.tolist()) == {0, 1}
        assert trace.info["split"] == [["0", "1"], ["2", "3"]]


@pytest.mark.parametrize(("every", "kept"), [(2, [1, 2, 4, 5]), (0, [1, 5]), (100, [1, 5])])
def test_the_first_step_the_last_and_every_nth_are_kept(tmp_path: Path, every: int, kept: list[int]):
    keep(tmp_path, MeshShape(2), 5, every, True)
    assert_whole(tmp_path, kept)


def side_by_side(rank: int, folder: Path) -> int:
    return keep(folder, MeshShape(2, 2, 1), 2, 0, rank == 0)


@pytest.mark.slow
def test_of_pipelines_side_by_side_the_first_is_kept(tmp_path: Path, processes: LocalProcesses):
    assert processes.run(4, side_by_side, tmp_path) == [0, 1, 0, 1]
    assert_whole(tmp_path, [1, 2])
