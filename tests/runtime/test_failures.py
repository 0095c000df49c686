"""A rank that fails stops every other, and the message names who failed first and at what."""

from __future__ import annotations

import inspect
import os
import threading
import traceback
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from penstock import LinearCrossEntropy
from penstock.base.errors import BatchError, ConfigError, PeerError, PenstockError, ScheduleError, StageError
from penstock.parallel.mesh import MeshShape
from penstock.runtime.health.peers import PeerRegistry
from penstock.runtime.options import ExecutionOptions, ParallelOptions
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.transport.processes import SWITCH
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import plain
from tests.support.boom import Boom
from tests.support.groups import outcome, run_cases
from tests.support.lanes import exhaustive


def failing(stage: int, at: int, backward: bool = False) -> tuple[nn.Sequential, Boom]:
    net = plain.model(4)
    bomb = Boom(at, backward)
    net[stage].append(bomb)
    return net, bomb


def caught(error: BaseException | None) -> str:
    chain = []
    while error is not None:
        chain.append(f"{type(error).__name__}: {error}")
        error = error.__cause__
    return " | ".join(chain)


# The first stage, the last, and one between.
PLACES = [(0, True), (2, True), (3, False)]
OTHERS = [(0, False), (1, False), (1, True), (2, False), (3, True)]


@pytest.mark.parametrize(("stage", "backward"), [*PLACES, *exhaustive(*OTHERS)])
def test_a_layer_that_raises_in_a_thread_reaches_the_caller_with_its_own_traceback(stage, backward):
    net, bomb = failing(stage, 2, backward)
    before = set(threading.enumerate())
    with Pipeline(net, mse_loss, microbatches=4, ranks=4) as pipe:
        text = f"rank {stage}, stage {stage}, microbatch 2, op {stage}"
        with pytest.raises(StageError, match=text) as info:
            pipe.step(*plain.batch(0, 8))
        cause = info.value.__cause__
        assert isinstance(cause, ValueError)
        assert str(cause) == "boom"
        assert traceback.extract_tb(cause.__traceback__)[-1].name == ("explode" if backward else "forward")
        # The pipeline is sound afterwards: the next step runs and equals a fresh one.
        bomb.armed = False
        pipe_loss = pipe.step(*plain.batch(1, 8)).losses
    losses, _ = plain.step(plain.model(4), mse_loss, *plain.batch(1, 8), 4)
    assert torch.equal(pipe_loss, losses)
    assert set(threading.enumerate()) <= before


def fail_in_process(
    rank: int, stage: int, backward: bool, many: bool, shared_memory: str, trains: bool
) -> tuple:
    torch.set_num_threads(1)
    # Many are more than an edge has room for: the first rank waits for the others to take its messages.
    m, schedule = (256, "gpipe") if many else (4, "1f1b")
    net, bomb = failing(stage, 2, backward)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, shared_memory)
        pipe = Pipeline(net, mse_loss, microbatches=m, ranks=4, schedule=schedule, timeout=120)
    with pipe:
        with pytest.raises(PenstockError) as info:
            (pipe.step if trains else pipe.evaluate)(*plain.batch(0, 2 * m))
        bomb.armed = False
        return caught(info.value), pipe.step(*plain.batch(1, 2 * m)).losses


@pytest.mark.slow
def test_a_layer_that_raises_in_a_process_stops_all_and_the_next_step_is_sound(processes: LocalProcesses):
    cases = [(*place, False, "1", True) for place in PLACES + OTHERS]
    cases += [(1, False, True, "1", False), (3, False, True, "0", False), (3, False, True, "0", True)]
    for case, told in zip(cases, run_cases(processes, 4, fail_in_process, cases), strict=True):
        stage, backward, many, *_ = case
        m = 256 if many else 4
        losses, _ = plain.step(plain.model(4), mse_loss, *plain.batch(1, 2 * m), m)
        for rank, (text, after) in enumerate(told):
            assert f"rank {stage}, stage {stage}, microbatch 2, op {stage}{'B' if backward else 'F'}2" in text
            assert "ValueError: boom" in text
            assert text.startswith("StageError" if rank == stage else "PeerError")
            assert torch.equal(after, losses)


def failure_of(rank: int, call: str, pp: int) -> tuple[str, bool]:
    """Return the error's class where replica 1 has a class beyond the vocabulary, and whether it is a peer's."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
    ids = torch.arange(32).reshape(8, 4) % 8
    y: Any = ids.clone()
    with Pipeline(net, LinearCrossEntropy(), microbatches=2, mesh=MeshShape(pp, 2), timeout=120) as pipe:
        pipe.step(ids, y)
        if pipe.replica == 1:
            y = y[:, :3] if call == "evaluate, other shape" else y[:7] if "other rows" in call else y
            y[5, 0] = 8
        pipe.reduce_gradients = not call.startswith("accumulate")
        try:
            if call.startswith(("step", "accumulate")):
                pipe.step(ids, y)
            elif call == "log_probs":
                pipe.log_probs(ids, y)
            else:
                pipe.evaluate(ids, y)
        except Exception as error:
            return type(error).__name__, isinstance(error, PeerError)
    return "", False


@pytest.mark.slow
@pytest.mark.parametrize("pp", [2, *exhaustive(1)])
def test_each_call_that_fails_on_one_replica_ends_on_all(processes: LocalProcesses, pp: int):
    calls = ["step", "accumulate", "evaluate", "evaluate, other shape", "log_probs"]
    calls += ["step, other rows", "accumulate, other rows", "evaluate, other rows"]
    for told in run_cases(processes, 2 * pp, failure_of, [(call, pp) for call in calls]):
        assert {name for name, _ in told}.isdisjoint({"", "WaitTimeoutError"}), told
        assert any(is_peer for _, is_peer in told), told


def pipe_of_two(**options: Any) -> Pipeline:
    return Pipeline(plain.model(4), mse_loss, microbatches=4, ranks=2, timeout=300, **options)


def each_rank_has_its_end_of_the_batch(rank: int) -> list[str]:
    texts = []
    with pipe_of_two() as pipe:
        for rows_in, rows_out in ((3, 8), (7, 8), (7, 7)):
            x, y = plain.batch(0, rows_in)[0], plain.batch(0, rows_out)[1]
            with warnings.catch_warnings(action="ignore"):  # torch's own, of sizes that broadcast
                texts.append(outcome(pipe.step, x if rank == 0 else None, y if rank == 1 else None))
    return texts


def a_reduction_raises(rank: int) -> str:
    with pipe_of_two(reduction=lambda target: 1 / 0) as pipe:
        try:
            return outcome(pipe.step, *plain.batch(0, 8))
        except ZeroDivisionError as error:
            return f"ZeroDivisionError: {error}"


def each_rank_shuffles(rank: int) -> list[str]:
    with pipe_of_two() as pipe:
        return [outcome(pipe.step, *plain.batch(seed, 8)) for seed in (0, rank, 0)]


def leaves(rank: int) -> str:
    with pipe_of_two() as pipe:
        pipe.step(*plain.batch(0, 8))
        return "left" if rank == 1 else outcome(pipe.step, *plain.batch(1, 8))


def a_replica_tells_its_failure(rank: int) -> tuple[str, list[float]]:
    """Return what is said, and for how many seconds it was looked for processes that have ended."""
    looked, find = [], PeerRegistry.find_failed

    def found(registry: PeerRegistry, patience: float = 0.0) -> str | None:
        looked.append(patience)
        return find(registry, patience)

    net, bomb = failing(0, 0)
    bomb.armed = rank == 1
    with (
        mock.patch.object(PeerRegistry, "find_failed", found),
        Pipeline(net, mse_loss, microbatches=4, mesh=MeshShape(1, 2), timeout=300) as pipe,
    ):
        return outcome(pipe.step, *plain.batch(0, 8)), looked


def call(rank: int, function: Callable[[int], Any]) -> Any:
    return function(rank)


def test_nobody_looks_for_an_end_of_a_replica_that_told_its_failure(processes: LocalProcesses):
    (said, looked), _ = processes.run(2, a_replica_tells_its_failure)
    assert said.startswith("PeerError: replica 1 failed")
    assert not any(looked)


def test_what_one_of_two_processes_does_is_refused_on_both_and_the_next_step_runs(processes: LocalProcesses):
    cases = (each_rank_has_its_end_of_the_batch, a_reduction_raises, each_rank_shuffles, leaves)
    (first, second), reduction, shuffled, left = run_cases(processes, 2, call, [(case,) for case in cases])
    assert first[0].startswith("BatchError")
    assert second[0].startswith("PeerError")
    assert "a batch of 3 is too small for 4 microbatches" in second[0]
    for texts in (first, second):
        assert texts[1].startswith("BatchError: step 2: the target's microbatches have [2, 2, 2, 2] rows")
        assert "the input's [2, 2, 2, 1]" in texts[1]
        assert texts[2] == "ok"
    # An error of the user's own names its class on every rank.
    assert any(text.startswith("ZeroDivisionError: division by zero") for text in reduction), reduction
    assert all("ZeroDivisionError: division by zero" in text for text in reduction), reduction
    for before, other, after in shuffled:
        assert before == after == "ok"
        assert other.startswith("BatchError: step 2: the processes were given different batches")
    assert left[0].startswith(("CallOrderError", "PeerError"))
    assert "rank 1 calls pipe.close()" in left[0]


def dies(rank: int) -> str:
    with pipe_of_two() as pipe:
        pipe.step(*plain.batch(0, 8))
        if rank == 1:
            os._exit(7)
        return outcome(pipe.step, *plain.batch(1, 8))


def test_a_rank_that_dies_is_named_by_the_ranks_that_wait_for_it():
    with LocalProcesses(2) as pool, pytest.raises(PenstockError, match="rank 1 ended without a result"):
        pool.run(2, dies)


def test_a_shape_the_next_stage_cannot_take_is_named():
    net = nn.Sequential(nn.Linear(12, 12), nn.Linear(5, 12))
    text = r"rank 1, stage 1, microbatch 0.*the stage's input was float32 \(2, 12\)"
    with Pipeline(net, mse_loss, microbatches=2, ranks=2) as pipe, pytest.raises(StageError, match=text):
        pipe.step(*plain.batch(0, 4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatches": 0}, "microbatches must be a whole number of at least 1, got 0"),
        ({"microbatches": -3}, "got -3"),
        ({"microbatches": True}, "got True"),
        ({"microbatches": 2, "ranks": 0}, "ranks must be"),
        ({"microbatches": 2, "virtual_stages": 0}, "virtual_stages must be"),
        ({"microbatches": 2, "timeout": 0}, "timeout must be a positive number of seconds"),
        (
            {"microbatches": 2, "timeout": 1e10},
            "timeout must be a positive number of seconds, at most 31536000",
        ),
        ({"microbatches": 2, "ranks": 5}, "5 stages but only 4 layer"),
        ({"microbatches": 2, "ranks": 2, "schedule": "1f1c"}, "did you mean '1f1b'"),
        ({"microbatches": 2, "schedule": "no/such.csv"}, "cannot read the schedule no/such.csv"),
        ({"microbatches": 2, "ranks": 2, "split": "odd"}, "no split 'odd'"),
        ({"microbatches": 2, "device": "gpu"}, "not a device"),
        (
            {"microbatches": 1, "reduction": "median"},
            "reduction must be 'mean', 'sum', 'valid' or a function",
        ),
        ({"microbatches": 1, "autocast": torch.int8}, "autocast must be"),
        ({"microbatches": 2, "seed": 1.5}, "seed must be a whole number"),
        ({"microbatches": 2, "recompute": "some"}, "recompute must be 'none', 'full', 'auto', or k"),
        ({"microbatches": 2, "recompute": 0}, "recompute must be 'none', 'full', 'auto', or k"),
        ({"microbatches": 2, "recompute": "auto"}, "recompute='auto' needs memory"),
        (
            {"microbatches": 2, "recompute": "full", "execution": ExecutionOptions(memory=10)},
            "memory=10 is for recompute='auto'",
        ),
        (
            {"microbatches": 2, "recompute": "full", "execution": ExecutionOptions(compile="stage")},
            "compile='stage' compiles a stage's layers as one",
        ),
        ({"microbatches": 10**9, "ranks": 2}, "is too large"),
        ({"microbatches": 4, "ranks": 10**6}, "is too large"),
    ],
)
def test_what_cannot_be_used_is_refused_with_what_is_allowed(options, message):
    error = ScheduleError if message == "is too large" else ConfigError
    with pytest.raises(error, match=message):
        Pipeline(plain.model(4), mse_loss, **options)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (ExecutionOptions, {"compile": "all"}, "compile must be 'none', 'block' or 'stage', got 'all'"),
        (ExecutionOptions, {"first_timeout": 0}, "first_timeout must be a positive number of seconds"),
        (ExecutionOptions, {"memory": 0}, "memory must be a positive number of bytes or None, got 0"),
        (ExecutionOptions, {"memory": True}, "memory must be a positive number of bytes or None, got True"),
        (ParallelOptions, {"bucket_bytes": 0}, "bucket_bytes must be a positive number of bytes, got 0"),
        (
            ParallelOptions,
            {"bucket_bytes": "all"},
            "bucket_bytes must be a positive number of bytes, got 'all'",
        ),
        (ParallelOptions, {"buffers": "last"}, "buffers must be"),
        (ParallelOptions, {"check_replicas": True}, "must be a number of steps, or 0 for never, got True"),
        (ParallelOptions, {"check_replicas": -1}, "must be a number of steps, or 0 for never, got -1"),
    ],
)
def test_options_are_checked_where_they_are_made(kind, options, message):
    with pytest.raises(ConfigError, match=message):
        kind(**options)


def test_a_pipeline_has_no_more_arguments_than_one_can_read():
    arguments = inspect.signature(Pipeline).parameters.values()
    assert len([a for a in arguments if a.kind is a.KEYWORD_ONLY]) <= 15


def test_a_csv_schedule_that_is_wrong_is_refused(tmp_path):
    path = tmp_path / "wrong.csv"
    path.write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    with pytest.raises(ScheduleError, match="deadlocks"):
        Pipeline(plain.model(4), mse_loss, microbatches=2, schedule=str(path))


def test_a_target_of_another_length_is_refused_before_anything_runs():
    with Pipeline(plain.model(2), mse_loss, microbatches=2, ranks=2) as pipe:
        with pytest.raises(BatchError, match="the target y has 3 rows"):
            pipe.step(plain.batch(0, 4)[0], plain.batch(0, 3)[1])
        pipe.step(*plain.batch(0, 4))


def test_a_loss_that_is_no_scalar_is_refused():
    with (
        Pipeline(plain.model(2), lambda a, b: a - b, microbatches=2, ranks=2) as pipe,
        pytest.raises(StageError, match=r"loss_fn must return a scalar tensor.*shape \(2, 12\)"),
    ):
        pipe.step(*plain.batch(0, 4))


def test_a_closed_pipeline_says_so():
    pipe = Pipeline(plain.model(2), mse_loss, microbatches=2, ranks=2)
    pipe.close()
    pipe.close()
    with pytest.raises(PenstockError, match="closed"):
        pipe.step(*plain.batch(0, 4))
