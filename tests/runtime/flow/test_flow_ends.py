"""Flowing steps that end early: interrupts, batches that are refused, and results that are never read."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import BatchError, NonFiniteError, PeerError
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import plain
from tests.support.groups import run_cases

RANKS, MICROBATCHES = 2, 4
ENDS: dict[str, BaseException] = {
    "interrupt": KeyboardInterrupt(),
    "exit": SystemExit(3),
    "error without text": ValueError(),
}


class Ending(nn.Module):
    """A layer that raises in one of its forwards."""

    def __init__(self, error: BaseException | None, at: int) -> None:
        super().__init__()
        self.error, self.left = error, at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= self.training
        if self.left == 0 and self.error is not None:
            raise self.error
        return x


def end_early(rank: int, how: str, flow: bool, step: int) -> tuple[str, dict[str, Any], list[dict[str, Any]]]:
    """Return the error, the weights after it, and those after every step."""
    torch.set_num_threads(1)
    net = plain.model(8)
    net[2] = nn.Sequential(net[2], Ending(ENDS.get(how), MICROBATCHES * step + 2))
    history: list[dict[str, Any]] = []
    with Pipeline(
        net, nn.functional.mse_loss, microbatches=MICROBATCHES, schedule="zb-v", ranks=RANKS
    ) as pipe:
        updates = PipelineOptimizer(pipe, torch.optim.AdamW, lr=0.01, clip=30.0, flow=flow)
        text = ""
        try:
            for n in range(6):
                pipe.step(*plain.batch(n, 8))
                updates.step()
                if how == "":
                    history.append({k: v.clone() for k, v in pipe.state_dict().items()})
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        return text, {k: v.clone() for k, v in pipe.state_dict().items()}, history


def test_after_an_interrupt_of_one_rank_all_have_the_weights_of_one_step(processes: LocalProcesses):
    cases = [("", False, 0), *[(how, True, 4) for how in ENDS], *[(how, False, 4) for how in ENDS]]
    expected, *ended = run_cases(processes, RANKS, end_early, cases)
    for (how, flow, step), ranks in zip(cases[1:], ended, strict=True):
        names = {text.partition(":")[0] for text, _, _ in ranks}
        raised = "StageError" if how == "error without text" else type(ENDS[how]).__name__
        assert names == {raised, "PeerError"}, (how, flow)
        told = next(text for text, _, _ in ranks if text.startswith("PeerError"))
        for word in ("stage ", "microbatch 1", "F1 of step 5"):
            assert word in told, (how, flow, told)
        assert told.removesuffix(")").split(" (")[0].endswith(repr_of(ENDS[how])), (how, flow, told)
        for rank, (_, weights, _) in enumerate(ranks):
            for name, value in expected[rank][2][step - 1].items():
                assert torch.equal(value, weights[name]), (how, flow, rank, name)


def repr_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def refuse_batches(rank: int, flow: bool, where: str) -> tuple[list[str], dict[str, Any], int]:
    """Train with some batches that cannot be split, on all ranks or only on one that needs them."""
    torch.set_num_threads(1)
    errors: list[str] = []
    with Pipeline(
        plain.model(8), nn.functional.mse_loss, microbatches=MICROBATCHES, schedule="zb-h2", ranks=RANKS
    ) as pipe:
        updates = PipelineOptimizer(pipe, torch.optim.AdamW, lr=0.01, clip=1.25, flow=flow)
        for n in range(8):
            x, y = plain.batch(n, 8)
            if n in (0, 2, 3, 5):
                x = x[:2] if where in ("all", "first") else x
                y = y[:2] if where in ("all", "last") else y
            if where in ("first", "last"):
                x, y = (x if rank == 0 else None), (y if rank == RANKS - 1 else None)  # type: ignore[assignment]
            if n == 5:
                with pytest.raises((BatchError, PeerError)):
                    pipe.evaluate(x, y)
                continue
            try:
                pipe.step(x, y)
            except (BatchError, PeerError) as error:
                errors.append(type(error).__name__)
                continue
            updates.step()
        pipe.wait()
        return errors, {k: v.clone() for k, v in pipe.state_dict().items()}, updates.steps


@pytest.mark.parametrize("where", ["all"])
def test_a_batch_that_cannot_be_split_ends_one_step_alone(processes: LocalProcesses, where: str):
    barrier, flowing = run_cases(processes, RANKS, refuse_batches, [(False, where), (True, where)])
    for (errors, weights, steps), (again, same, count) in zip(barrier, flowing, strict=True):
        assert errors == again
        assert len(errors) == 3
        assert steps == count == 4
        for name, value in weights.items():
            assert torch.equal(value, same[name])


def never_read(rank: int, ending: str) -> str:
    torch.set_num_threads(1)
    pipe = Pipeline(plain.model(4), nn.functional.mse_loss, microbatches=MICROBATCHES, ranks=RANKS)
    updates = PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1, flow=True)
    for n in range(3):
        x, y = plain.batch(n, 8)
        result = pipe.step(x * math.nan if n == 2 else x, y)
        updates.step()
    if ending == "read":
        with pytest.raises(NonFiniteError):
            float(result.loss)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if ending == "exit":
            assert pipe.flow is not None
            pipe.flow.end_at_exit()
        pipe.close()
    return "".join(str(each.message) for each in caught)


def test_a_last_step_that_counts_for_nothing_is_told_when_the_pipeline_closes(processes: LocalProcesses):
    closed, read, _ = run_cases(processes, RANKS, never_read, [("close",), ("read",), ("exit",)])
    for rank, text in enumerate(closed):
        assert f"rank {rank}: the updates of 1 steps (3) were left out" in text
        assert "NaN or infinite" in text
    assert read == [""] * RANKS
