"""A Pipeline that is dropped without being closed leaves no thread behind, and nothing keeps it alive."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from penstock.base.errors import BatchError, StageError
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from tests.support.boom import Boom

LIMIT = 30.0  # seconds, of what takes none


def ours() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("penstock")]


def ended(threads: list[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(LIMIT)
    return not any(thread.is_alive() for thread in threads)


def layers(count: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(8, 4), torch.zeros(8, 4)


@pytest.mark.parametrize("call", ["nothing", "evaluate", "refused"])
def test_its_threads_end_without_a_garbage_collection(call: str):
    gc.collect()
    before = set(ours())
    gc.disable()
    try:
        pipe = Pipeline(layers(), mse_loss, ranks=2, microbatches=2)
        threads = [thread for thread in ours() if thread not in before]
        if call == "evaluate":
            pipe.evaluate(*batch())
        elif call == "refused":
            with contextlib.suppress(BatchError):
                pipe.step(torch.zeros(3, 3), torch.zeros(4, 4))
        del pipe
        assert len(threads) == 2
        assert ended(threads)
    finally:
        gc.enable()


def test_its_threads_end_and_the_model_may_stay():
    before, model = set(ours()), layers()
    pipe = Pipeline(model, mse_loss, ranks=2, microbatches=2)
    optimizer = PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1)
    pipe.step(*batch())
    optimizer.step()
    threads = [thread for thread in ours() if thread not in before]
    assert len(threads) == 2
    gone = weakref.ref(pipe)
    del pipe, optimizer
    gc.collect()
    assert gone() is None
    assert ended(threads)
    assert model(batch()[0]).shape == (8, 4)


def test_its_threads_end_after_a_step_that_failed():
    before = set(ours())
    model = nn.Sequential(nn.Linear(4, 4), Boom(0), nn.Linear(4, 4))
    pipe = Pipeline(model, mse_loss, ranks=3, microbatches=2)
    with pytest.raises(StageError, match="boom"):
        pipe.step(*batch())
    threads = [thread for thread in ours() if thread not in before]
    assert len(threads) == 3
    del pipe
    gc.collect()
    assert ended(threads)


def test_a_pipeline_in_place_of_another_works_when_that_has_gone():
    model = layers()
    for _ in range(2):
        pipe = Pipeline(model, mse_loss, ranks=2, microbatches=2)
        gc.collect()
        assert pipe.step(*batch()).loss is not None
    pipe.close()


def drop(rank: int) -> bool:
    torch.set_num_threads(1)
    before = set(ours())
    pipe = Pipeline(layers(), mse_loss, microbatches=2)
    pipe.step(*batch())
    threads = [thread for thread in ours() if thread not in before]
    assert [thread.name for thread in threads] == ["penstock-watch"]
    gone = weakref.ref(pipe)
    del pipe
    gc.collect()
    return gone() is None and ended(threads)


@pytest.mark.slow
def test_the_watch_of_a_process_ends(processes: LocalProcesses):
    assert processes.run(2, drop) == [True, True]
