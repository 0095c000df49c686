"""Schedules of the user's own, and files that torch wrote, give the gradients of plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from penstock.base.errors import ScheduleError
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.schedule.families import build_schedule
from penstock.schedule.text import read_csv, write_csv
from tests.support import plain
from tests.support.groups import run_cases
from tests.support.torch_schedules import CLASSES, torchs

RANKS, MICROBATCHES, LAYERS = 2, 4, 6
OWN = "tests.support.own_schedules:"


def piped(rank: int, schedule: str, virtual_stages: int | None = None) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    with Pipeline(
        plain.model(LAYERS), nn.functional.mse_loss, microbatches=MICROBATCHES, ranks=RANKS, schedule=schedule,
        virtual_stages=virtual_stages,
    ) as pipe:  # fmt: skip
        losses = pipe.step(*plain.batch(0, 2 * MICROBATCHES)).losses
        return {"losses": losses} | {n: p.grad for n, p in pipe.named_parameters()}


def assert_equal(seen: dict[str, torch.Tensor], exactly: bool = True) -> None:
    net = plain.model(LAYERS)
    losses, _ = plain.step(net, nn.functional.mse_loss, *plain.batch(0, 2 * MICROBATCHES), MICROBATCHES)
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
    cases = [(OWN + "waiting",), (OWN + "folded",), (str(tmp_path / "mine.csv"),)]
    for parts in run_cases(processes, RANKS, piped, cases):
        assert_equal({name: value for part in parts for name, value in part.items()})


@pytest.mark.parametrize("theirs", CLASSES)
def test_files_that_torch_lowered_train(theirs: str, tmp_path: Path):
    v, folded = CLASSES[theirs]
    other = torchs(theirs, RANKS, MICROBATCHES, v, folded)
    other._dump_csv(str(tmp_path / "lowered.csv"), format="compute_comms")
    assert_equal(piped(0, str(tmp_path / "lowered.csv")), read_csv(tmp_path / "lowered.csv").in_order)


def test_the_number_of_stages_is_the_functions_or_the_callers():
    with Pipeline(
        plain.model(LAYERS), nn.functional.mse_loss, microbatches=2, ranks=2, schedule=OWN + "folded"
    ) as pipe:
        assert pipe.schedule.stages == 4
    for schedule in (OWN + "folded", OWN + "waiting"):
        with pytest.raises(ScheduleError, match="stages per rank"):
            piped(0, schedule, 3)


def differs(rank: int, schedule: str) -> str:
    try:
        piped(rank, schedule)
    except ScheduleError as error:
        return str(error)
    return "no error"


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
    assert "ops of rank 1 in the schedule is differs:build" in first
    assert "ops of rank 0" not in first


def in_folder(rank: int, folder: str, schedule: str) -> str:
    import sys

    sys.path.insert(0, folder)
    try:
        return differs(rank, schedule)
    finally:
        sys.path.remove(folder)
