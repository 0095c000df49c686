"""Steps that flow into each other give, bit for bit, the weights of steps that end together."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError, NonFiniteError, PeerError, PenstockError, StageError
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.options import ExecutionOptions
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.transport.processes import SWITCH
from penstock.runtime.workers.pool import LocalProcesses
from penstock.show.terminal import draw_terminal
from penstock.trace.events import Trace
from tests.support import plain
from tests.support.groups import run_cases

RANKS, LAYERS, MICROBATCHES, STEPS = 4, 8, 8, 8
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.3}),
    "adamw-fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.1}),
}


class Slow(nn.Module):
    """A layer with a buffer that every forward changes, and a forward that takes longer on some ranks."""

    def __init__(self, inner: nn.Module, seconds: float) -> None:
        super().__init__()
        self.inner, self.seconds = inner, seconds
        self.drop = nn.Dropout(0.2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        time.sleep(self.seconds)
        return self.drop(self.inner(x))


def model(slow: int) -> nn.Sequential:
    return nn.Sequential(
        *[Slow(layer, 0.004 if n == slow else 0.0) for n, layer in enumerate(plain.model(LAYERS))]
    )


def train(
    rank: int, family: str, flow: bool, optimizer: str, clip: float | None, bad: tuple[int, ...], main: bool
) -> dict[str, Any]:
    """Train with NaN in some steps, and return all that must be equal, and what flowed."""
    torch.set_num_threads(1)
    make, defaults = OPTIMIZERS[optimizer]
    net = model(slow=LAYERS - 2)
    poisoned = False
    # One weight's gradient alone, which only the first rank sees.
    next(net[0].parameters()).register_hook(lambda grad: grad * math.nan if poisoned else grad)
    if main:
        net = net.bfloat16()
    with Pipeline(
        net, nn.functional.mse_loss, microbatches=MICROBATCHES, schedule=family, ranks=RANKS, timeout=60
    ) as pipe:
        updates = PipelineOptimizer(
            pipe, make, clip=clip, flow=flow, main_weights=main, lr_factor=lambda n: 1 / (n + 1), **defaults
        )
        results, steps, skipped = [], [], []
        for n in range(STEPS):
            x, y = plain.batch(n, 2 * MICROBATCHES)
            x, y = (x.bfloat16(), y.bfloat16()) if main else (x, y)
            poisoned = n in bad
            try:
                results.append(pipe.step(x, y))
                steps.append(updates.step())
            except NonFiniteError:  # without flow
                skipped.append(n)
                results.pop() if len(results) > n else None
                pipe.steps = n + 1
                updates.zero_grad()
        losses, norms, rates = [], [], []
        for n, (result, step) in enumerate(zip(results, steps, strict=True)):
            rates.append(step.lr)
            try:
                losses.append(float(result.loss))
                norms.append(None if step.grad_norm is None else float(step.grad_norm))
                assert (step.applied, step.skipped) == (True, False)
            except NonFiniteError:
                assert (step.applied, step.skipped) == (False, True)
                skipped.append(n)
                rates.pop()
        seen = {
            "losses": losses,
            "norms": norms,
            "rates": rates,
            "skipped": skipped,
            "weights": {name: value.clone() for name, value in pipe.state_dict().items()},
            "optimizer": updates.state_dict(),
            "counts": (updates.steps, updates.skipped if flow else len(skipped)),
        }
        seen["optimizer"].pop("skipped")
        flowing = pipe.flow
        return seen | {"flow": None if flowing is None else (flowing.ahead, flowing.undone)}


def assert_same(one: Any, other: Any, where: str = "") -> None:
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for n, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{where}/{n}")
    else:
        assert one == other, where


STRIKES = {
    "nothing": (None, ()),
    "measured": (math.inf, ()),
    "clipped at every step": (2.0, ()),
    "clipped at some": (2.8, ()),
    "NaN in the middle": (math.inf, (3,)),
    "two NaN in a row": (None, (3, 4)),
    "NaN and clipped": (2.8, (2, 4)),
    "NaN at both ends": (None, (0, STEPS - 1)),
}
FEW = [("zb-v", "adamw", "NaN and clipped", False)]
MANY = [("zb-h2", "adamw", "clipped at some", False), ("zb-v", "adamw", "NaN and clipped", True)]
MANY += [("zb-v", "adamw", strike, False) for strike in STRIKES]
MANY += [("zb-h2", name, "NaN and clipped", False) for name in OPTIMIZERS]
MANY += [("1f1b", "adamw", "clipped at some", False)]


@pytest.mark.parametrize("cases", [FEW, pytest.param(MANY, marks=pytest.mark.slow)], ids=["few", "many"])
def test_the_weights_are_those_of_steps_that_end_together(processes: LocalProcesses, cases: list):
    given = [
        (family, flow, optimizer, *STRIKES[strike], main)
        for family, optimizer, strike, main in cases
        for flow in (False, True)
    ]
    found = run_cases(processes, RANKS, train, given)
    ahead, undone = 0, 0
    for n, case in enumerate(cases):
        for barrier, flowing in zip(found[2 * n], found[2 * n + 1], strict=True):
            counts = flowing.pop("flow")
            assert barrier.pop("flow") is None
            assert_same(barrier, flowing, str(case))
            ahead, undone = ahead + counts[0], undone + counts[1]
            if case[2] in ("nothing", "measured"):
                assert counts[1] == 0
    # The ranks before the slow one end early, so that most of their updates are made ahead, and some are undone.
    assert ahead > len(cases)
    assert undone >= len(cases)


def train_over_sockets(rank: int, *given: Any) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, "0")
        return train(rank, *given)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["zb-v", "zb-h2"])
def test_ranks_that_begin_again_meet_over_sockets_too(processes: LocalProcesses, family: str):
    given = [(family, flow, "adamw", *STRIKES["NaN and clipped"], False) for flow in (False, True)]
    undone = 0
    for barrier, flowing in zip(*run_cases(processes, RANKS, train_over_sockets, given), strict=True):
        barrier.pop("flow")
        undone += flowing.pop("flow")[1]
        assert_same(barrier, flowing)
    assert undone


def read_on_one_rank(rank: int) -> tuple[list[float], dict[str, Any], tuple[int, ...]]:
    torch.set_num_threads(1)
    with Pipeline(
        model(slow=1), nn.functional.mse_loss, microbatches=MICROBATCHES, schedule="zb-v", ranks=RANKS
    ) as pipe:
        updates = PipelineOptimizer(pipe, torch.optim.AdamW, lr=0.01, clip=1.25, flow=True)
        losses, early = [], []
        for n in range(STEPS):
            result = pipe.step(*plain.batch(n, 2 * MICROBATCHES), outputs=n == 2)
            if rank == n % RANKS:
                early.append(float(result.loss))  # before the update, on one rank alone
            updates.step()
            if rank == (n + 1) % RANKS:
                next(pipe.parameters())
            if n == 4:
                pipe.evaluate(*plain.batch(n, 2 * MICROBATCHES))
            losses.append(result)
        if pipe.holds_last:
            assert len(losses[2].outputs) == MICROBATCHES
        else:
            with pytest.raises(ConfigError, match=rf"on rank \d, .* this is rank {rank}"):
                losses[2].outputs  # noqa: B018
        return [float(each.loss) for each in losses], pipe.state_dict(), tuple(early)


def test_any_rank_may_read_a_result_alone(processes: LocalProcesses):
    found = processes.run(RANKS, read_on_one_rank)
    for rank, (losses, _, early) in enumerate(found):
        assert losses == found[0][0]
        assert early == tuple(losses[n] for n in range(STEPS) if n % RANKS == rank)


def trace_steps(rank: int, flow: bool) -> Trace:
    torch.set_num_threads(1)
    net = plain.model(LAYERS)
    # The last rank alone has long weight gradients, so that it drains while the first one has nothing left to do.
    for layer in net[-LAYERS // RANKS :]:
        next(layer.parameters()).register_hook(lambda grad: time.sleep(0.02))
    with Pipeline(
        net, nn.functional.mse_loss, microbatches=MICROBATCHES, schedule="zb-h2", ranks=RANKS
    ) as pipe:
        updates = PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1, flow=flow)
        traces = []
        for n in range(4):
            pipe.step(*plain.batch(n, 2 * MICROBATCHES))
            updates.step()
            traces.append(pipe.trace())
        gathered = pipe.gather_trace(traces[1:])
        assert gathered is not None
        return gathered


def test_a_trace_of_several_steps_shows_forwards_in_the_drain_of_the_step_before(processes: LocalProcesses):
    for flow, ranks in zip(
        (False, True), run_cases(processes, RANKS, trace_steps, [(False,), (True,)]), strict=True
    ):
        trace = ranks[0]
        assert trace.info["steps"] == 3
        assert trace.microbatch.max() == 3 * MICROBATCHES - 1
        step = trace.microbatch // MICROBATCHES
        early = [trace.start[step == n].min() + 0.001 < trace.end[step < n].max() for n in (1, 2)]
        assert any(early) == flow
        assert "idle" in str(draw_terminal(trace, 120))


class Fails(nn.Module):
    """A layer that raises in the backward of a microbatch."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.at, self.count = at, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad or torch.is_grad_enabled():
            x = x * self.weight
            x.register_hook(self._count)
        return x

    def _count(self, grad: torch.Tensor) -> None:
        self.count += 1
        if self.count == self.at:
            raise ValueError("this layer fails")


def fail_in_a_step(rank: int, at: int) -> tuple[str, str, dict[str, Any], list[dict[str, Any]]]:
    """Train until a backward fails: the error, what the next step says, the weights, and those after every step."""
    torch.set_num_threads(1)
    net = plain.model(LAYERS)
    net[-1] = nn.Sequential(net[-1], Fails(at))
    history: list[dict[str, Any]] = []
    pipe = Pipeline(net, nn.functional.mse_loss, microbatches=4, schedule="zb-h2", ranks=RANKS, timeout=30)
    try:
        updates = PipelineOptimizer(pipe, torch.optim.AdamW, lr=0.01, clip=1.25, flow=at > 0)
        error = again = ""
        try:
            for n in range(4):
                pipe.step(*plain.batch(n, 8))
                updates.step()
                if at < 0:
                    history.append({k: v.clone() for k, v in pipe.state_dict().items()})
        except (StageError, PeerError) as caught:
            error = f"{type(caught).__name__}: {caught}"
        weights = {k: v.clone() for k, v in pipe.state_dict().items()}
        if at > 0:
            with pytest.raises(PenstockError, match="build a new pipeline") as caught_again:
                pipe.step(*plain.batch(0, 8))
            again = str(caught_again.value)
        return error, again, weights, history
    finally:
        pipe.close()


def test_a_failure_names_its_cause_and_leaves_the_last_complete_weights(processes: LocalProcesses):
    (expected, *failed) = run_cases(processes, RANKS, fail_in_a_step, [(-1,), (9,), (12,), (13,)])
    for at, ranks in zip((9, 12, 13), failed, strict=True):
        done = (at - 1) // 4  # steps that all ranks completed
        for rank, (error, again, weights, _) in enumerate(ranks):
            assert "this layer fails" in error
            assert f"microbatch {(at - 1) % 4}" in error
            assert error.startswith("StageError" if rank == RANKS - 1 else "PeerError")
            assert "this layer fails" in again
            assert_same(weights, expected[rank][3][done - 1], f"{at}/{rank}")


def misuse(rank: int) -> list[str]:
    torch.set_num_threads(1)
    texts = []

    def refused(act: Any) -> None:
        with pytest.raises(PenstockError) as caught:
            act()
        texts.append(str(caught.value))

    def pipeline(**options: Any) -> Pipeline:
        options = {"microbatches": 4, "schedule": "1f1b", "ranks": 2, **options}
        return Pipeline(plain.model(4), nn.functional.mse_loss, **options)

    with pipeline() as pipe:
        refused(lambda: PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1, flow=True, accumulate=2))
        updates = PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1, flow=True)
        refused(updates.step)
        pipe.step(*plain.batch(0, 8))
        for parameter in pipe.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(2)
        refused(updates.step)
        updates = PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1)
        assert pipe.flow is None
        pipe.step(*plain.batch(0, 8))
        assert updates.step().applied
    with pipeline(schedule="dualpipe", ranks=2, microbatches=8) as pipe:
        refused(lambda: PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1, flow=True))
    return texts


def test_what_cannot_flow_is_refused_by_name(processes: LocalProcesses):
    for texts in processes.run(2, misuse):
        accumulate, early, changed, copies = texts
        assert "accumulate=2" in accumulate
        assert "once after every pipe.step" in early
        assert "gradients were changed" in changed
        assert "weights are on several ranks" in copies


def test_threads_do_not_flow():
    with (
        Pipeline(plain.model(4), nn.functional.mse_loss, microbatches=4, ranks=2) as pipe,
        pytest.raises(ConfigError, match="the ranks are threads of one process"),
    ):
        PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1, flow=True)


def unchecked(rank: int) -> list[str]:
    """Without the check of finite numbers, only the norm shows a NaN."""
    torch.set_num_threads(1)
    with Pipeline(
        plain.model(4), nn.functional.mse_loss, microbatches=4, ranks=2,
        execution=ExecutionOptions(check_finite=False),
    ) as pipe:  # fmt: skip
        updates = PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1, clip=math.inf, flow=True)
        steps, results = [], []
        for n in range(4):
            x, y = plain.batch(n, 8)
            results.append(pipe.step(x * math.nan if n == 1 else x, y))
            steps.append(updates.step())
        assert all(torch.isfinite(p).all() for p in pipe.parameters())
        assert [step.applied for step in steps] == [True, False, True, True]
        with pytest.raises(NonFiniteError, match="norm of all gradients"):
            float(results[1].loss)
        return []


def test_a_norm_that_is_not_finite_skips_the_update(processes: LocalProcesses):
    processes.run(2, unchecked)
