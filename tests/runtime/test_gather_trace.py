"""The traces of several processes become one, by one clock."""

from __future__ import annotations

from time import perf_counter

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from penstock.base.errors import PenstockError
from penstock.parallel.mesh import MeshShape
from penstock.runtime.gather_trace import align_clocks
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.trace.join import present
from penstock.trace.messages import producers
from tests.support import plain

RANKS, MICROBATCHES = 2, 4


def traced(rank: int):
    torch.set_num_threads(1)
    with Pipeline(plain.model(8), mse_loss, microbatches=MICROBATCHES) as pipe:
        before = pipe.gather_trace()
        pipe.step(*plain.batch(0, 2 * MICROBATCHES))
        part = pipe.trace()
        return before, part, pipe.gather_trace(), align_clocks(pipe.world)


def test_every_process_gets_the_whole_step(processes: LocalProcesses):
    (before, part, whole, clocks), (_, _, other, _) = processes.run(RANKS, traced)
    assert before is None
    assert present(part) == [0]
    assert present(whole) == present(other) == whole.info["ranks_present"] == [0, 1]
    assert len(whole) == RANKS * 2 * MICROBATCHES
    assert np.array_equal(whole.start, other.start)
    assert whole.info["split"] == [["0", "1", "2", "3"], ["4", "5", "6", "7"]]
    # All processes of this machine read one clock.
    assert not clocks.offset.any()
    assert not clocks.error.any()
    assert whole.info["clock_error"] == 0.0
    giver = producers(whole)
    takes = giver >= 0
    assert takes.sum() == 2 * MICROBATCHES
    assert (whole.start[takes] >= whole.end[giver[takes]] - 2 * whole.info["clock_error"]).all()


def test_times_count_from_the_first_event_whose_moment_is_told():
    with Pipeline(plain.model(4), nn.functional.mse_loss, microbatches=2, ranks=2) as pipe:
        before = perf_counter()
        pipe.step(*plain.batch(0, 4))
        after = perf_counter()
        trace = pipe.trace()
    assert trace.start.min() == 0.0
    assert before <= trace.info["origin"]
    assert trace.info["origin"] + trace.end.max() <= after
    assert (trace.end >= trace.start).all()


def first_of_two(rank: int):
    torch.set_num_threads(1)
    with Pipeline(plain.model(2), mse_loss, microbatches=2, mesh=MeshShape(RANKS, 2, 1), timeout=300) as pipe:
        pipe.step(*plain.batch(0, 8))
        trace = pipe.gather_trace() if pipe.is_first else None
        pipe.step(*plain.batch(1, 8))
        return trace


@pytest.mark.slow
def test_of_pipelines_side_by_side_one_can_be_gathered_alone(processes: LocalProcesses):
    found = processes.run(2 * RANKS, first_of_two)
    mesh = MeshShape(RANKS, 2, 1)
    for rank, trace in enumerate(found):
        if mesh.coordinate(rank, "dp"):
            assert trace is None
        else:
            assert trace.ranks == RANKS
            assert present(trace) == [0, 1]


def test_threads_have_one_trace_anyway():
    pipe = Pipeline(plain.model(4), mse_loss, microbatches=2, ranks=2)
    assert pipe.gather_trace() is None
    pipe.step(*plain.batch(0, 4))
    whole, local = pipe.gather_trace(), pipe.trace()
    assert np.array_equal(whole.start, local.start)
    assert whole.info == local.info
    assert whole.info["split"] == [["0", "1"], ["2", "3"]]
    assert whole.info["blocks"] == [2, 2]
    pipe.close()
    with pytest.raises(PenstockError, match="this pipeline is closed"):
        pipe.gather_trace()
