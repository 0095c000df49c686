"""Gradients that a program scales on each rank by a factor of its own are told at the next step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import mse_loss

from penstock.parallel.mesh import MeshShape
from penstock.parallel.participant import Refusal
from penstock.runtime.consensus import COUNTED, GRAPH, compare_marks, marks_of
from penstock.runtime.gradient_scale import GradientScale
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import plain
from tests.support.groups import outcome, run_cases


def scaled(pipe: Pipeline) -> None:
    for p in pipe.parameters():
        p.grad.mul_(0.25)


def noisy(pipe: Pipeline) -> None:
    generator = torch.Generator().manual_seed(pipe.rank)
    for p in pipe.parameters():
        p.grad.add_(torch.randn(p.shape, generator=generator))


def halved_or_not(pipe: Pipeline) -> None:
    """Scale one stage's gradients of all, as a norm over one stage does where only it is too large."""
    if pipe.rank or pipe.replica:
        scaled(pipe)


HABITS: dict[str, Callable[[Pipeline], object]] = {
    "torch's clipping": lambda pipe: nn.utils.clip_grad_norm_(pipe.parameters(), 0.01),
    "one stage": halved_or_not,
    "our clipping": lambda pipe: pipe.clip_grad_norm_(0.01),
    "by value": lambda pipe: nn.utils.clip_grad_value_(pipe.parameters(), 1e-4),
    "a factor": scaled,
    "noise": noisy,
    "nothing": lambda pipe: None,
}


def trained(rank: int, mesh: MeshShape, set_to_none: bool, names: tuple[str, ...]) -> dict[str, str]:
    texts = {}
    for name in names:
        with Pipeline(plain.model(4), mse_loss, microbatches=2, mesh=mesh, timeout=300) as pipe:
            optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-3, momentum=0.9)
            for step in range(3):
                texts[name] = outcome(pipe.step, *plain.batch(step, 8))
                if texts[name] != "ok":
                    break
                HABITS[name](pipe)
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
    return texts


@pytest.mark.slow
def test_a_norm_over_one_stage_is_refused_at_the_next_step_and_what_is_right_is_not(
    processes: LocalProcesses,
):
    cases = [(MeshShape(2, 1, 1), set_to_none, tuple(HABITS)) for set_to_none in (True, False)]
    told, zeroed = run_cases(processes, 2, trained, cases)
    # The zeros have taken the place of what was scaled.
    assert all(text == "ok" for texts in zeroed for text in texts.values())
    for texts in told:
        assert [name for name, text in texts.items() if text != "ok"] == ["torch's clipping", "one stage"]
        for name in ("torch's clipping", "one stage"):
            assert "step 2: since the last step, the gradients were scaled by another factor" in texts[name]
            assert "use pipe.clip_grad_norm_(max_norm)" in texts[name]


def test_replicas_have_whole_models_and_may_clip_as_they_like(processes: LocalProcesses):
    names = ("torch's clipping", "one stage")
    for texts in processes.run(2, trained, MeshShape(1, 2, 1), True, names):
        assert [name for name, text in texts.items() if text != "ok"] == ["one stage"]


FACTORS = st.floats(1e-6, 1e6)


@given(FACTORS, st.floats(0.995, 1.005))
def test_factors_that_differ_by_rounding_are_the_same(factor: float, rounding: float):
    flags = marks_of(7, factor) | marks_of(7, factor * rounding) | COUNTED | GRAPH
    assert compare_marks(flags, None) == (None, COUNTED | GRAPH)


@given(FACTORS, st.floats(1.106, 10.0))
def test_factors_that_are_apart_are_told_apart(factor: float, apart: float):
    refusal, flags = compare_marks(marks_of(7, factor) | marks_of(7, factor * apart), None)
    assert refusal is not None
    assert flags == 0


@given(st.integers(0, 2**20 - 1), st.integers(0, 2**20 - 1))
def test_batches_that_differ_come_before_factors_and_numbers(one: int, other: int):
    refusal, _ = compare_marks(marks_of(one, 1.0) | marks_of(other, 1.0), Refusal(3, 0, 0))
    assert refusal == (Refusal(3, 0, 0) if one == other else Refusal(0, 0, 0))
    assert compare_marks(marks_of(one) | marks_of(None, 0.5), None) == (None, 0)


@pytest.mark.parametrize(
    ("change", "factor"),
    [
        (lambda g: None, 1.0),
        (lambda g: g.mul_(0.5), 0.5),
        (lambda g: g.mul_(1.0), 1.0),
        (lambda g: g.clamp_(-0.1, 0.1), None),
        (lambda g: g.zero_(), None),
        (lambda g: g.neg_(), None),
        (lambda g: g.fill_(float("nan")), None),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_factor_is_read_from_numbers_that_all_changed_alike(
    change, factor: float | None, dtype: torch.dtype
):
    layer = nn.Linear(5, 5, dtype=dtype)
    scale = GradientScale(layer.parameters())
    assert scale.factor() is None  # nothing is remembered yet
    for p in layer.parameters():
        p.grad = torch.linspace(-1, 1, p.numel()).view_as(p).to(dtype)
    scale.remember(0)
    for p in layer.parameters():
        change(p.grad)
    found = scale.factor()
    assert found == (factor if factor is None else pytest.approx(factor, rel=0.01))
    assert scale.factor() is None


def test_too_few_numbers_tell_nothing_and_gradients_are_let_go():
    few, same = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(8))
    scale = GradientScale([few, same])
    few.grad, same.grad = torch.ones(3), torch.ones(8)
    scale.remember(0)
    same.grad.mul_(0.5)  # may be a clipping by value
    assert scale.factor() is None
    assert not scale._seen
