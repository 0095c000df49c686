"""Schedules that a search found give the gradients of plain PyTorch, in threads and in processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.schedule.memory import Budget
from penstock.schedule.ops import Kind
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule
from penstock.schedule.text import write_csv
from penstock.simulate.certified_search import search_schedule
from tests.support import plain
from tests.support.orders import stage_costs

pytestmark = pytest.mark.slow
RANKS, MICROBATCHES = 2, 6


def found() -> dict[str, Schedule]:
    """One schedule of each kind, in little memory and with uneven costs."""
    loop, v, pipes = Placement.loop(RANKS, 2), Placement.waves(RANKS), Placement.two_way(RANKS)
    problems = {
        "loop": (loop, "full", stage_costs(loop, 3, 4, 2, latency=1), 3),
        "v": (v, "split", stage_costs(v, 3, 4, 2, latency=1), 3),
        "mixed": (v, "split", stage_costs(v, 3, 4, 4, full=5), 4),
        "two pipes": (pipes, "split", stage_costs(pipes, 3, 4, 2, latency=1), 2),
    }
    return {
        name: search_schedule(placement, MICROBATCHES, costs, backward, Budget(limit), seconds=0.2).schedule
        for name, (placement, backward, costs, limit) in problems.items()
    }


@pytest.fixture(scope="module")
def schedules() -> dict[str, Schedule]:
    return found()


def reference() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    net = plain.model(8)
    losses, _ = plain.step(net, nn.functional.mse_loss, *plain.batch(0, 2 * MICROBATCHES), MICROBATCHES)
    return losses, {name: p.grad for name, p in net.named_parameters()}


def piped(rank: int, paths: list[str], stages: list[int]) -> list[dict[str, torch.Tensor]]:
    torch.set_num_threads(1)
    results = []
    for path, count in zip(paths, stages, strict=True):
        with Pipeline(
            plain.model(8), nn.functional.mse_loss, microbatches=MICROBATCHES, ranks=RANKS, schedule=path,
            virtual_stages=count // RANKS,
        ) as pipe:  # fmt: skip
            losses = pipe.step(*plain.batch(0, 2 * MICROBATCHES)).losses
            results.append({"losses": losses} | {n: p.grad for n, p in pipe.named_parameters()})
    return results


def assert_equal(name: str, seen: dict[str, torch.Tensor]) -> None:
    losses, gradients = reference()
    assert torch.equal(seen["losses"], losses), name
    for parameter, gradient in gradients.items():
        if name == "two pipes":  # the copies of a stage are summed
            assert torch.allclose(seen[parameter], gradient, rtol=1e-5, atol=1e-7), parameter
        else:
            assert torch.equal(seen[parameter], gradient), (name, parameter)


def test_one_of_them_mixes_whole_and_split_backwards(schedules: dict[str, Schedule]):
    assert {Kind.B, Kind.I, Kind.W} <= set(schedules["mixed"].kind.tolist())


def test_gradients_are_those_of_plain_pytorch_in_threads_and_processes(
    schedules: dict[str, Schedule], processes: LocalProcesses, tmp_path: Path
):
    paths = [str(tmp_path / f"{n}.csv") for n in range(len(schedules))]
    for path, schedule in zip(paths, schedules.values(), strict=True):
        write_csv(schedule, path)
    stages = [schedule.stages for schedule in schedules.values()]
    parts = processes.run(RANKS, piped, paths, stages)
    for n, (name, alone) in enumerate(zip(schedules, piped(0, paths, stages), strict=True)):
        assert_equal(name, alone)
        assert_equal(name, {key: value for part in parts for key, value in part[n].items()})


def test_the_family_searched_trains_by_name():
    with Pipeline(
        plain.model(8), nn.functional.mse_loss, microbatches=MICROBATCHES, ranks=RANKS, schedule="searched",
        virtual_stages=2,
    ) as pipe:  # fmt: skip
        losses = pipe.step(*plain.batch(0, 2 * MICROBATCHES)).losses
        seen = {"losses": losses} | {n: p.grad for n, p in pipe.named_parameters()}
    assert_equal("searched", seen)
