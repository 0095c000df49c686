"""Schedules of the user's own, those of a search and files that torch wrote give the gradients of plain PyTorch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

from penstock.base.errors import ScheduleError
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.schedule.families import build_schedule
from penstock.schedule.memory import Budget
from penstock.schedule.ops import Kind
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule
from penstock.schedule.text import read_csv, write_csv
from penstock.simulate.certified_search import search_schedule
from tests.support import plain
from tests.support.groups import outcome, run_cases
from tests.support.lanes import slow
from tests.support.orders import stage_costs

RANKS, MICROBATCHES, LAYERS = 2, 4, 6
OWN = "tests.support.own_schedules:"


def piped(rank: int, schedule: str, virtual: int | None = None) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    options: dict[str, Any] = {"schedule": schedule, "virtual_stages": virtual, "ranks": RANKS}
    with Pipeline(plain.model(LAYERS), mse_loss, microbatches=MICROBATCHES, **options) as pipe:
        losses = pipe.step(*plain.batch(0, 2 * MICROBATCHES)).losses
        return {"losses": losses} | {n: p.grad for n, p in pipe.named_parameters()}


def assert_equal(seen: dict[str, torch.Tensor], exactly: bool = True) -> None:
    net = plain.model(LAYERS)
    losses, _ = plain.step(net, mse_loss, *plain.batch(0, 2 * MICROBATCHES), MICROBATCHES)
    wanted = {"losses": losses} | {name: p.grad for name, p in net.named_parameters()}
    assert seen.keys() == wanted.keys()
    for name, value in wanted.items():
        if exactly:
            assert torch.equal(seen[name], value), name
        else:  # summed in another order
            assert torch.allclose(seen[name], value, rtol=1e-5, atol=1e-7), name


@pytest.mark.parametrize(
    ("function", "exactly"),
    [("waiting", True), ("folded", True), ("by_ops", True), ("reversed_backward", False)],
)
def test_own_functions_train_in_threads(function: str, exactly: bool):
    assert build_schedule(OWN + function, RANKS, MICROBATCHES).in_order == exactly
    assert_equal(piped(0, OWN + function), exactly)


def test_own_functions_and_files_train_in_processes(processes: LocalProcesses, tmp_path: Path):
    write_csv(build_schedule(OWN + "waiting", RANKS, MICROBATCHES), tmp_path / "mine.csv")
    cases = [(OWN + "folded",), (str(tmp_path / "mine.csv"),)]
    for parts in run_cases(processes, RANKS, piped, cases):
        assert_equal({name: value for part in parts for name, value in part.items()})


# Folded to a V with split backwards; the others split none, or have more stages.
@pytest.mark.parametrize(
    "theirs",
    [
        "ScheduleZBVZeroBubble",
        *slow(
            "ScheduleInterleaved1F1B",
            "ScheduleInterleavedZeroBubble",
            "ScheduleLoopedBFS",
            "ScheduleDualPipeV",
        ),
    ],
)
def test_files_that_torch_lowered_train(theirs: str, tmp_path: Path):
    from tests.support.torch_schedules import CLASSES, torchs

    v, folded = CLASSES[theirs]
    other = torchs(theirs, RANKS, MICROBATCHES, v, folded)
    other._dump_csv(str(tmp_path / "lowered.csv"), format="compute_comms")
    assert_equal(piped(0, str(tmp_path / "lowered.csv")), read_csv(tmp_path / "lowered.csv").in_order)


def test_a_file_with_an_op_that_nothing_follows_is_refused_by_that_op(tmp_path: Path):
    from tests.support.torch_schedules import Stage, orders, torch_schedules

    other = torch_schedules.Schedule1F1B(Stage(0, RANKS, RANKS), MICROBATCHES, loss_fn=lambda *_: 0)
    (tmp_path / "shown.csv").write_text("\n".join(line.replace(" ", ",") for line in orders(other)))
    with pytest.raises(
        ScheduleError, match=r"shown\.csv is not a valid schedule: microbatch 4 has only 1F4, but"
    ):
        piped(0, str(tmp_path / "shown.csv"))
    write_csv(build_schedule("1f1b", RANKS, MICROBATCHES + 1), tmp_path / "longer.csv")
    with pytest.raises(ScheduleError, match="has 5 microbatches, but microbatches=4"):
        piped(0, str(tmp_path / "longer.csv"))


def test_the_number_of_stages_is_the_functions_or_the_callers():
    with Pipeline(plain.model(4), mse_loss, microbatches=2, ranks=2, schedule=OWN + "folded") as pipe:
        assert pipe.schedule.stages == 4
    for schedule in (OWN + "folded", OWN + "waiting"):
        with pytest.raises(ScheduleError, match="stages per rank"):
            piped(0, schedule, 3)


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


@pytest.mark.slow
def test_what_a_search_found_trains_in_threads_and_processes(processes: LocalProcesses, tmp_path: Path):
    schedules = found()
    assert {Kind.B, Kind.I, Kind.W} <= set(schedules["mixed"].kind.tolist())
    cases = []
    for name, schedule in schedules.items():
        write_csv(schedule, tmp_path / f"{name}.csv")
        cases.append((str(tmp_path / f"{name}.csv"), schedule.stages // RANKS))
    for name, case, parts in zip(schedules, cases, run_cases(processes, RANKS, piped, cases), strict=True):
        exactly = name != "two pipes"  # the copies of a stage are summed
        assert_equal(piped(0, *case), exactly)
        assert_equal({key: value for part in parts for key, value in part.items()}, exactly)


def in_folder(rank: int, folder: str, schedule: str) -> str:
    sys.path.insert(0, folder)
    try:
        return outcome(piped, rank, schedule)
    finally:
        sys.path.remove(folder)


def test_processes_with_different_schedules_all_say_which(processes: LocalProcesses, tmp_path: Path):
    (tmp_path / "differs.py").write_text(
        "import torch.distributed as dist\n"
        "from tests.support.own_schedules import waiting\n\n\n"
        "def build(ranks, microbatches):\n"
        "    orders = waiting(ranks, microbatches)\n"
        "    if dist.get_rank() == 1:\n"
        "        orders[1] = waiting(ranks, microbatches, hold=2)[1]\n"
        "    return orders\n"
    )
    first, second = processes.run(RANKS, in_folder, str(tmp_path), "differs:build")
    assert first == second
    assert first.startswith("ScheduleError")
    assert "ops of rank 1 in the schedule is differs:build" in first
    assert "ops of rank 0" not in first
