"""Sharded gradients and weights in a pipeline: the same steps as with whole ones, and no more memory than was proved."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.base.errors import PenstockError
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
from penstock.train.model.llama import layers, next_token_loss
from tests.support.groups import outcome, run_cases
from tests.support.lanes import exhaustive, slow
from tests.support.sharded import CONFIG, GROUPS, ROWS, half_frozen, in_bf16, tokens
from tests.support.states import assert_equal

WEIGHTS = {"shard": "weights", "window": 1}
REPLICAS = MeshShape(2, 2)
SETTINGS = {"microbatches": ROWS // 2, "schedule": "interleaved-1f1b", "virtual_stages": 2, "mesh": REPLICAS}
INTERLEAVED = ("interleaved-1f1b", "breadth-first")
CASES: dict[str, tuple[Any, str, dict[str, Any], dict[str, Any]]] = {
    "interleaved": (None, "interleaved-1f1b", WEIGHTS, {}),
    "window 2, reduced every 2": (None, "interleaved-1f1b", {**WEIGHTS, "window": 2, "reduce_every": 2}, {}),
    "breadth-first": (None, "breadth-first", WEIGHTS, {}),
    "zb-v": (None, "zb-v", WEIGHTS, {}),
    "zb-v, gradients": (None, "zb-v", {"shard": "gradients", "reduce_every": 1}, {}),
    "gpipe, all of a rank": (None, "gpipe", {"shard": "weights"}, {}),
    "accumulated": (None, "interleaved-1f1b", WEIGHTS, {"accumulate": 2}),
    "recomputed": (None, "interleaved-1f1b", WEIGHTS, {}),
    "frozen": (half_frozen, "interleaved-1f1b", WEIGHTS, {}),
    "main weights": (in_bf16, "interleaved-1f1b", WEIGHTS, {"main_weights": True}),
}


def pipe_on(given: Any, schedule: str, sharding: Any, mesh: MeshShape = REPLICAS, **options: Any) -> Pipeline:
    virtual = {"virtual_stages": 4 // mesh.pp} if schedule in INTERLEAVED else {}
    settings = {"microbatches": ROWS // 2, "schedule": schedule, "mesh": mesh, **virtual, **options}
    parallel = ParallelOptions(bucket_bytes=4000, **sharding)
    return Pipeline(given or layers(CONFIG), next_token_loss, timeout=120, parallel=parallel, **settings)


def trained(rank: int, case: str, divided: bool) -> tuple:
    given, schedule, sharding, options = CASES[case]
    built = {"recompute": "full"} if case == "recomputed" else {}
    with pipe_on(given and given(), schedule, sharding if divided else {}, **built) as pipe:
        settings = {"groups": GROUPS, "lr": 0.01, "weight_decay": 0.1, "clip": 0.5, "zero": not divided}
        optimizer = PipelineOptimizer(pipe, torch.optim.AdamW, **settings, **options)
        losses = []

        def update(n: int) -> None:
            for k in range(optimizer.accumulate):
                losses.append(pipe.step(*tokens(n + 10 * k)).losses)
                optimizer.step()

        for n in range(3):
            update(n)
        evaluated = pipe.evaluate(*tokens(100)).loss
        weights = copy.deepcopy(pipe.state_dict())
        update(200)  # the values were gathered for the state
        state = copy.deepcopy(optimizer.state_dict())
        return torch.cat(losses), evaluated, weights, state, copy.deepcopy(pipe.state_dict())


SOME = ["window 2, reduced every 2", "zb-v, gradients", "gpipe, all of a rank", "main weights"]


@pytest.mark.parametrize(
    "cases", [*slow(SOME), *exhaustive([case for case in CASES if case not in SOME])], ids=["some", "rest"]
)
def test_steps_are_those_of_whole_weights(processes: LocalProcesses, cases):
    told = iter(run_cases(processes, 4, trained, [(case, way) for case in cases for way in (True, False)]))
    for case, divided, whole in zip(cases, told, told, strict=True):
        loose = 1e-2 if case == "main weights" else 2e-5
        for rank, (ours, theirs) in enumerate(zip(divided, whole, strict=True)):
            assert_equal(ours[0], theirs[0], "losses", loose)
            assert_equal(ours[1], theirs[1], "evaluated", loose)
            assert_equal(dict(ours[2]), dict(theirs[2]), "weights", 2 * loose)
            assert_equal(dict(ours[4]), dict(theirs[4]), "weights", 2 * loose)
            replica = REPLICAS.rank(pp=REPLICAS.coordinate(rank, "pp"))
            assert_equal(dict(ours[4]), dict(divided[replica][4]))
            assert_equal(ours[3], divided[replica][3])


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


def failing(rank: int) -> tuple:
    x, y = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(1)), torch.zeros(ROWS, 16)
    torch.manual_seed(0)
    net = [(f"layer {n}", Moody()) for n in range(4)]
    parallel = ParallelOptions(bucket_bytes=1000, **WEIGHTS)
    with Pipeline(net, nn.functional.mse_loss, timeout=60, parallel=parallel, **SETTINGS) as pipe:
        optimizer = PipelineOptimizer(pipe, torch.optim.AdamW, lr=0.01)
        pipe.step(x, y)
        optimizer.step()
        before = copy.deepcopy(pipe.state_dict())
        told = []
        for call in (pipe.step, pipe.evaluate):
            net[1][1].fails = rank == REPLICAS.rank(pp=1, dp=0)
            told.append(outcome(call, x, y))
            net[1][1].fails = False
            optimizer.zero_grad()
            # Nothing was lost: the weights are those of before, and the next step runs.
            assert_equal(dict(pipe.state_dict()), dict(before))
        told.append(float(pipe.step(x, y).loss))
        optimizer.step()
        pipe.load_state_dict(before)
        told.append(float(pipe.step(x, y).loss))
        return told


@pytest.mark.slow
def test_a_layer_that_fails_on_one_replica_ends_the_step_on_all_and_loses_nothing(processes: LocalProcesses):
    told = processes.run(4, failing)
    for failed, evaluated, loss, again in told:
        assert "told to fail" in failed
        assert "told to fail" in evaluated
        assert loss == told[0][2] == again


def own_model(rank: int, sharding: dict[str, Any]) -> tuple:
    """A model with its own forward, whose first step is compared with its layers', and a weight of both ends."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 4, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    x = torch.randint(0, 64, (ROWS, 16), generator=torch.Generator().manual_seed(3))
    parallel = ParallelOptions(bucket_bytes=10_000, **sharding)
    with Pipeline(model, timeout=120, parallel=parallel, **SETTINGS) as pipe:
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
    ways = [
        {"shard": "optimizer"},
        {"shard": "weights", "reduce_every": 2},
        {"shard": "gradients", "reduce_every": 1},
    ]
    expected, *found = run_cases(processes, 4, own_model, [(way,) for way in ways])
    for told in found:
        for ours, theirs in zip(told, expected, strict=True):
            assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
            for k in (1, 2):  # the whole model's, and what the process has once the pipeline is closed
                for name, value in ours[k].items():
                    torch.testing.assert_close(value, theirs[k][name], rtol=1e-5, atol=1e-4)


def between_steps(rank: int, shard: str) -> tuple:
    """What a program may do between two steps."""
    with pipe_on(None, "interleaved-1f1b", {"shard": shard}, MeshShape(1, 2)) as pipe:
        optimizer = PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1)
        losses = [float(pipe.step(*tokens(0)).loss)]
        optimizer.step()
        refused = ""
        if shard != "optimizer":
            groups = [{"match": "norm|embedding|head|bias", "optimizer": torch.optim.SGD, "lr": 0.1}]
            refused = outcome(PipelineOptimizer, pipe, torch.optim.Muon, groups=groups, lr=0.1)
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


@pytest.mark.parametrize("shard", ["weights", *slow("gradients")])
def test_between_steps_sharded_weights_are_like_whole_ones(processes: LocalProcesses, shard: str):
    told, whole = run_cases(processes, 2, between_steps, [(shard,), ("optimizer",)])
    for (losses, norm, refused), (wanted, of_whole, _) in zip(told, whole, strict=True):
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert norm == pytest.approx(of_whole, rel=1e-5)
        assert f"which shard={shard!r} does not divide; use shard='optimizer'" in refused


class Bounded(nn.Linear):
    """Keeps its weight in bounds: in place, or by another tensor; neither changes the weight's version."""

    def __init__(self, in_place: bool) -> None:
        super().__init__(16, 16)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            self.weight.data.clamp_(min=-0.05)
        else:
            self.weight.data = self.weight.data.clamp(min=-0.05)
        return super().forward(x)


class Rotation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).abs() * self.scale


def written(rank: int, shard: str, how: str, dtype: torch.dtype = torch.float32) -> tuple:
    """Steps of layers that write into their weights, and of a program that does before the optimizer's step."""
    torch.manual_seed(0)
    net = nn.Sequential(Bounded(True), Rotation(), Bounded(False), nn.Linear(16, 16))
    if dtype != torch.float32:
        net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).to(dtype)
    x, y = torch.randn(ROWS, 16).to(dtype), torch.randn(ROWS, 16).to(dtype)
    options = {"microbatches": ROWS // 2, "mesh": MeshShape(1, 2), "timeout": 120}
    parallel = ParallelOptions(bucket_bytes=1000, shard=shard)
    with Pipeline(net, nn.functional.mse_loss, parallel=parallel, **options) as pipe:
        main_weights = dtype != torch.float32
        optimizer = PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1, main_weights=main_weights)
        losses = []
        for _ in range(3):
            losses.append(float(pipe.step(x, y).loss))
            absent = [p.isnan().all().item() for p in pipe.parameters()]
            pipe.gather_weights()
            for p in pipe.parameters():
                if how == "in place":
                    p.data.mul_(0.5)
                elif how == "given":
                    p.data = p.data * 0.5
            optimizer.step()
        return losses, pipe.full_state_dict(), absent


@pytest.mark.slow
def test_what_layers_and_programs_write_into_weights_is_kept_as_without_shards(processes: LocalProcesses):
    hows = ("not", "in place", "given")
    shards = ("none", "optimizer", "gradients", "weights")
    cases = [(how, dtype) for how in hows for dtype in (torch.float32, torch.bfloat16)]
    cases.remove(("in place", torch.bfloat16))  # main weights do not see what is written by .data
    told = iter(run_cases(processes, 2, written, [(s, *case) for case in cases for s in shards]))
    for _ in cases:
        whole = next(told)
        for shard in shards[1:]:
            for ours, theirs in zip(next(told), whole, strict=True):
                assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
                assert_equal(ours[1], theirs[1], "weights", 1e-5)
                assert set(ours[2]) == {shard == "weights"}


class Reads(nn.Module):
    """A layer whose weight gradients need weights: as inputs of products, or in a hook."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.keys, self.values = how, nn.Linear(16, 16), nn.Linear(16, 16)
        self.down, self.up = (nn.Parameter(torch.randn(4, 16) / 4) for _ in range(2))
        if how == "hook":
            weight = self.keys.weight
            weight.register_hook(lambda grad: grad + 0.01 * weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        match self.how:
            case "merged":
                weight = self.keys.weight + self.up.t() @ self.down
                return self.values(nn.functional.linear(x, weight, self.keys.bias))
            case "queries":
                return x + torch.softmax(x @ self.keys(self.up).t(), -1) @ self.values(self.down)
        return self.values(self.keys(x))


def reading(rank: int, schedule: str, sharding: dict[str, Any]) -> tuple:
    torch.manual_seed(0)
    net = nn.Sequential(*map(Reads, ("merged", "queries", "hook", "merged")))
    x, y = torch.randn(ROWS, 16), torch.randn(ROWS, 16)
    options = {"microbatches": ROWS // 2, "mesh": REPLICAS, "schedule": schedule, "timeout": 120}
    parallel = ParallelOptions(bucket_bytes=1000, **sharding)
    with Pipeline(net, nn.functional.mse_loss, parallel=parallel, **options) as pipe:
        optimizer = PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1)
        losses = []
        for _ in range(2):
            losses.append(float(pipe.step(x, y).loss))
            optimizer.step()
        return losses, pipe.full_state_dict()


@pytest.mark.slow
def test_weights_that_w_would_read_may_be_sharded(processes: LocalProcesses):
    cases = [(name, way) for name in ("zb-v", "v-half") for way in ({"shard": "optimizer"}, WEIGHTS)]
    told = iter(run_cases(processes, 4, reading, cases))
    for whole, divided in zip(told, told, strict=True):
        for ours, theirs in zip(divided, whole, strict=True):
            assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
            assert_equal(ours[1], theirs[1], "weights", 1e-5)


def traced(rank: int, sharding: dict[str, Any]) -> tuple:
    """What the traces of a step and of an evaluation tell, and what the Program says of them."""
    with pipe_on(None, "breadth-first", sharding) as pipe:
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


@pytest.mark.parametrize("sharding", [{**WEIGHTS, "reduce_every": 2}, *slow({"shard": "gradients"})])
def test_the_trace_has_the_gathers_and_reductions_of_the_program(
    processes: LocalProcesses, sharding, tmp_path
):
    told = processes.run(4, traced, sharding)
    require_program(told, sharding)
    text = write(tmp_path / "run.html", [StepAnalysis("step 1", told[0][0])], title="a run").read_text()
    assert ("+ gather of weights" in text) == (sharding["shard"] == "weights")


def require_program(told: list[tuple], sharding: dict[str, Any]) -> None:
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


def leaving(rank: int) -> str:
    """One rank's own code fails between two steps, while the others are in the next one."""
    try:
        with pipe_on(None, "interleaved-1f1b", WEIGHTS) as pipe:
            optimizer = PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1)
            pipe.step(*tokens(0))
            optimizer.step()
            if rank == 0:
                raise KeyError("a mistake of the program")
            pipe.step(*tokens(1))
    except (KeyError, PenstockError) as error:
        return type(error).__name__
    return "nothing"


@pytest.mark.slow
def test_an_error_of_one_program_ends_the_others_with_an_error(processes: LocalProcesses):
    told = processes.run(4, leaving)
    assert told[0] == "KeyError"
    assert set(told[1:]) <= {"PeerError", "CallOrderError"}
