"""What processes whose layers wait for each other tell of a step: here objects that share a store."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist

from penstock.base.errors import PeerError, PenstockError
from penstock.parallel.context.exchange import TokenExchange
from penstock.parallel.layer_exchange import LayerExchange
from penstock.parallel.mesh import MeshShape
from penstock.parallel.participant import StepFailure


def processes(store: Any) -> Any:
    """What an exchange asks of its run; a collective is there once it has looked for a failure."""
    numbers = count()
    return SimpleNamespace(
        lines=lambda of: [of(0)],
        open_group=lambda lines: SimpleNamespace(group_name=f"group {next(numbers)}"),
        end_group=lambda group: None,
        open_store=lambda: store,
        on_release=lambda release: None,
        collectives=SimpleNamespace(start=lambda start, out, group, action, look: look),
    )


def step(number: int, microbatches: int = 2) -> Any:
    return SimpleNamespace(number=number, microbatches=microbatches)


@pytest.fixture
def both() -> list[LayerExchange]:
    store = dist.HashStore()
    return [LayerExchange(processes(store), "cp", [[0, 1]], "which has the other tokens") for _ in range(2)]


def exchanged(exchange: LayerExchange) -> None:
    exchange.start(lambda: None, torch.zeros(1), exchange.group, "gather")()


def failure(error: BaseException) -> StepFailure:
    return StepFailure(error, ValueError(f"rank 0: {error}"), ran=True, told=False)


def test_a_step_that_fails_ends_the_waits_of_the_others_and_the_next_one_runs(both: list[LayerExchange]):
    for exchange in both:
        exchange.begin(step(1))
        exchanged(exchange)
    first = both[0].group.group_name
    both[0].abandon(failure(ValueError("boom")))
    with pytest.raises(PeerError, match=r"another replica failed, which has the other tokens: rank 0: boom"):
        exchanged(both[1])
    both[1].abandon(failure(PeerError("boom")))
    for exchange in both:
        exchange.begin(step(2))
        exchanged(exchange)
        assert exchange.group.group_name != first


@pytest.mark.parametrize("how", ["interrupted", "over"])
def test_nobody_is_told_of_an_interrupt_or_of_an_error_after_the_exchanges(
    both: list[LayerExchange], how: str
):
    for exchange in both:
        exchange.begin(step(1))
    if how == "over":
        both[0].finish()
    both[0].abandon(failure(KeyboardInterrupt() if how == "interrupted" else ValueError("boom")))
    exchanged(both[1])


def test_a_layer_is_refused_outside_of_a_step(both: list[LayerExchange]):
    for call in (lambda: None, both[0].finish):
        call()
        with pytest.raises(
            PenstockError, match=r"called outside of a step .*call pipe\.evaluate on all ranks"
        ):
            exchanged(both[0])
        both[0].begin(step(1))


def test_parts_of_samples_know_how_many_microbatches_a_step_has():
    mesh = SimpleNamespace(shape=MeshShape(cp=2))
    exchange = TokenExchange(processes(dist.HashStore()), mesh)
    assert exchange.microbatches == 1  # where no step has begun
    exchange.begin(step(1, microbatches=3))
    assert exchange.microbatches == 3
