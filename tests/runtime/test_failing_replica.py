"""A replica that fails tells the others, in every call: they do not wait until the timeout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from penstock import LinearCrossEntropy, MeshShape, Pipeline
from penstock.base.errors import PeerError
from penstock.runtime.workers.pool import LocalProcesses
from tests.support.groups import run_cases

CLASSES, M = 8, 2


def failure_of(rank: int, call: str, pp: int) -> tuple[str, str, bool]:
    """Return the error's class and text where replica 1 has a class beyond the vocabulary, and whether it is a peer's."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(CLASSES, 4), nn.Linear(4, CLASSES))
    ids = torch.arange(32).reshape(8, 4) % CLASSES
    y: Any = ids.clone()
    with Pipeline(
        net, LinearCrossEntropy(), microbatches=M, mesh=MeshShape(pp=pp, dp=2), timeout=120
    ) as pipe:
        pipe.step(ids, y)
        if pipe.replica == 1:
            y = y[:, :3] if call == "evaluate, other shape" else y[:7] if "other rows" in call else y
            y[5, 0] = CLASSES
        pipe.reduce_gradients = not call.startswith("accumulate")
        try:
            if call.startswith(("step", "accumulate")):
                pipe.step(ids, y)
            elif call == "log_probs":
                pipe.log_probs(ids, y)
            else:
                pipe.evaluate(ids, y)
        except Exception as error:
            return type(error).__name__, str(error), isinstance(error, PeerError)
    return "", "", False


@pytest.mark.slow
def test_each_call_that_fails_on_one_replica_ends_on_all(processes: LocalProcesses):
    calls = ["step", "accumulate", "evaluate", "evaluate, other shape", "log_probs"]
    calls += ["step, other rows", "accumulate, other rows", "evaluate, other rows"]
    cases = [(call, pp) for call in calls for pp in (1, 2)]
    by_size = {
        pp: run_cases(processes, 2 * pp, failure_of, [case for case in cases if case[1] == pp])
        for pp in (1, 2)
    }
    for results in by_size.values():
        for call, by_rank in zip(calls, results, strict=True):
            kinds = {name for name, *_ in by_rank}
            assert kinds.isdisjoint({"", "WaitTimeoutError"}), (call, by_rank)
            assert any(is_peer for *_, is_peer in by_rank), (call, by_rank)
