"""What a replica that fails outside of its reductions tells those that wait for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.parallel.participant import StepFailure
from penstock.parallel.replicas.reduction import ReplicaReduction


@pytest.mark.parametrize("ran", [True, False], ids=["in an op", "before the first op"])
@pytest.mark.parametrize(
    ("error", "told", "said"),
    [
        (ValueError("boom"), False, ["ValueError: boom"]),
        (ValueError("others do not come"), True, []),
        (KeyboardInterrupt(), False, []),
    ],
)
def test_the_others_are_told_once_unless_they_do_not_come_or_nobody_is_to_wait(
    error: BaseException, told: bool, said: list[str], ran: bool
):
    heard: list[Any] = []
    reduction = ReplicaReduction(heard.append, {}, {})
    reduction.begin(SimpleNamespace(trains=False, reduces=False))
    for _ in range(2):
        reduction.abandon(StepFailure(error, error, ran, told))
    assert heard == said
