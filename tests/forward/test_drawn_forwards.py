"""Forwards drawn at random: the layers give the model's own numbers, or the model is refused."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock
from tests.support import drawn_forwards as drawn
from tests.support import own_models


@st.composite
def sources(draw: st.DrawFn) -> str:
    extra = draw(st.lists(st.sampled_from(drawn.EXTRA), max_size=3, unique=True))
    names = [line.split(" ")[0] for line in extra]
    body = [draw(st.sampled_from(drawn.BODY))]
    body += [draw(st.sampled_from(drawn.BODY_OF_EXTRA[name])) for name in names if draw(st.booleans())]
    after = [
        draw(st.sampled_from(drawn.AFTER_OF_EXTRA[name]))
        for name in names
        if name != "count" and draw(st.booleans())
    ]
    after.append(draw(st.sampled_from(drawn.AFTER)))
    body = draw(st.permutations(body))
    return drawn.source(
        draw(st.sampled_from(drawn.BEFORE)), extra, draw(st.sampled_from(drawn.LOOPS)), body, after
    )


def compare(text: str, folder: Path) -> None:
    net = own_models.made(drawn.written(text, folder))
    expected = copy.deepcopy(net)
    x, y = own_models.batch()
    penstock.split(net, x)
    losses = []
    for part in x.chunk(2):
        loss = expected(part).square().mean()
        (loss / 2).backward()
        losses.append(loss.detach())
    with penstock.Pipeline(net, lambda output, _: output.square().mean(), ranks=3, microbatches=2) as pipe:
        assert torch.equal(pipe.step(x, y).losses, torch.stack(losses))
        for name, p in pipe.named_parameters():
            gradient = expected.get_parameter(name).grad
            if gradient is None or p.grad is None:  # unused, or its gradient is zero throughout
                assert all(g is None or not g.any() for g in (gradient, p.grad)), name
            else:
                torch.testing.assert_close(p.grad, gradient, rtol=1e-4, atol=1e-6)
        assert list(pipe.full_state_dict()) == list(expected.state_dict())


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=sources())
def test_drawn_forwards_give_the_models_numbers(text: str, tmp_path: Path):
    compare(text, tmp_path)


@pytest.mark.slow
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=sources())
def test_many_drawn_forwards_give_the_models_numbers(text: str, tmp_path: Path):
    compare(text, tmp_path)
