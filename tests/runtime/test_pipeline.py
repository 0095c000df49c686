"""The contract of the user's object."""

from __future__ import annotations

import copy
import gc
import os
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import penstock
from penstock.base.errors import BatchError, ConfigError, PenstockError
from penstock.runtime.pipeline import Pipeline
from penstock.schedule.families import build_schedule
from penstock.schedule.text import write_csv
from penstock.trace.events import Activity
from tests.support import plain
from tests.support.commands import python
from tests.support.groups import run_cases
from tests.support.lanes import exhaustive

ROOT = Path(__file__).parents[2]


def test_a_step_returns_losses_outputs_and_input_gradients_by_microbatch():
    net, other = plain.model(4), plain.model(4)
    x, y = plain.batch(0, 8)
    with Pipeline(net, mse_loss, microbatches=4, ranks=2) as pipe:
        result = pipe.step(x, y, outputs=True, input_grads=True)
        bare = pipe.step(x, y)
    losses, grads = plain.step(other, mse_loss, x, y, 4)
    assert torch.equal(result.losses, losses)
    assert torch.equal(result.loss, losses.mean())
    for output, part in zip(result.outputs, x.chunk(4), strict=True):
        assert torch.equal(output, other(part))
        assert not output.requires_grad
    for ours, theirs in zip(result.input_grads, grads, strict=True):
        assert torch.equal(ours, theirs)
    assert x.grad is None
    for name in ("outputs", "input_grads"):
        with pytest.raises(ConfigError, match=rf"{name} was not asked for; .*step\(\.\.\., {name}=True\)"):
            getattr(bare, name)
    assert torch.equal(bare.loss, result.loss)


def test_habits_of_a_loop_in_plain_pytorch_are_answered(tmp_path: Path):
    x, y = plain.batch(0, 8)
    with Pipeline(plain.model(4), mse_loss, microbatches=4, ranks=2) as pipe:
        result = pipe.step(x, y)
        with pytest.raises(PenstockError, match=r"leave loss\.backward\(\) out"):
            result.loss.backward()
        with pytest.raises(PenstockError, match=r"take result\.loss, and result\.outputs"):
            _, _loss = pipe.step(x, y)
        with pytest.raises(RuntimeError, match="does not require grad"):
            pipe.evaluate(x, y).loss.backward()
    # Otherwise the loss is a tensor like any other.
    assert f"{result.loss:.3f}" == f"{result.losses.mean():.3f}"
    assert torch.equal(copy.deepcopy(result.loss), result.losses.mean())
    torch.save({"loss": result.loss}, tmp_path / "loss.pt")
    assert torch.equal(torch.load(tmp_path / "loss.pt")["loss"], result.losses.mean())


def results_of_ranks(rank: int, schedule: str) -> list[str]:
    """What each field of a result holds, or its error."""
    x, y = plain.batch(0, 8)
    with Pipeline(plain.model(4), mse_loss, microbatches=4, schedule=schedule, timeout=60) as pipe:
        found = []
        for result, name in [
            (pipe.step(x, y, outputs=True, input_grads=True), "outputs"),
            (pipe.step(x, y, outputs=True, input_grads=True), "input_grads"),
            (pipe.evaluate(x, outputs=True), "outputs"),
            (pipe.evaluate(x), "outputs"),
        ]:
            try:
                found.append(str(len(getattr(result, name))))
            except ConfigError as error:
                found.append(str(error))
        assert pipe.step(x, y).loss is not None
        return found


def test_what_another_rank_has_is_said_to_be_there(processes):
    by_schedule = run_cases(processes, 2, results_of_ranks, [("1f1b",), ("zb-v",)])
    for last, of_ranks in zip((1, 0), by_schedule, strict=True):
        for rank, (trained, grads, evaluated, unasked) in enumerate(of_ranks):
            for text, end, here in ((trained, "last", last), (evaluated, "last", last), (grads, "first", 0)):
                facts = (
                    ["4"] if rank == here else [f"rank {here}", f"this is rank {rank}", f"pipe.holds_{end}"]
                )
                assert all(fact in text for fact in facts), text
            assert "evaluate(..., outputs=True)" in unasked


# One stage a rank, several, and copies of stages.
@pytest.mark.parametrize("family", ["1f1b", "zb-v", "chimera", *exhaustive("interleaved-1f1b")])
def test_evaluation_runs_forward_only_in_eval_mode_and_puts_modes_back(family):
    net = plain.model(4)
    net[1].append(nn.Dropout(0.5))
    net[2].eval()
    x, y = plain.batch(0, 8)
    modes = [m.training for m in net.modules()]
    with Pipeline(net, mse_loss, microbatches=4, ranks=2, schedule=family) as pipe:
        result = pipe.evaluate(x, y, outputs=True)
        pipe.step(x, y)
        again = pipe.evaluate(x, y)
        nothing = pipe.evaluate(x)
        assert [m.training for m in net.modules()] == modes
        net.eval()
        with torch.no_grad():
            expected = torch.stack([mse_loss(net(a), b) for a, b in zip(x.chunk(4), y.chunk(4), strict=True)])
        assert torch.equal(result.losses, expected)
        assert torch.equal(again.losses, expected)
        assert nothing.loss is None
        assert torch.equal(torch.cat(result.outputs), torch.cat([net(a) for a in x.chunk(4)]).detach())


def test_a_schedule_may_be_an_object_or_a_file(tmp_path):
    schedule = build_schedule("zb-h1", 2, 4)
    write_csv(schedule, tmp_path / "mine.csv")
    x, y = plain.batch(0, 8)
    found = []
    for given in (schedule, str(tmp_path / "mine.csv"), tmp_path / "mine.csv"):
        with Pipeline(plain.model(4), mse_loss, microbatches=4, schedule=given) as pipe:
            assert pipe.ranks == 2
            found.append(pipe.step(x, y).losses)
    assert all(torch.equal(found[0], other) for other in found)
    with pytest.raises(ConfigError, match="is for 2 ranks, but there are 3"):
        Pipeline(plain.model(4), mse_loss, microbatches=4, ranks=3, schedule=schedule)
    with pytest.raises(ConfigError, match="has 4 microbatches, but microbatches=5"):
        Pipeline(plain.model(4), mse_loss, microbatches=5, schedule=schedule)


def test_the_trace_has_every_op_in_order_with_bytes_that_return_to_zero():
    with Pipeline(plain.model(4), mse_loss, microbatches=4, ranks=2, schedule="zb-h1") as pipe:
        assert pipe.trace() is None
        pipe.step(*plain.batch(0, 8))
        trace = pipe.trace()
    assert len(trace) == len(build_schedule("zb-h1", 2, 4))
    assert trace.info["source"] == "measured"
    assert (trace.end >= trace.start).all()
    for rank in range(2):
        own = trace.rank == rank
        assert (trace.start[own][1:] >= trace.end[own][:-1]).all()
        assert trace.held[own][-1] == 0
        assert trace.held[own].max() > 0
    assert set(trace.kind) == {Activity.F, Activity.I, Activity.W}


def test_autocast_of_the_caller_holds_in_the_ranks():
    net, other = plain.model(4), plain.model(4)
    x, y = plain.batch(0, 8)
    with Pipeline(net, mse_loss, microbatches=4, ranks=2) as pipe, torch.autocast("cpu", torch.bfloat16):
        losses = pipe.step(x, y).losses
        expected, _ = plain.step(other, mse_loss, x, y, 4)
    assert torch.equal(losses, expected)
    plain.require_equal_gradients(net, other)


@pytest.mark.slow
def test_a_compiled_stage_trains_without_a_warning_under_a_schedule_that_does_not_split():
    net = nn.Sequential(torch.compile(nn.Linear(12, 12), backend="eager"), nn.Linear(12, 12))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=UserWarning, message="stage")
        with Pipeline(net, mse_loss, microbatches=2, ranks=2) as pipe:
            pipe.step(*plain.batch(0, 4))


@pytest.mark.parametrize(
    ("x", "y"), [(None, torch.ones(4, 12)), (torch.ones(4, 12), None), (torch.tensor(1.0), None)]
)
def test_a_missing_or_shapeless_batch_is_refused(x, y):
    with (
        Pipeline(plain.model(2), mse_loss, microbatches=2, ranks=2) as pipe,
        pytest.raises(BatchError, match="needs"),
    ):
        pipe.step(x, y)


def test_nested_inputs_and_outputs_travel_between_stages():
    class Split(nn.Module):
        def forward(self, batch):
            return {"a": batch[0] * 2, "b": (batch[1], 3)}

    class Join(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, value):
            return self.inner(value["a"]) + value["b"][0] * value["b"][1]

    torch.manual_seed(0)
    join = Join()
    a, b, y = torch.randn(4, 4), torch.arange(16.0).view(4, 4), torch.randn(4, 4)
    with Pipeline([Split(), join], mse_loss, microbatches=2, ranks=2) as pipe:
        result = pipe.step((a, b), y, input_grads=True)
    assert [len(grads) for grads in result.input_grads] == [2, 2]
    expected = mse_loss(join.inner(a[:2] * 2) + b[:2] * 3, y[:2])
    assert torch.equal(result.losses[0], expected)


@pytest.mark.slow
def test_torchrun_gives_the_same_lines_one_process_a_rank():
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    code = ROOT / "tests" / "support" / "under_torchrun.py"
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(code)]
    told = python(command, ROOT, environment)
    assert told.returncode == 0, told.stderr
    lines = sorted(line for line in told.stdout.splitlines() if line.startswith("rank"))
    losses = plain.train(4, 4, steps=1)[0][0]
    assert lines == [f"rank {r} of 2: {losses.mean().item()!r}" for r in range(2)]


def test_one_process_started_by_a_launcher_still_runs_ranks_as_threads(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with Pipeline(plain.model(4), mse_loss, microbatches=4, ranks=2) as pipe:
        assert not pipe.in_processes
        pipe.step(*plain.batch(0, 8))
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(ConfigError, match="are not a rank below a number of processes"):
        Pipeline(plain.model(4), mse_loss, microbatches=4, ranks=2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="sees no GPU"):
        Pipeline(plain.model(4), mse_loss, microbatches=4, ranks=2, device="cuda")


@pytest.mark.slow
def test_two_hundred_steps_leave_as_many_tensors_as_twenty():
    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    with Pipeline(plain.model(4), mse_loss, microbatches=4, ranks=2, schedule="zb-v") as pipe:
        for n in range(20):
            pipe.step(*plain.batch(n, 8))
        after_twenty = tensors()
        for n in range(180):
            pipe.step(*plain.batch(n, 8))
        assert tensors() <= after_twenty


def test_a_job_runs_once_on_every_rank_of_the_process_and_its_error_comes_back():
    with penstock.Pipeline(plain.model(4), mse_loss, ranks=2, microbatches=2) as pipe:
        names = pipe.on_ranks(lambda rank: (rank, threading.current_thread().name))
        assert names == [(0, "penstock-rank-0"), (1, "penstock-rank-1")]
        updated = [name for rank in pipe.local_ranks for name, _ in pipe.rank_parameters(rank)]
        assert updated == [name for name, _ in pipe.named_parameters()]
        with pytest.raises(ZeroDivisionError):
            pipe.on_ranks(lambda rank: 1 // (1 - rank))


@pytest.mark.parametrize("leaf", [True, False])
def test_arguments_that_require_a_gradient_are_refused(leaf: bool):
    net = plain.model(2)
    x, y = plain.batch(0, 4)
    given = x.requires_grad_() if leaf else x.requires_grad_() * 2
    with Pipeline(net, mse_loss, microbatches=2, ranks=2) as pipe:
        with pytest.raises(BatchError, match="x requires a gradient, which the pipeline would not pass on"):
            pipe.step(given, y)
        with pytest.raises(BatchError, match="y requires a gradient"):
            pipe.step(x.detach(), given, input_grads=True)
        result = pipe.step(given, y, input_grads=True)
        assert result.input_grads is not None
        pipe.evaluate(given, y)
