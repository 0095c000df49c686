"""Ranks that make other calls than the others, or in another order, are told so at once, all of them, with both calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock import MeshShape
from penstock.base.errors import CallOrderError, PeerError
from penstock.checkpoint.checkpoints import Checkpoints
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.options import ExecutionOptions
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.transport.processes import SWITCH
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import mixtures, plain, waiting
from tests.support.groups import outcome
from tests.support.lanes import exhaustive, slow

LONG = 600.0  # seconds; no wait may end by it


class Loop:
    """What a training loop has."""

    def __init__(self, pipe: Pipeline, folder: Path) -> None:
        self.pipe, self.folder = pipe, folder
        self.batch = plain.batch(0, 4)
        self.optimizer = PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1, clip=1.0)
        self.checkpoints = Checkpoints(folder, pipe, self.optimizer)


CALLS: dict[str, Callable[[Loop], Any]] = {
    "pipe.step()": lambda loop: loop.pipe.step(*loop.batch),
    "pipe.evaluate()": lambda loop: loop.pipe.evaluate(*loop.batch),
    "pipe.full_state_dict()": lambda loop: loop.pipe.full_state_dict(rank0_only=True),
    "pipe.named_weights()": lambda loop: list(loop.pipe.named_weights()),
    "pipe.clip_grad_norm_()": lambda loop: loop.pipe.clip_grad_norm_(1.0),
    "pipe.sum_over_ranks()": lambda loop: loop.pipe.sum_over_ranks(torch.ones(3, dtype=torch.float64)),
    "pipe.gather_trace()": lambda loop: loop.pipe.gather_trace(),
    "pipe.report()": lambda loop: loop.pipe.report(loop.folder / "report.html"),
    "pipe.close()": lambda loop: loop.pipe.close(),
    "PipelineOptimizer.step()": lambda loop: loop.optimizer.step(),
    "Checkpoints.save()": lambda loop: loop.checkpoints.save(),
    "Checkpoints.load_newest()": lambda loop: loop.checkpoints.load_newest(),
}


def calls_on_ranks(rank: int, folder: Path, calls: list[str], shared_memory: str) -> str:
    """Make one step together, then this rank's own call, and then another step; return the error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, shared_memory)
        try:
            with Pipeline(plain.model(4), nn.functional.mse_loss, microbatches=2, timeout=LONG) as pipe:
                loop = Loop(pipe, folder)
                CALLS["pipe.step()"](loop)
                CALLS[calls[rank]](loop)
                CALLS["pipe.step()"](loop)
        except (CallOrderError, PeerError) as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


PAIRS = [
    (["pipe.full_state_dict()", "pipe.step()"], "0"),
    (["pipe.full_state_dict()", "pipe.clip_grad_norm_()"], "1"),
    (["pipe.named_weights()", "pipe.gather_trace()"], "1"),
    (["pipe.sum_over_ranks()", "PipelineOptimizer.step()"], "1"),
    (["Checkpoints.save()", "Checkpoints.load_newest()"], "1"),
    *slow(*(([name, "pipe.step()"], "1") for name in CALLS if name not in ("pipe.step()", "pipe.close()"))),
    *exhaustive(
        *((["pipe.step()", name], "1") for name in CALLS if name not in ("pipe.step()", "pipe.close()"))
    ),
]


@pytest.mark.parametrize(("calls", "shared_memory"), PAIRS, ids=str)
def test_both_calls_are_named_on_both_ranks(
    tmp_path: Path, processes: LocalProcesses, calls: list[str], shared_memory: str
):
    for text in processes.run(2, calls_on_ranks, tmp_path, calls, shared_memory):
        assert "same order" in text, text
        for rank, name in enumerate(calls):
            assert f"rank {rank} calls {name}" in text, text
        assert "if pipe.rank == 0" in text


def test_a_rank_that_closes_its_pipeline_is_named_to_the_others(tmp_path: Path, processes: LocalProcesses):
    text, _ = processes.run(2, leave_early)
    assert "rank 1 calls pipe.close()" in text


def test_of_four_ranks_the_one_is_told_apart(tmp_path: Path, processes: LocalProcesses):
    calls = ["pipe.full_state_dict()", "pipe.step()", "pipe.step()", "pipe.step()"]
    for text in processes.run(4, calls_on_ranks, tmp_path, calls, "1"):
        assert "rank 0 calls pipe.full_state_dict()" in text, text
        assert "call pipe.step()" in text or "calls pipe.step()" in text, text


def leave_early(rank: int) -> str:
    with Pipeline(plain.model(2), nn.functional.mse_loss, microbatches=2, timeout=LONG) as pipe:
        # As with loaders of other lengths.
        return [outcome(pipe.step, *plain.batch(0, 4)) for _ in range(2 - rank)][-1]


@pytest.mark.parametrize("evaluating", [0, *slow(1)])
def test_an_evaluation_in_place_of_the_first_step_is_named(
    tmp_path: Path, processes: LocalProcesses, evaluating: int
):
    for text in processes.run(2, first_call, evaluating):
        assert f"rank {evaluating} calls pipe.evaluate()" in text, text
        assert f"rank {1 - evaluating} calls pipe.step()" in text, text


def first_call(rank: int, evaluating: int) -> str:
    with Pipeline(plain.model(2), nn.functional.mse_loss, microbatches=2, timeout=LONG) as pipe:
        return outcome(pipe.evaluate if rank == evaluating else pipe.step, *plain.batch(0, 4))


def alone(rank: int, folder: Path) -> str:
    """Rank 0 waits in a call; rank 1 makes none until rank 0 has given up."""
    done = folder / "given-up"
    with Pipeline(plain.model(2), nn.functional.mse_loss, microbatches=2, timeout=0.5) as pipe:
        pipe.step(*plain.batch(0, 4))
        if rank:
            waiting.until(done.exists)
            return ""
        told = outcome(pipe.full_state_dict)
        done.touch()
        return told


def test_a_rank_that_makes_no_call_is_named_with_the_call_that_it_misses(
    tmp_path: Path, processes: LocalProcesses
):
    text, _ = processes.run(2, alone, tmp_path)
    assert "rank 1 did not call pipe.full_state_dict()" in text


def build_another(rank: int, folder: Path) -> str:
    """Rank 0 builds a second pipeline; rank 1 builds none until rank 0 has given up."""
    done = folder / "given-up"
    with Pipeline(plain.model(2), nn.functional.mse_loss, microbatches=2):
        if rank:
            waiting.until(done.exists)
            return ""
        options = {"microbatches": 2, "timeout": 0.5, "execution": ExecutionOptions(first_timeout=0.5)}
        told = outcome(Pipeline, plain.model(2), nn.functional.mse_loss, **options)
        done.touch()
        return told


def test_a_rank_that_builds_no_second_pipeline_is_named(tmp_path: Path, processes: LocalProcesses):
    text, _ = processes.run(2, build_another, tmp_path)
    assert text.endswith("to compare what they were started with: rank 1 did not come")


WITH_EXPERTS: dict[str, Callable[[Pipeline, Path], Any]] = {
    "pipe.full_state_dict()": lambda pipe, folder: pipe.full_state_dict(),
    "pipe.state_dict()": lambda pipe, folder: pipe.state_dict(),
    "pipe.named_weights()": lambda pipe, folder: list(pipe.named_weights()),
    "add up over divided experts": lambda pipe, folder: pipe.clip_grad_norm_(1.0),
    "compare their numbers of microbatches": lambda pipe, folder: pipe.evaluate(*mixtures.batch()),
    "compare": lambda pipe, folder: Checkpoints(folder, pipe),
}


def after_another_left(rank: int, name: str, folder: Path) -> str:
    shape = MeshShape(dp=2, ep=2)
    try:
        with Pipeline(mixtures.mixture(), mixtures.loss_of, microbatches=2, mesh=shape, timeout=LONG) as pipe:
            pipe.step(*mixtures.batch())
            if rank == 0:
                WITH_EXPERTS[name](pipe, folder)
    except PeerError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_a_rank_that_has_left_is_named_in_calls_outside_of_a_step(
    processes: LocalProcesses, tmp_path: Path, name: str
):
    """Also where torch makes the collective, as of a tensor that is divided."""
    told, _ = processes.run(2, after_another_left, name, tmp_path)
    assert re.search(r"^process 1 .* closed the pipeline, .*" + re.escape(name), told)
