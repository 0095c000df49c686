"""The traces of several processes become one, by one clock."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from penstock.runtime.gather import align_clocks, gather_trace
from penstock.runtime.local import LocalProcesses
from penstock.runtime.pipeline import Pipeline
from penstock.trace.join import present
from penstock.trace.messages import givers
from tests.runtime import plain

RANKS, MICROBATCHES = 2, 4


def traced(rank: int):
    torch.set_num_threads(1)
    with Pipeline(plain.model(8), nn.functional.mse_loss, microbatches=MICROBATCHES) as pipe:
        pipe.step(*plain.batch(0, 2 * MICROBATCHES))
        part = pipe.trace()
        return part, gather_trace(pipe._world, part), align_clocks(pipe._world)


def test_every_process_gets_the_whole_step(processes: LocalProcesses):
    (part, whole, clocks), (_, other, _) = processes.run(RANKS, traced)
    assert present(part) == [0]
    assert present(whole) == present(other) == whole.info["ranks_present"] == [0, 1]
    assert len(whole) == RANKS * 2 * MICROBATCHES
    assert np.array_equal(whole.start, other.start)
    # All processes of this machine read one clock, so that the true offset is known: none.
    assert (np.abs(clocks.offset) <= clocks.error).all()
    assert 0 < whole.info["clock_error"] < 1.0
    giver = givers(whole)
    takes = giver >= 0
    assert takes.sum() == 2 * MICROBATCHES
    assert (whole.start[takes] >= whole.end[giver[takes]] - 2 * whole.info["clock_error"]).all()
