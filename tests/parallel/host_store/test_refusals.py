"""What a store refuses, and what a failure leaves behind: nothing that is half written."""

from __future__ import annotations

import copy
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.base.errors import ConfigError, PenstockError, ScheduleError, StageError
from penstock.base.host import Memory
from penstock.parallel.host_store import memory
from penstock.parallel.mesh import MeshShape
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.options import ExecutionOptions, ParallelOptions
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.stage.layers import Layer
from tests.support import plain, tied
from tests.support.full_disk import files_of_at_most
from tests.support.groups import outcome
from tests.support.states import assert_equal

MSE = nn.functional.mse_loss
DISK = ParallelOptions(store="disk", window=1)
HOST = ParallelOptions(store="host", window=1)


def pipe_of(net: Any, parallel: ParallelOptions = DISK, **settings: Any) -> Pipeline:
    chosen = {"microbatches": 2, "schedule": "breadth-first", "virtual_stages": 2, **settings}
    return Pipeline(net, chosen.pop("loss_fn", MSE), parallel=parallel, **chosen)


def test_a_window_smaller_than_an_op_needs_is_refused_with_the_least_one():
    with pytest.raises(
        ScheduleError, match="reads the weights of 2 stages, and the window is 1; use at least 2"
    ):
        pipe_of(plain.model(4), schedule="dualpipe-v", ranks=2, microbatches=4, virtual_stages=None)


def test_what_was_not_proved_with_a_store_is_refused_by_name():
    for execution, named in (({"compile": "block"}, "compile='block'"), ({"offload": True}, "offload=True")):
        with pytest.raises(ConfigError, match=named):
            pipe_of(plain.model(4), execution=ExecutionOptions(**execution))


class Marked(nn.Parameter):
    """A parameter of a library's own, as quantised ones are."""


def test_parameters_that_are_not_plain_are_refused_by_name():
    net = plain.model(2)
    net[1][0].weight = Marked(net[1][0].weight.detach())
    with pytest.raises(ConfigError, match=r"1\.0\.weight is a Marked, which a store does not keep"):
        pipe_of(net)
    with torch.device("meta"):
        absent = [Layer(f"{n}", lambda: nn.Linear(12, 12, device="meta")) for n in range(2)]
    with pytest.raises(ConfigError, match=r"0\.weight is on the meta device"):
        pipe_of(absent)


def test_a_sparse_gradient_is_refused_by_name_and_the_weights_stay():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(tied.WORDS, 12, sparse=True), nn.Linear(12, tied.WORDS))
    before = copy.deepcopy(net.state_dict())
    with pipe_of(net, loss_fn=tied.loss_fn) as pipe:
        with pytest.raises(PenstockError, match=r"0\.weight got a sparse gradient"):
            pipe.step(*tied.batch(0))
        assert_equal(dict(net.state_dict()), dict(before))


def test_too_little_host_memory_is_told_with_the_bytes_before_the_first_step(monkeypatch):
    weights = 4 * sum(p.numel() for p in plain.model(4).parameters())
    monkeypatch.setattr(memory, "memory", lambda: Memory(10**9, weights - 1))
    with pytest.raises(ConfigError, match=f"needs {weights:,} bytes .* and {weights - 1:,} are available"):
        pipe_of(plain.model(4), HOST)
    # AdamW keeps two numbers for each weight.
    monkeypatch.setattr(memory, "memory", lambda: Memory(10**9, 3 * weights - 1))
    with (
        pipe_of(plain.model(4), HOST) as pipe,
        pytest.raises(
            ConfigError, match=f"needs {3 * weights:,} bytes .*{2 * weights:,} of them for what the optimizer"
        ),
    ):
        PipelineOptimizer(pipe, torch.optim.AdamW, lr=0.1)


@pytest.mark.filterwarnings("ignore:layer .* of the model's parameters")
def test_too_small_a_disk_is_told_with_the_bytes_before_the_first_step(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    side = int((free / 4) ** 0.5) + 1000
    # Memory of a view is not used until something reads it.
    huge = nn.Parameter(torch.zeros(()).expand(side, side))
    assert huge.nbytes > free
    net = plain.model(2)
    net[1][0].register_parameter("huge", huge)
    with pytest.raises(
        ConfigError, match=r"needs [\d,]+ bytes in .* for the weights and gradients of 1, and [\d,]+ are free"
    ):
        pipe_of(net)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no folder in memory")
def test_a_folder_in_memory_is_refused(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    with pytest.raises(ConfigError, match="which is a tmpfs and so in memory; set TMPDIR"):
        pipe_of(plain.model(4))


def test_no_other_process_finds_a_file_to_change_and_nothing_is_left(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pipe_of(plain.model(4)) as pipe:
        optimizer = PipelineOptimizer(pipe, torch.optim.AdamW, lr=0.1)
        for n in range(2):
            pipe.step(*plain.batch(n, 4))
            optimizer.step()
            assert not list(tmp_path.iterdir())
        assert str(tmp_path) in Path("/proc/self/maps").read_text()


def test_a_disk_that_gets_full_in_a_step_does_not_matter():
    def trained(limit: int) -> dict[str, Tensor]:
        net = plain.model(4)
        with pipe_of(net) as pipe:
            optimizer = PipelineOptimizer(pipe, torch.optim.AdamW, lr=0.1)
            with files_of_at_most(limit):
                for n in range(2):
                    pipe.step(*plain.batch(n, 4))
                    optimizer.step()
        return dict(net.state_dict())

    assert_equal(trained(0), trained(10**9))


class Moody(nn.Module):
    """A layer that fails when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(plain.WIDTH, plain.WIDTH)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ValueError("this layer was told to fail")
        return self.linear(x)


@pytest.mark.parametrize(
    "schedule", [{}, {"schedule": "chimera", "virtual_stages": None}], ids=["once", "twice"]
)
@pytest.mark.parametrize("parallel", [HOST, DISK], ids=["host", "disk"])
def test_a_failed_step_leaves_the_weights_and_the_next_one_is_right(parallel, schedule):
    """Of stages that one rank has, or two."""
    torch.manual_seed(0)
    net = nn.Sequential(*[Moody() for _ in range(4)])
    twin = copy.deepcopy(net)
    with pipe_of(net, parallel, ranks=2, **schedule) as pipe:
        pipe.step(*plain.batch(0, 4))
        for call in (pipe.step, pipe.evaluate):
            net[2].fails = True
            with pytest.raises(StageError, match="told to fail"):
                call(*plain.batch(1, 4))
            net[2].fails = False
            assert_equal(dict(net.state_dict()), dict(twin.state_dict()))
        pipe.zero_grad()
        pipe.step(*plain.batch(2, 4))
        plain.step(twin, MSE, *plain.batch(2, 4), 2)
        plain.require_equal_gradients(net, twin)


def test_a_refused_batch_leaves_the_gradients_of_earlier_steps():
    net, twin = plain.model(4), plain.model(4)
    with pipe_of(net) as pipe:
        pipe.step(*plain.batch(0, 4))
        with pytest.raises(ConfigError):
            pipe.step(plain.batch(1, 4)[0], plain.batch(1, 3)[1])
        pipe.step(*plain.batch(2, 4))
        for n in (0, 2):
            plain.step(twin, MSE, *plain.batch(n, 4), 2)
        plain.require_equal_gradients(net, twin)


@pytest.mark.parametrize(
    "schedule", [{}, {"schedule": "round-trip", "ranks": 2, "virtual_stages": 1}], ids=["once", "twice"]
)
def test_a_model_that_is_converted_under_the_pipeline_is_refused(schedule):
    net = plain.model(4)
    with pipe_of(net, **schedule) as pipe:
        pipe.step(*plain.batch(0, 4))  # whose gradients are of the dtype before
        net.to(torch.bfloat16)
        with pytest.raises(
            PenstockError, match=r"when the pipeline put it into its store, and was made torch\.bfloat16"
        ):
            pipe.step(*plain.batch(0, 4))


def failing(rank: int) -> list[object]:
    torch.manual_seed(0)
    net = nn.Sequential(*[Moody() for _ in range(4)])
    told: list[object] = []
    with pipe_of(net, timeout=60) as pipe:
        before = copy.deepcopy(pipe.state_dict())
        for call in (pipe.step, pipe.evaluate):
            net[3].fails = rank == 1
            told.append(outcome(call, *plain.batch(0, 4)))
            net[3].fails = False
            assert_equal(dict(pipe.state_dict()), dict(before))
            pipe.zero_grad()
        told.append(float(pipe.step(*plain.batch(1, 4)).loss))
    mesh = {"mesh": MeshShape(pp=1, dp=2), "timeout": 60}
    return [*told, outcome(pipe_of, plain.model(4), **mesh)]


@pytest.mark.slow
def test_in_processes_a_layer_that_fails_ends_the_step_on_all_and_replicas_are_refused(
    processes: LocalProcesses,
):
    for stepped, evaluated, loss, replicas in processes.run(2, failing):
        assert "told to fail" in stepped
        assert "told to fail" in evaluated
        assert loss > 0
        assert "holds the weights of one pipeline, and the mesh is" in replicas
