"""Recompute, random numbers, mixed precision: the same numbers as without, or as plain PyTorch."""

from __future__ import annotations

import re
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.base.errors import ConfigError
from penstock.runtime.local_stages import choose_recompute
from penstock.runtime.options import ExecutionOptions
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.schedule.families import build_schedule
from penstock.schedule.ops import Kind, Op
from penstock.schedule.schedule import Schedule
from penstock.stage.compute.runner import LayerBytes
from tests.support import plain
from tests.support.groups import outcome
from tests.support.lanes import exhaustive, slow
from tests.support.states import assert_equal

WIDTH, ROWS, M = plain.WIDTH, 4, 4


class Block(nn.Module):
    """Everything that a second run could spoil: dropout, running statistics, an in-place start, an added loss."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.begin = nn.ReLU(inplace=in_place)
        self.inner = nn.Linear(WIDTH, 4 * WIDTH)
        self.norm = nn.BatchNorm1d(4 * WIDTH)
        self.drop = nn.Dropout(0.3)
        self.out = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(F.gelu(self.norm(self.inner(self.begin(x)))))
        penstock.add_loss(1e-3 * h.square().mean())
        return x + self.out(h)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.SiLU(inplace=True)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.act(x))


def model(blocks: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[InPlace() if n % 4 == 2 else Block() for n in range(blocks)])


def batch(step: int) -> tuple[Tensor, Tensor]:
    return plain.batch(step, ROWS * M)


def train(rank: int, options: dict, steps: int = 3) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses of all steps, and the weights and buffers at the end."""
    losses = []
    with Pipeline(model(), F.mse_loss, microbatches=M, seed=5, timeout=300, **options) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for step in range(steps):
            losses.append(pipe.step(*batch(step)).losses)
            optimizer.step()
            optimizer.zero_grad()
        return losses, {name: value.clone() for name, value in pipe.state_dict().items()}


def assert_same(found: tuple, wanted: tuple) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found[0], wanted[0], strict=True))
    assert_equal(found[1], wanted[1])


@pytest.fixture(scope="module")
def unsplit() -> tuple:
    torch.set_num_threads(1)
    return train(0, {"ranks": 1})


# Everything and every third layer, with whole backwards and split ones.
CASES = [("1f1b", "full"), ("zb-h1", 3), ("zb-v", "full")]
REST = [
    (name, n)
    for name in ("gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "zb-v")
    for n in ("none", "full", 2, 3)
]


@pytest.mark.parametrize(("name", "recompute"), [*CASES, *exhaustive(*(c for c in REST if c not in CASES))])
def test_recompute_changes_no_loss_no_weight_and_no_running_statistic(unsplit, name, recompute):
    assert_same(train(0, {"ranks": 2, "schedule": name, "recompute": recompute}), unsplit)


def test_offloading_changes_nothing(unsplit):
    offload = ExecutionOptions(offload=True)
    assert_same(train(0, {"ranks": 4, "execution": offload}), unsplit)
    assert_same(train(0, {"ranks": 2, "execution": offload, "schedule": "zb-h1", "recompute": 2}), unsplit)


def test_dropout_and_recompute_are_the_same_in_processes(processes: LocalProcesses, unsplit):
    alone = ExecutionOptions(threads=1)  # as in `unsplit`: sums of several threads have another order
    options = {"ranks": 2, "schedule": "zb-h1", "recompute": "full", "execution": alone}
    parts = processes.run(2, train, options)
    assert_same((parts[0][0], {name: value for _, state in parts for name, value in state.items()}), unsplit)


def with_recompute(schedule: Schedule, early: bool) -> Schedule:
    """The same schedule with an R before every backward: right before it, or as soon as its forward is done."""
    lists = []
    for rank in range(schedule.ranks):
        ops: list[Op] = []
        for op in schedule.ops(rank):
            again = Op(op.stage, Kind.R, op.microbatch)
            if not early and op.kind in (Kind.B, Kind.I):
                ops.append(again)
            ops.append(op)
            if early and op.kind == Kind.F:
                ops.append(again)
        lists.append(ops)
    return Schedule.from_ops("with R", schedule.placement, schedule.microbatches, lists)


@pytest.mark.parametrize(
    ("name", "early"),
    [
        ("1f1b", False),
        ("zb-v", True),
        *exhaustive(("1f1b", True), ("zb-h1", False), ("zb-h1", True), ("zb-v", False)),
    ],
)
def test_a_schedule_may_say_itself_when_to_recompute(unsplit, name, early):
    schedule = with_recompute(build_schedule(name, 2, M), early)
    assert_same(train(0, {"ranks": 2, "schedule": schedule}), unsplit)


def held_by_rank(options: dict) -> list[int]:
    with Pipeline(model(), F.mse_loss, microbatches=M, ranks=2, **options) as pipe:
        for step in range(2):
            pipe.step(*batch(step))
        trace = pipe.trace()
        return [int(trace.held[trace.rank == rank].max()) for rank in range(2)]


def test_recompute_holds_the_layers_inputs_and_no_more():
    none, full = held_by_rank({"recompute": "none"}), held_by_rank({"recompute": "full"})
    layer, loss = ROWS * WIDTH * 4, 4
    # 1F1B on two ranks: two microbatches in flight on the first, one on the last, with four layers each. With the
    # value travels the auxiliary loss so far, which every layer but the third replaces.
    assert full == [2 * (4 * layer + 2 * loss), 4 * layer + 3 * loss]
    assert none[0] > 4 * full[0]
    assert none[1] > 4 * full[1]
    assert held_by_rank({"recompute": 2})[0] < none[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_the_memory_driven_choice_recomputes_as_few_layers_as_the_limit_allows(unsplit, name):
    none = max(held_by_rank({"schedule": name}))
    full = max(held_by_rank({"schedule": name, "recompute": "full"}))
    peaks = []
    for limit in (2 * none, (none + full) // 2, full + none // 4):
        options = {"schedule": name, "recompute": "auto", "execution": ExecutionOptions(memory=limit)}
        peaks.append(max(held_by_rank(options)))
        assert peaks[-1] <= limit
        assert_same(train(0, {"ranks": 2, **options}), unsplit)
    assert peaks[0] == none
    assert peaks[0] > peaks[1] >= peaks[2] >= full


@pytest.mark.parametrize(
    ("limit", "recomputed"), [(640, []), (639, [0]), (380, [0]), (379, [0, 1]), (180, [0, 1])]
)
def test_a_limit_is_kept_to_the_byte(limit, recomputed):
    # Four microbatches are held at once: 4 * (100 + 60) bytes, then 4 * (10 + 60) + 100, then 4 * (10 + 10) + 100.
    chosen: list[bool] = []
    layers = [LayerBytes(100, 10), LayerBytes(60, 10)]
    stage = SimpleNamespace(layer_bytes=lambda: layers, set_recompute=chosen.extend)
    schedule = build_schedule("gpipe", 1, 4)
    choose_recompute(schedule, 0, {0: stage}, limit)
    assert [n for n, again in enumerate(chosen) if again] == recomputed
    with pytest.raises(ConfigError, match="rank 0 holds 180 bytes of activations even with every layer"):
        choose_recompute(schedule, 0, {0: stage}, 179)


def refused_by(rank: int, memory: int) -> str:
    options = {"recompute": "auto", "execution": ExecutionOptions(memory=memory)}
    with Pipeline(model(), F.mse_loss, microbatches=M, ranks=2, timeout=300, **options) as pipe:
        return outcome(pipe.step, *batch(0))


def test_a_limit_below_everything_recomputed_is_refused_by_all_processes(processes: LocalProcesses):
    text = r"ConfigError: .*rank 0 holds (\d+) bytes of activations even with every layer recomputed"
    needed = int(re.match(text, refused_by(0, 1))[1])
    assert refused_by(0, needed) == "ok"
    first, second = processes.run(2, refused_by, needed - 1)
    assert first == second
    assert re.match(text, first)


def test_torchs_own_generator_is_left_alone():
    before = torch.get_rng_state()
    layers = [lambda: nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), lambda: nn.Linear(WIDTH, WIDTH)]
    with Pipeline(layers, F.mse_loss, microbatches=M, ranks=3, split=[1, 1, 1]) as pipe:
        pipe.step(*batch(0))
        pipe.evaluate(*batch(0))
    assert torch.equal(torch.get_rng_state(), before)


def test_layers_given_as_functions_start_the_same_whatever_the_split_and_differ_by_seed():
    def weights(ranks: int, seed: int) -> list[Tensor]:
        layers = [lambda: nn.Linear(WIDTH, WIDTH)] * 4
        with Pipeline(layers, F.mse_loss, microbatches=M, ranks=ranks, seed=seed) as pipe:
            return [p.detach().clone() for p in pipe.parameters()]

    one, four, other = weights(1, 0), weights(4, 0), weights(4, 1)
    assert all(torch.equal(a, b) for a, b in zip(one, four, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not torch.equal(one[0], one[2])


def test_a_run_that_continues_at_a_step_draws_what_it_would_have_drawn(unsplit):
    losses = []
    with Pipeline(model(), F.mse_loss, microbatches=M, ranks=2, seed=5) as pipe:
        pipe.load_state_dict(train(0, {"ranks": 4}, steps=1)[1])
        pipe.steps = 1
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for step in (1, 2):
            losses.append(pipe.step(*batch(step)).losses)
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(losses, unsplit[0][1:], strict=True))


@pytest.mark.parametrize("what", [*slow("stage"), *exhaustive("block")])  # a trained one is in tests/train
def test_compiled_layers_give_what_eager_ones_give(what):
    def fresh() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])

    net, other = fresh(), fresh()
    x, y = batch(0)
    with Pipeline(other, F.mse_loss, microbatches=M, ranks=2) as pipe:
        wanted = pipe.step(x, y).losses
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, on loading its compiler
        execution = ExecutionOptions(compile=what)
        with Pipeline(net, F.mse_loss, microbatches=M, ranks=2, execution=execution) as pipe:
            found = pipe.step(x, y).losses
            assert [n for n, _ in pipe.named_parameters()] == [n for n, _ in other.named_parameters()]
    torch.testing.assert_close(found, wanted)
    plain.require_equal_gradients(net, other, exactly=False)


def test_the_trace_shows_recompute_ops():
    schedule = with_recompute(build_schedule("1f1b", 2, M), early=False)
    with Pipeline(model(), F.mse_loss, microbatches=M, schedule=schedule) as pipe:
        pipe.step(*batch(0))
        trace = pipe.trace()
    assert np.count_nonzero(trace.kind == Kind.R) == 2 * M
    assert (trace.end[trace.kind == Kind.R] > trace.start[trace.kind == Kind.R]).all()


class Counts(nn.Module):
    """Keeps a state that no buffer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(x) * self.calls


@pytest.mark.parametrize(("recompute", "place"), [("full", 1), ("full", 3), (2, 1), (2, 3)])
def test_a_layer_whose_second_forward_differs_is_refused_by_name(recompute, place: int):
    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    net[place] = Counts()
    x, y = torch.randn(2 * M, WIDTH), torch.randn(2 * M, WIDTH)
    text = rf"layer '{place}' returns something else when it runs again"
    with Pipeline(net, F.mse_loss, microbatches=M, ranks=2, recompute=recompute) as pipe:
        assert re.search(text, outcome(pipe.step, x, y))
