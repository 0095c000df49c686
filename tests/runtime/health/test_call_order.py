"""Ranks that call step and evaluate in another order are told so, both of them."""

from __future__ import annotations

import pytest
from torch import nn

from penstock.errors import CallOrderError, PeerError
from penstock.runtime.pipeline import Pipeline
from tests.support import plain


def train_while_one_evaluates(rank: int, evaluating: int, steps_before: int) -> str:
    x, y = plain.batch(0, 4)
    with Pipeline(plain.model(2), nn.functional.mse_loss, microbatches=2, timeout=20) as pipe:
        for _ in range(steps_before):
            pipe.step(x, y)
        try:
            if rank == evaluating:
                pipe.evaluate(x, y)
            pipe.step(x, y)
        except (CallOrderError, PeerError) as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize("evaluating", [0, 1])
@pytest.mark.parametrize("steps_before", [0, 1])
def test_an_evaluation_on_one_rank_alone_is_named_on_both(processes, evaluating, steps_before):
    texts = processes.run(2, train_while_one_evaluates, evaluating, steps_before)
    for text in texts:
        assert "call step() and evaluate() on every rank, in the same order" in text
        found = {"rank 0 runs ", "rank 1 runs ", "a training step", "an evaluation"}
        assert all(part in text for part in found), text
