"""What is set around a step reaches ranks that are threads, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from threading import Event

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from penstock import Pipeline
from penstock.base.errors import ConfigError, HangError, PenstockError
from penstock.runtime.health.hang import HangDetector, Timeout
from penstock.runtime.health.rank_progress import STEP, WAITS, new_progress
from penstock.runtime.workers.pool import LocalProcesses
from penstock.runtime.workers.rank_threads import RankThreads
from penstock.schedule.families import build_schedule
from penstock.schedule.program import lower
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
    timeout, progress, told = Timeout(0.3), [new_progress() for _ in range(3)], []
    progress[0][STEP], progress[1][WAITS], progress[2][WAITS] = 1, 1, 1
    detector = HangDetector(timeout, progress, ["a", "b", "c"], lower(build_schedule("gpipe", 3, 1)))
    stopped, go = Event(), Event()

    def stop(text: str) -> None:
        told.append(text)
        stopped.set()

    ranks = RankThreads(3, timeout)
    jobs = [partial(event.wait, 60) for event in (go, stopped, go)]
    with pytest.raises(HangError, match=r"^a is in op 0F0 .*, which is longer than the timeout of 0.3 s"):
        ranks.run(jobs, stop, detector)
    assert ranks.at_work == ranks._hung == {0, 2}
    assert [text.split(",")[0] for text in told] == ["a is in op 0F0 (stage 0"]
    go.set()
    ranks.close()


def in_a_process(rank: int) -> str:
    return reenters("evaluate", 2)


def test_a_step_within_a_step_is_refused_at_once(processes: LocalProcesses):
    told = [reenters(method, ranks) for method in ("step", "evaluate") for ranks in (1, 2)]
    for text in (*told, *processes.run(2, in_a_process)):
        assert "while a step of the same pipeline is under way" in text
