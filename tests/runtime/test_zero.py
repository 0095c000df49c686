"""ZeRO-1 in a pipeline: the optimizer divided among replicas takes the steps of the whole one."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import CosineAnnealingLR

from penstock.parallel.mesh import MeshShape
from penstock.runtime.optim.grad_scaler import GradScaler
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.options import ParallelOptions
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.train.model.llama import layers, next_token_loss
from tests.support import plain, tied
from tests.support.groups import outcome, run_cases
from tests.support.lanes import exhaustive, slow
from tests.support.sharded import CONFIG, GROUPS, ROWS, half_frozen, in_bf16, tokens
from tests.support.states import assert_equal, joined


def pipe_on(mesh: MeshShape, given: Any = None, schedule: str = "1f1b", **options: Any) -> Pipeline:
    small = ParallelOptions(bucket_bytes=4000)
    settings = {"microbatches": ROWS // mesh.dp, "schedule": schedule, "mesh": mesh, "parallel": small}
    return Pipeline(given or layers(CONFIG), next_token_loss, timeout=300, **settings, **options)


def adamw(pipe: Pipeline, **options: Any) -> PipelineOptimizer:
    settings = {"groups": GROUPS, "lr": 0.01, "weight_decay": 0.1, "clip": 0.5}
    return PipelineOptimizer(pipe, torch.optim.AdamW, **{**settings, **options})


def cosine(optimizer: torch.optim.Optimizer) -> CosineAnnealingLR:
    return CosineAnnealingLR(optimizer, 10)


CASES = {
    "plain": (None, "1f1b", {}),
    "fused, accumulated": (None, "zb-h1", {"fused": True, "accumulate": 2}),
    "scheduled": (None, "interleaved-1f1b", {"lr_scheduler": cosine, "clip": math.inf}),
    "frozen": (half_frozen, "gpipe", {"clip": None}),
    "main weights": (in_bf16, "1f1b", {"main_weights": True, "clip": None}),
    "both ends on two ranks": (None, "chimera", {}),
}


def trained(rank: int, mesh: MeshShape, case: str, zero: Any) -> tuple:
    given, schedule, options = CASES[case]
    virtual = {"virtual_stages": 2} if schedule == "interleaved-1f1b" else {}
    with pipe_on(mesh, given and given(), schedule, **virtual) as pipe:
        optimizer = adamw(pipe, zero=zero, **options)
        before = copy.deepcopy(pipe.state_dict())
        count = 4 if optimizer.accumulate > 1 else 3
        taken = ((pipe.step(*tokens(n)).losses, optimizer.step()) for n in range(count))
        losses, done = zip(*taken, strict=True)
        state = copy.deepcopy((pipe.state_dict(), optimizer.state_dict()))
        assert (optimizer.shards is not None) == bool(zero)
        return losses, done, state, optimizer.state_bytes(), before


REPLICAS, CUT = MeshShape(2, 2, 1), MeshShape(1, 2, 2)


BOTH = (True, "overlap")


@pytest.mark.parametrize(
    ("mesh", "case", "ways"),
    [
        *slow(
            (REPLICAS, "plain", BOTH),
            (REPLICAS, "scheduled", (True,)),
            (REPLICAS, "main weights", ("overlap",)),
        ),
        *slow((REPLICAS, "both ends on two ranks", ("overlap",)), (CUT, "plain", ("overlap",))),
        *exhaustive(
            (REPLICAS, "fused, accumulated", BOTH), (REPLICAS, "frozen", BOTH), (CUT, "main weights", BOTH)
        ),
    ],
)
def test_a_divided_optimizer_takes_the_steps_of_the_whole_one(
    processes: LocalProcesses, mesh, case: str, ways
):
    whole, *divided = run_cases(processes, 4, trained, [(mesh, case, zero) for zero in (False, *ways)])
    for each in divided:
        compare(each, whole, mesh, case)


def compare(divided: list, whole: list, mesh: MeshShape, case: str) -> None:
    # The norm of two halves is that of the whole but for its last bit, and clipping brings that into everything.
    tolerance = 0.0 if CASES[case][2].get("clip", 0.5) in (None, math.inf) else 1e-6
    for rank, (ours, theirs) in enumerate(zip(divided, whole, strict=True)):
        assert_equal(torch.stack(ours[0]), torch.stack(theirs[0]), "losses", tolerance)
        for done, wanted in zip(ours[1], theirs[1], strict=True):
            assert (done.applied, done.lr) == (wanted.applied, wanted.lr)
            assert (done.grad_norm is None) == (wanted.grad_norm is None)
            if done.grad_norm is not None:
                torch.testing.assert_close(done.grad_norm, wanted.grad_norm, rtol=1e-6, atol=0)
        assert_equal(dict(ours[2][0]), dict(theirs[2][0]), "weights", tolerance)
        assert_equal(ours[2][1], theirs[2][1], "state", tolerance)
        first = divided[mesh.rank(pp=mesh.coordinate(rank, "pp"))]
        assert_equal(dict(ours[2][0]), dict(first[2][0]))
        assert_equal(ours[2][1], first[2][1])
        assert ours[1] == divided[0][1]
        assert any(not torch.equal(value, ours[4][name]) for name, value in ours[2][0].items())
    for place in range(mesh.pp):
        for part in range(mesh.tp):
            pair = [mesh.rank(pp=place, dp=replica, tp=part) for replica in range(2)]
            assert sum(divided[rank][3] for rank in pair) == pytest.approx(whole[pair[0]][3], rel=0.01)


def train_tied(rank: int, mesh: MeshShape | None) -> tuple[dict[str, Tensor], list[Tensor]]:
    options: dict[str, Any] = {"ranks": 1, "microbatches": 4}
    if mesh:
        options = {"mesh": mesh, "microbatches": 2, "parallel": ParallelOptions(bucket_bytes=512)}
    with Pipeline(tied.model(), tied.loss_fn, timeout=300, **options) as pipe:
        settings = {"lr": 0.01, "weight_decay": 0.3, "clip": 0.5, "zero": "overlap" if mesh else False}
        optimizer = PipelineOptimizer(pipe, torch.optim.AdamW, **settings)
        for n in range(3):
            pipe.step(*tied.batch(n))
            optimizer.step()
        weights = {n: p.detach().clone() for n, p in pipe.named_parameters()}
        table = [v for n, v in pipe.state_dict().items() if n in ("0.weight", "5.weight")]
        return weights, [t.clone() for t in table]


def test_a_tied_weight_stays_one(processes: LocalProcesses):
    whole, _ = train_tied(0, None)
    for weights, views in processes.run(4, train_tied, MeshShape(2, 2, 1)):
        assert all(torch.equal(view, views[0]) for view in views)
        for name, value in weights.items():
            torch.testing.assert_close(value, whole[name], rtol=0, atol=1e-5)


class Poisoned(nn.Module):
    """A layer whose weight gets NaN for a gradient when the input has a mark, its output is sound; another is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(plain.WIDTH, plain.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.inner.weight
        if (x == 8.0).any():
            raise ValueError("it has to fail")
        if (x == 9.0).any():
            weight = weight + (weight * 0).square().sqrt()  # 0, with a slope of 0 times infinity
        return nn.functional.linear(x, weight, self.inner.bias)


def pair(mesh: MeshShape | None) -> Pipeline:
    torch.manual_seed(0)
    net = nn.Sequential(Poisoned(), nn.Linear(plain.WIDTH, plain.WIDTH))
    ranks = None if mesh else 1
    return Pipeline(net, mse_loss, microbatches=2, mesh=mesh, ranks=ranks, timeout=300)


def refused(rank: int) -> dict[str, str]:
    """What is said of each misuse; nothing of it changes a weight."""
    said: dict[str, str] = {}
    x, y = plain.batch(0, 8)
    marked = x.clone()
    marked[5, 0] = 9.0  # in the second replica
    with pair(MeshShape(2, 2, 1)) as pipe:
        optimizer = PipelineOptimizer(pipe, torch.optim.AdamW, lr=0.01, zero="overlap")
        pipe.step(x, y)
        optimizer.step()
        before = copy.deepcopy(pipe.state_dict())
        said["nan"] = outcome(pipe.step, marked, y)
        said["pending"] = outcome(pipe.step, x, y)
        optimizer.zero_grad()
        assert_equal(dict(pipe.state_dict()), dict(before))
        pipe.step(x, y)
        assert optimizer.step().applied
        assert any(not torch.equal(v, before[n]) for n, v in pipe.state_dict().items())
        said["value"] = outcome(PipelineOptimizer, pipe, torch.optim.AdamW, zero="later")
        PipelineOptimizer(pipe, torch.optim.AdamW)
        said["replaced"] = outcome(optimizer.step)
    return said


def test_what_cannot_be_is_refused_on_every_process_and_changes_no_weight(processes: LocalProcesses):
    for said in processes.run(4, refused):
        assert said["nan"].startswith("NonFiniteError: step 2: the gradient of a weight of stage 0 is NaN")
        assert "wait for the optimizer's step() or zero_grad()" in said["pending"]
        assert "zero must be False, True or 'overlap', got 'later'" in said["value"]
        assert "a later PipelineOptimizer was made for this pipeline" in said["replaced"]


def by_hand(pipe: Pipeline) -> None:
    for p in pipe.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)


CHANGES: dict[str, Callable[[Pipeline], object]] = {
    "clipped": lambda pipe: nn.utils.clip_grad_norm_(pipe.parameters(), 1.0),
    "clipped by value": lambda pipe: nn.utils.clip_grad_value_(pipe.parameters(), 1.0),
    "scaled": by_hand,
    "read": lambda pipe: [p.grad.norm() for p in pipe.parameters() if p.grad is not None],
    "copied": lambda pipe: [p.grad.data for p in pipe.parameters() if p.grad is not None],
}


def with_torch(rank: int, mesh: MeshShape, shard: str) -> tuple[list[str], bool]:
    """What is said where a program changes gradients that are divided; do training and evaluation go on after it?"""
    x, y = plain.batch(0, 8)
    net = plain.model(2)
    parallel = ParallelOptions(shard=shard)
    with Pipeline(net, mse_loss, microbatches=2, mesh=mesh, parallel=parallel, timeout=60) as pipe:
        optimizer = PipelineOptimizer(pipe, torch.optim.AdamW, lr=0.01, zero=True)
        pipe.step(x, y)
        said = [outcome(change, pipe) for change in CHANGES.values()]
        pipe.evaluate(x, y)
        assert optimizer.step().applied
        assert all(p.grad is None for p in pipe.parameters())
        pipe.step(x, y)
        said.append(repr(next(pipe.parameters()).grad))
        optimizer.zero_grad()
        pipe.step(x, y)
        optimizer.step()
        pipe.step(x, y)
    return said, all(p.grad is None for p in net.parameters())


@pytest.mark.slow
def test_changing_gradients_that_are_divided_is_refused_and_does_not_pass_in_silence(
    processes: LocalProcesses,
):
    for stages, shards in ((1, ["none", "optimizer", "weights"]), (2, ["none", "gradients"])):
        cases = [(MeshShape(stages, 2, 1), shard) for shard in shards]
        for ranks in run_cases(processes, 2 * stages, with_torch, cases):
            for (*said, shown), empty in ranks:
                for told in said:
                    assert "divided among the replicas" in told
                    assert "pipe.clip_grad_norm_" in told
                assert shown.startswith("DividedGradient(")
                assert empty


def drop_named(pipe: Pipeline) -> None:
    for name, p in pipe.named_parameters():
        if name.endswith("weight"):
            p.grad = None


def replace_one(pipe: Pipeline) -> None:
    for name, p in pipe.named_parameters():
        if name == "1.weight":
            p.grad = torch.ones_like(p)


DROPS: dict[str, Callable[[nn.Module, Pipeline], object]] = {
    "one layer": lambda net, pipe: net[1].zero_grad(),
    "clipped": lambda net, pipe: net[1].zero_grad(),
    "by name": lambda net, pipe: drop_named(pipe),
    "on one replica": lambda net, pipe: pipe.replica or drop_named(pipe),
    "replaced": lambda net, pipe: replace_one(pipe),
}


def dropped(rank: int, shard: str, zero: Any, ways: list[str]) -> dict[str, Any]:
    """Weights after gradients were dropped through the model, with a batch that is skipped; or what is said against it."""
    done: dict[str, Any] = {}
    bad = {1: 9.0, 3: 8.0}  # marks by step
    for way in ways:
        torch.manual_seed(0)
        linear = [nn.Linear(plain.WIDTH, plain.WIDTH) for _ in range(3)]
        net = nn.Sequential(Poisoned(), *linear)
        with Pipeline(
            net, mse_loss, microbatches=2, mesh=MeshShape(2, 2, 1), timeout=60, parallel=ParallelOptions(shard=shard),
            schedule="interleaved-1f1b", virtual_stages=2,
        ) as pipe:  # fmt: skip
            clip = 0.1 if way == "clipped" else None
            optimizer = PipelineOptimizer(pipe, torch.optim.AdamW, lr=0.01, zero=zero, clip=clip)
            for n in range(5):
                x, y = plain.batch(n, 8)
                x[5, 0] = bad.get(n, x[5, 0])  # in the second replica
                assert (outcome(pipe.step, x, y) == "ok") == (n not in bad)
                if n in (1, 2, 3):
                    net.zero_grad()
                    continue
                DROPS[way](net, pipe)
                pipe.evaluate(x, y)
                done[way] = outcome(optimizer.step)
                if done[way] != "ok":
                    done[way, "next"] = outcome(pipe.step, x, y)
                    break
            else:
                done[way] = pipe.full_state_dict()
    return done


@pytest.mark.slow
def test_gradients_that_a_program_drops_are_dropped_and_those_it_replaces_are_refused(
    processes: LocalProcesses,
):
    right = ["one layer", "clipped", "by name"]
    sharded = [("none", True), ("none", "overlap"), ("gradients", False), ("weights", False)]
    whole, *cases = run_cases(
        processes, 4, dropped, [("none", False, right), *((*each, [*DROPS]) for each in sharded)]
    )
    for (shard, _), ranks in zip(sharded, cases, strict=True):
        for done in ranks:
            for way in right:
                # The norm of divided gradients has another order of sums.
                tolerance = 1e-6 if way == "clipped" and shard != "none" else 0.0
                assert_equal(done[way], whole[0][way], tolerance=tolerance)
            assert "was set to None on some of the processes that divide its update" in done["on one replica"]
            assert "the gradient of 1.weight was replaced" in done["replaced"]
            after = {way: done[way, "next"] for way in ("on one replica", "replaced")}
            if shard == "none":
                assert all(
                    "wait for the optimizer's step() or zero_grad()" in text for text in after.values()
                )
            else:
                assert (
                    "the gradients of earlier steps were dropped on some replicas" in after["on one replica"]
                )
                assert "the gradient of 1.weight was replaced" in after["replaced"]


def overflowing(rank: int, zero: bool) -> list[tuple[bool, float]]:
    x, y = plain.batch(0, 8)
    marked = x.clone()
    marked[5, 0] = 9.0
    with pair(MeshShape(1, 2, 1)) as pipe:
        scaler = GradScaler(init_scale=8.0, growth_interval=2)
        optimizer = PipelineOptimizer(pipe, torch.optim.AdamW, lr=0.01, clip=1.0, scaler=scaler, zero=zero)
        told = []
        for batch in (x, marked, x, x):
            pipe.step(batch, y)
            done = optimizer.step()
            told.append((done.applied, optimizer.scaler.scale, done.grad_norm))
        return told


def test_an_inf_in_one_replica_skips_the_update_in_all(processes: LocalProcesses):
    (whole, *_), divided = run_cases(processes, 2, overflowing, [(False,), (True,)])
    for told in (whole, *divided):
        assert [one[:2] for one in told] == [(True, 8.0), (False, 4.0), (True, 4.0), (True, 8.0)]
        for ours, theirs in zip(told, whole, strict=True):
            torch.testing.assert_close(ours[2], theirs[2])


def test_where_one_process_has_all_there_is_nothing_to_divide():
    with pair(None) as pipe:
        optimizer = PipelineOptimizer(pipe, torch.optim.AdamW, lr=0.01, zero=True)
        pipe.step(*plain.batch(0, 8))
        assert optimizer.step().applied
        assert optimizer.shards is None
        assert sorted(optimizer.state_dict()["state"]) == [n for n, _ in sorted(pipe.named_parameters())]


KINDS = {
    torch.optim.Adafactor: {},
    torch.optim.AdamW: {"amsgrad": True},
    torch.optim.Adagrad: {},
    torch.optim.ASGD: {},
    torch.optim.NAdam: {},
    torch.optim.RMSprop: {"momentum": 0.9},
    torch.optim.SGD: {"momentum": 0.9, "nesterov": True},
}


def of_a_kind(rank: int, kind: type[torch.optim.Optimizer], zero: Any) -> tuple:
    options = {"mesh": MeshShape(1, 2, 1), "parallel": ParallelOptions(bucket_bytes=512)}
    with Pipeline(plain.model(4), mse_loss, microbatches=2, timeout=300, **options) as pipe:
        optimizer = PipelineOptimizer(pipe, kind, lr=1e-2, zero=zero, **KINDS[kind])
        for n in range(6):
            pipe.step(*plain.batch(n, 8))
            optimizer.step()
        return copy.deepcopy((pipe.state_dict(), optimizer.state_dict()))


@pytest.mark.slow
def test_every_optimizer_takes_the_steps_of_the_whole_one_bit_for_bit(processes: LocalProcesses):
    cases = [(kind, zero) for kind in KINDS for zero in (False, "overlap")]
    told = dict(zip(cases, run_cases(processes, 2, of_a_kind, cases), strict=True))
    for kind in KINDS:
        (weights, state), _ = told[kind, False]
        for divided, divided_state in told[kind, "overlap"]:
            assert_equal(dict(divided), dict(weights))
            assert_equal(divided_state, state)


def waits(rank: int) -> None:
    """Each layer waits for its own parameters; `Pipeline.parameters`, and the end of the replicas, for all of them."""
    options = {"mesh": MeshShape(1, 2, 1), "parallel": ParallelOptions(bucket_bytes=1)}
    with Pipeline(plain.model(3), mse_loss, microbatches=2, timeout=300, **options) as pipe:
        optimizer = PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1, zero="overlap")
        pipe.step(*plain.batch(0, 8))
        optimizer.step()
        shards = optimizer.shards
        (module,) = pipe.stage_modules()
        numbers = [{shards.find(p).entry.bucket for p in layer.parameters()} for layer in module.layers]
        assert set(shards._coming) == set.union(*numbers)
        module.before[1]()
        assert set(shards._coming) == numbers[0] | numbers[2]
        list(pipe.parameters())
        assert not shards._coming
        pipe.step(*plain.batch(1, 8))
        optimizer.step()
        reduction = pipe._local.replica_reduction
        reduction.detach(wait=False)  # as after a failure
        assert shards._coming
        assert module.before == []
        assert not any(p._post_accumulate_grad_hooks for p in module.parameters())
        reduction.detach()
        assert not shards._coming


def test_layers_wait_for_their_own_parameters_only(processes: LocalProcesses):
    processes.run(2, waits)


def half_by_half(rank: int, mesh: MeshShape, case: str, zero: bool, weights: dict | None, state: dict | None):
    """Three steps, from the start or from what another run came to."""
    given, schedule, options = CASES[case]
    with pipe_on(mesh, given and given(), schedule) as pipe:
        optimizer = adamw(pipe, zero=zero, **{**options, "clip": None})
        if state is not None:
            pipe.load_state_dict(weights)
            optimizer.load_state_dict(state)
        for n in range(3):
            pipe.step(*tokens(n if state is None else 3 + n))
            optimizer.step()
        return copy.deepcopy((pipe.state_dict(), optimizer.state_dict()))


@pytest.mark.slow
def test_a_state_goes_on_divided_or_whole(processes: LocalProcesses):
    mesh, other = MeshShape(2, 2, 1), MeshShape(1, 2, 1)  # of two the sum has one order
    seconds = [("plain", True, False), ("main weights", False, True)]
    seconds += [(case, False, False) for case, *_ in seconds]
    firsts = list(dict.fromkeys((case, first) for case, first, _ in seconds))
    told = run_cases(processes, 4, half_by_half, [(mesh, *first, None, None) for first in firsts])
    starts = {first: joined(parts[:: mesh.dp]) for first, parts in zip(firsts, told, strict=True)}
    cases = [(other, case, zero, *starts[case, first]) for case, first, zero in seconds]
    ended = dict(zip(seconds, run_cases(processes, 2, half_by_half, cases), strict=True))
    for case, first, zero in seconds:
        wanted = ended[case, False, False][0]
        for weights, state in ended[case, first, zero]:
            assert_equal(dict(weights), dict(wanted[0]))
            assert_equal(state, wanted[1])
