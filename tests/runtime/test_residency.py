"""Sharded gradients and weights in a pipeline: the same steps as with whole ones, and no more memory than was proved."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.base.errors import ConfigError, PenstockError
from penstock.parallel.mesh import MeshShape
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.options import ParallelOptions
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.schedule.ops import Kind
from penstock.schedule.residency import make_residency
from penstock.show.analysis import StepAnalysis
from penstock.show.report import write
from penstock.trace.events import Activity
from penstock.train.config.sections import ModelConfig
from penstock.train.model.llama import layers, next_token_loss
from tests.support.groups import run_cases
from tests.support.states import assert_equal

CONFIG = ModelConfig(vocabulary=32, width=16, layers=8, heads=4, kv_heads=2, hidden=32)
GROUPS = [{"match": r"norm|embedding", "weight_decay": 0.0, "lr": 0.02}]
M, STEPS = 8, 3


def tokens(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    found = torch.randint(0, 32, (M, 9), generator=generator)
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


def half_frozen() -> list[tuple[str, nn.Module]]:
    torch.manual_seed(0)
    parts = [(layer.name, layer.build()) for layer in layers(CONFIG)]
    for _, part in parts[2:5]:
        part.requires_grad_(False)
    return parts


def in_bf16() -> list[tuple[str, nn.Module]]:
    torch.manual_seed(0)
    return [(layer.name, layer.build().bfloat16()) for layer in layers(CONFIG)]


WEIGHTS = {"shard": "weights", "window": 1}
CASES: dict[str, tuple[Any, str, dict[str, Any], dict[str, Any]]] = {
    "interleaved": (None, "interleaved-1f1b", WEIGHTS, {}),
    "interleaved, window 2, reduced every 2": (
        None,
        "interleaved-1f1b",
        {"shard": "weights", "window": 2, "reduce_every": 2},
        {},
    ),
    "breadth-first": (None, "breadth-first", WEIGHTS, {}),
    "zb-v": (None, "zb-v", WEIGHTS, {}),
    "zb-v, gradients": (None, "zb-v", {"shard": "gradients", "reduce_every": 1}, {}),
    "gpipe, all of a rank": (None, "gpipe", {"shard": "weights"}, {}),
    "accumulated": (None, "interleaved-1f1b", WEIGHTS, {"accumulate": 2}),
    "recomputed": (None, "interleaved-1f1b", WEIGHTS, {"recompute": "full"}),
    "frozen": (half_frozen, "interleaved-1f1b", WEIGHTS, {}),
    "main weights": (in_bf16, "interleaved-1f1b", WEIGHTS, {"main_weights": True}),
}


def pipe_on(mesh: MeshShape, parts: Any, schedule: str, sharding: Any, **options: Any) -> Pipeline:
    virtual = (
        {"virtual_stages": 4 if mesh.pp == 1 else 2}
        if schedule in ("interleaved-1f1b", "breadth-first")
        else {}
    )
    return Pipeline(
        parts or layers(CONFIG),
        next_token_loss,
        microbatches=M // mesh.dp,
        schedule=schedule,
        mesh=mesh,
        timeout=120,
        parallel=ParallelOptions(bucket_bytes=4000, **sharding),
        **virtual,
        **options,
    )


def trained(rank: int, mesh: MeshShape, case: str, divided: bool) -> tuple:
    parts, schedule, sharding, options = CASES[case]
    settings = dict(options)
    built = {"recompute": settings.pop("recompute")} if "recompute" in settings else {}
    with pipe_on(mesh, parts and parts(), schedule, sharding if divided else {}, **built) as pipe:
        optimizer = PipelineOptimizer(
            pipe,
            torch.optim.AdamW,
            groups=GROUPS,
            lr=0.01,
            weight_decay=0.1,
            clip=0.5,
            zero=not divided,
            **settings,
        )
        losses = []

        def update(n: int) -> None:
            for k in range(optimizer.accumulate):
                losses.append(pipe.step(*tokens(n + 10 * k)).losses)
                optimizer.step()

        for n in range(STEPS):
            update(n)
        evaluated = pipe.evaluate(*tokens(100)).loss
        weights = copy.deepcopy(pipe.state_dict())
        update(200)  # the values were gathered for the state
        state = copy.deepcopy(optimizer.state_dict())
        return torch.cat(losses), evaluated, weights, state, copy.deepcopy(pipe.state_dict())


@pytest.fixture(scope="module")
def told(processes: LocalProcesses) -> dict[tuple, list]:
    cases = [(MeshShape(2, 2), case, divided) for case in CASES for divided in (True, False)]
    return {c[1:]: t for c, t in zip(cases, run_cases(processes, 4, trained, cases), strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_whole_weights(told, case: str):
    loose = 1e-2 if case == "main weights" else 2e-5
    for rank, (ours, theirs) in enumerate(zip(told[case, True], told[case, False], strict=True)):
        torch.testing.assert_close(ours[0], theirs[0], rtol=loose, atol=loose)
        torch.testing.assert_close(ours[1], theirs[1], rtol=loose, atol=loose)
        for mine, other in ((ours[2], theirs[2]), (ours[4], theirs[4])):
            assert mine.keys() == other.keys()
            for name in mine:
                torch.testing.assert_close(mine[name], other[name], rtol=loose, atol=2 * loose)
        replica = MeshShape(2, 2).rank(pp=MeshShape(2, 2).coordinate(rank, "pp"))
        assert_equal(dict(ours[4]), dict(told[case, True][replica][4]))
        assert_equal(ours[3], told[case, True][replica][3])


class Moody(nn.Module):
    """A layer that fails on one replica when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ValueError("this layer was told to fail")
        return x + self.linear(x)


def moody_layers() -> list[tuple[str, nn.Module]]:
    torch.manual_seed(0)
    return [(f"layer {n}", Moody()) for n in range(8)]


def failing(rank: int, divided: bool) -> tuple:
    x, y = torch.randn(M, 16, generator=torch.Generator().manual_seed(1)), torch.zeros(M, 16)
    mesh = MeshShape(2, 2)
    with Pipeline(
        moody_layers(),
        nn.functional.mse_loss,
        microbatches=M // 2,
        schedule="interleaved-1f1b",
        virtual_stages=2,
        mesh=mesh,
        timeout=60,
        parallel=ParallelOptions(bucket_bytes=1000, **(WEIGHTS if divided else {})),
    ) as pipe:
        optimizer = PipelineOptimizer(pipe, torch.optim.AdamW, lr=0.01)
        told = []
        pipe.step(x, y)
        optimizer.step()
        before = copy.deepcopy(pipe.state_dict())
        layer = next(
            m
            for module in pipe.stage_modules()
            for _, layer in module.named_layers()
            for m in layer.modules()
            if isinstance(m, Moody)
        )
        for call in (pipe.step, pipe.evaluate):
            layer.fails = rank == mesh.rank(pp=1, dp=0)
            with pytest.raises(PenstockError) as caught:
                call(x, y)
            told.append(str(caught.value))
            layer.fails = False
            optimizer.zero_grad()
            # Nothing was lost: the weights are those of before, and the next step runs.
            assert_equal(dict(pipe.state_dict()), dict(before))
        told.append(float(pipe.step(x, y).loss))
        optimizer.step()
        pipe.load_state_dict(before)
        told.append(float(pipe.step(x, y).loss))
        return told


def test_a_layer_that_fails_on_one_replica_ends_the_step_on_all_and_loses_nothing(processes: LocalProcesses):
    for divided in (True, False):
        told = processes.run(4, failing, divided)
        for failed, evaluated, loss, again in told:
            assert "told to fail" in failed
            assert "told to fail" in evaluated
            assert loss == told[0][2] == again


def own_model(rank: int, sharding: dict[str, Any]) -> tuple:
    """A model with its own forward, whose first step is compared with its layers', and a weight of both ends."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64,
            n_positions=32,
            n_embd=32,
            n_layer=6,
            n_head=4,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
        )
    )
    x = torch.randint(0, 64, (M, 16), generator=torch.Generator().manual_seed(3))
    with Pipeline(
        model,
        microbatches=M // 2,
        schedule="interleaved-1f1b",
        virtual_stages=2,
        mesh=MeshShape(2, 2),
        timeout=120,
        parallel=ParallelOptions(bucket_bytes=10_000, **sharding),
    ) as pipe:
        optimizer = PipelineOptimizer(pipe, torch.optim.AdamW, lr=0.01, clip=1.0)
        losses = []
        for _ in range(3):
            losses.append(float(pipe.step({"input_ids": x, "labels": x}).loss))
            optimizer.step()
        state = pipe.full_state_dict()
        losses.append(float(pipe.evaluate({"input_ids": x, "labels": x}).loss))
        again = PipelineOptimizer(pipe, torch.optim.SGD, lr=0.01)
        losses.append(float(pipe.step({"input_ids": x, "labels": x}).loss))
        again.step()
    return losses, state, {n: p.detach().clone() for n, p in pipe.named_parameters()}


@pytest.mark.slow
def test_a_model_with_a_tied_weight_and_its_own_forward_and_a_second_optimizer(processes: LocalProcesses):
    pytest.importorskip("transformers")
    expected = processes.run(4, own_model, {"shard": "optimizer"})
    for sharding in ({"shard": "weights", "reduce_every": 2}, {"shard": "gradients", "reduce_every": 1}):
        for ours, theirs in zip(processes.run(4, own_model, sharding), expected, strict=True):
            assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
            for k in (1, 2):  # the whole model's, and what the process has once the pipeline is closed
                for name, value in ours[k].items():
                    torch.testing.assert_close(value, theirs[k][name], rtol=1e-5, atol=1e-4)


def between_steps(rank: int, shard: str) -> tuple:
    """What a program may do between two steps."""
    with pipe_on(MeshShape(2, 2), None, "interleaved-1f1b", {"shard": shard}) as pipe:
        optimizer = PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1)
        losses = [float(pipe.step(*tokens(0)).loss)]
        optimizer.step()
        refused = ""
        if shard != "optimizer":
            groups = [{"match": "norm|embedding|head|bias", "optimizer": torch.optim.SGD, "lr": 0.1}]
            with pytest.raises(ConfigError) as caught:
                PipelineOptimizer(pipe, torch.optim.Muon, groups=groups, lr=0.1)
            refused = str(caught.value)
        losses.append(float(pipe.evaluate(*tokens(1)).loss))  # the first optimizer's shards are still used
        pipe.step(*tokens(1))
        pipe.zero_grad()  # drops what was reduced, too
        optimizer.zero_grad()
        losses.append(float(pipe.step(*tokens(1)).loss))
        norm = float(pipe.clip_grad_norm_(1e9))
        optimizer.step()
        for value in pipe.state_dict().values():
            value.mul_(0.5)  # these tensors are those that train
        losses.append(float(pipe.step(*tokens(2)).loss))
        return losses, norm, refused


def test_between_steps_sharded_weights_are_like_whole_ones(processes: LocalProcesses):
    expected = processes.run(4, between_steps, "optimizer")
    for shard in ("weights", "gradients"):
        for (losses, norm, refused), (wanted, of_whole, _) in zip(
            processes.run(4, between_steps, shard), expected, strict=True
        ):
            assert losses == pytest.approx(wanted, rel=1e-5)
            assert norm == pytest.approx(of_whole, rel=1e-5)
            assert f"which shard={shard!r} does not divide; use shard='optimizer'" in refused


def traced(rank: int, sharding: dict[str, Any]) -> tuple:
    """What the traces of a step and of an evaluation tell, and what the Program says of them."""
    with pipe_on(MeshShape(2, 2), None, "breadth-first", sharding) as pipe:
        optimizer = PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1)
        pipe.step(*tokens(0))
        optimizer.step()
        pipe.step(*tokens(0))
        step = pipe.gather_trace()
        optimizer.step()
        pipe.state_dict()  # gathers too, but not in a step
        later = pipe.gather_trace()
        pipe.evaluate(*tokens(1))
        evaluated = pipe.gather_trace()
        return step, later, evaluated, pipe.schedule


@pytest.mark.parametrize("sharding", [{**WEIGHTS, "reduce_every": 2}, {"shard": "gradients"}])
def test_the_trace_has_the_gathers_and_reductions_of_the_program(
    processes: LocalProcesses, sharding: dict[str, Any], tmp_path: Path
):
    told = processes.run(4, traced, sharding)
    for step, later, evaluated, schedule in told:
        residency = make_residency(schedule, ParallelOptions(**sharding).sharding)
        for name in ("kind", "start", "end"):
            assert getattr(step, name).tolist() == getattr(later, name).tolist()
        assert step.start.min() == 0
        for rank, rows in enumerate(step.rank_slices()):
            local = step.select(rows)
            gathers, reductions = local.only([Activity.GATHER]), local.only([Activity.REDUCE])
            assert gathers.stage.tolist() == [run.stage for run in residency.runs[rank]]
            assert reductions.stage.tolist() == [stage for _, stage in residency.reductions[rank]]
            ops = local.only([Activity(kind) for kind in Kind])
            first = schedule.rows(rank).start
            for n, run in enumerate(residency.runs[rank]):
                before = run.gathered - first - 1
                assert before < 0 or gathers.start[n] >= ops.end[before]
                assert gathers.start[n] <= gathers.end[n] <= ops.end[run.first - first]
            for n, (row, _) in enumerate(residency.reductions[rank]):
                assert reductions.end[n] >= reductions.start[n] >= ops.end[row - first]
        assert not len(evaluated.only([Activity.REDUCE]))
        stages = sorted(evaluated.only([Activity.GATHER]).stage.tolist())
        assert stages == (list(range(schedule.stages)) if sharding["shard"] == "weights" else [])
    text = write(tmp_path / "run.html", [StepAnalysis("step 1", told[0][0])], title="a run").read_text()
    assert ("+ gather of weights" in text) == (sharding["shard"] == "weights")


def leaving(rank: int) -> str:
    """One rank's own code fails between two steps, while the others are in the next one."""
    try:
        with pipe_on(MeshShape(2, 2), None, "interleaved-1f1b", WEIGHTS) as pipe:
            optimizer = PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1)
            pipe.step(*tokens(0))
            optimizer.step()
            if rank == 0:
                raise KeyError("a mistake of the program")
            pipe.step(*tokens(1))
    except (KeyError, PenstockError) as error:
        return type(error).__name__
    return "nothing"


def test_an_error_of_one_program_ends_the_others_with_an_error(processes: LocalProcesses):
    told = processes.run(4, leaving)
    assert told[0] == "KeyError"
    assert set(told[1:]) <= {"PeerError", "CallOrderError"}
