"""What is set around a step reaches ranks that are threads, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from penstock import Pipeline
from penstock.base.errors import ConfigError, HangError, PenstockError
from penstock.runtime.health.hang import Timeout
from penstock.runtime.workers.pool import LocalProcesses
from penstock.runtime.workers.rank_threads import RankThreads
from tests.support import plain


class Mode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


AROUND: dict[str, Callable[[], AbstractContextManager]] = {
    "Mode": Mode,
    "FlopCounterMode": lambda: FlopCounterMode(display=False),
    "saved_tensors_hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
}


@pytest.mark.parametrize("name", AROUND)
def test_modes_around_a_step_of_threads_are_refused_and_the_next_step_runs(name):
    with Pipeline(plain.model(2), F.mse_loss, ranks=2, microbatches=2) as pipe:
        with (
            pytest.raises(ConfigError, match=rf"{name} is set around a step .*within the layers"),
            AROUND[name](),
        ):
            pipe.step(*plain.batch(0, 4))
        losses = pipe.step(*plain.batch(1, 4)).losses
    expected, _ = plain.step(plain.model(2), F.mse_loss, *plain.batch(1, 4), 2)
    assert torch.equal(losses, expected)


def reenters(method: str, ranks: int) -> str:
    pipe: Pipeline

    def loss(output: Tensor, target: Tensor) -> Tensor:
        getattr(pipe, method)(*plain.batch(0, 4))
        return F.mse_loss(output, target)

    with Pipeline(plain.model(2), loss, ranks=ranks, microbatches=2) as pipe:
        with pytest.raises(PenstockError) as info:
            pipe.step(*plain.batch(0, 4))
        return str(info.value)


def test_ranks_that_end_soon_after_one_hangs_are_waited_for():
    running, told = {0, 1, 2}, []
    ranks = SimpleNamespace(
        timeout=Timeout(0.05),
        _running=running,
        _describe=lambda hung, detector: f"{sorted(hung)} at work",
        _collect=lambda seconds: running.discard(1),
    )
    with pytest.raises(HangError, match=r"^\[0\] at work, which is longer than the timeout of 0.05 s"):
        RankThreads._end_hung(ranks, {0}, told.append, None)
    assert ranks._hung == {0, 2}
    assert told == ["[0] at work, which is longer than 0.05 s"]


def in_a_process(rank: int) -> str:
    return reenters("evaluate", 2)


def test_a_step_within_a_step_is_refused_at_once(processes: LocalProcesses):
    told = [reenters(method, ranks) for method in ("step", "evaluate") for ranks in (1, 2)]
    for text in (*told, *processes.run(2, in_a_process)):
        assert "while a step of the same pipeline is under way" in text
