"""The same orders as torch.distributed.pipelining makes (torch 2.13), and files that each side reads of the other."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from penstock.schedule.check import check
from penstock.schedule.families import FAMILIES, build_schedule
from penstock.schedule.text import read_csv, write_csv
from penstock.simulate.costs import Costs
from penstock.simulate.simulator import simulate
from tests.support.lanes import slow
from tests.support.torch_schedules import CLASSES, Stage, orders, torch_schedules, torchs

FIRST = ("1f1b", "zb-v", "dualpipe-v")
FEW = ["ScheduleInterleaved1F1B", "ScheduleDualPipeV", *slow(*list(CLASSES)[1:4])]


@pytest.mark.parametrize(
    ("name", "theirs"),
    [("interleaved-1f1b", "ScheduleInterleaved1F1B"), ("interleaved-zb", "ScheduleInterleavedZeroBubble")],
)
def test_interleaved_orders_are_torchs_wherever_torch_has_one(name: str, theirs: str):
    compared = 0
    for p in (1, 2, 3, 4):
        for m in (1, 2, 3, 4, 7, 8):
            for v in (1, 2, 3):
                if (other := torchs(theirs, p, m, v)) is not None:
                    schedule = build_schedule(name, p, m, v)
                    assert [schedule.text(r) for r in range(p)] == orders(other), (p, m, v)
                    compared += 1
    assert compared > 25


@pytest.mark.parametrize(
    ("name", "theirs"), [("zb-v", "ScheduleZBVZeroBubble"), ("dualpipe-v", "ScheduleDualPipeV")]
)
def test_v_orders_are_torchs(name: str, theirs: str):
    compared = 0
    for p in (1, 2, 3, 4):
        for m in (2, 5, 8, 10):
            if (other := torchs(theirs, p, m, 2, folded=True)) is not None:
                schedule = build_schedule(name, p, m)
                assert [schedule.text(r) for r in range(p)] == orders(other), (p, m)
                compared += 1
    assert compared > 5


def test_breadth_first_is_torchs_but_for_the_order_of_microbatches_in_the_backward():
    for p, m, v in ((2, 3, 2), (4, 5, 3)):
        turned = [
            " ".join(op.replace(f"B{j}", f"B{m - 1 - j}") for op in line.split() for j in [int(op[-1])])
            for line in orders(torchs("ScheduleLoopedBFS", p, m, v))
        ]
        schedule = build_schedule("breadth-first", p, m, v)
        assert [schedule.text(r) for r in range(p)] == turned


# one stage a rank with whole backwards, stages on a V with split ones, pairs
@pytest.mark.parametrize(
    "name", [*FIRST, *slow(*(n for n, f in FAMILIES.items() if f.in_order and n not in FIRST))]
)
def test_torch_loads_and_lowers_what_we_write(name: str, tmp_path: Path):
    p, m = 3, 7
    ours = build_schedule(name, p, m)
    write_csv(ours, tmp_path / "ours.csv")
    stages = [Stage(index, ours.stages, p) for index in ours.placement.stages_of[0]]
    runtime = torch_schedules._PipelineScheduleRuntime(stages, m, loss_fn=lambda output, target: 0)
    runtime._load_csv(str(tmp_path / "ours.csv"))
    assert orders(runtime) == [ours.text(r) for r in range(p)]
    lowered = {str(op) for ops in runtime.pipeline_order_with_comms.values() for op in ops}
    assert any("SEND_F" in op for op in lowered)


@pytest.mark.parametrize("lowered", [False, True])
@pytest.mark.parametrize("theirs", FEW)
def test_we_read_what_torch_writes_with_its_idle_slots_and_messages(
    theirs: str, lowered: bool, tmp_path: Path
):
    v, folded = CLASSES[theirs]
    other = torchs(theirs, 4, 8, v, folded)
    other._dump_csv(str(tmp_path / "theirs.csv"), format="compute_comms" if lowered else "compute_only")
    schedule = read_csv(tmp_path / "theirs.csv")
    assert [schedule.text(r) for r in range(4)] == orders(other)
    assert (schedule.stages, schedule.microbatches) == (4 * v, 8)
    assert len(schedule.notes) == 2 * lowered  # of messages, and of gathers and reductions
    if lowered:
        text = (tmp_path / "theirs.csv").read_text()
        for word in ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD"):
            assert text.count(f"{word}") == 0 or f" {word}" in " ".join(schedule.notes)
        assert f"{text.count('SEND_F')} SEND_F" in schedule.notes[0]
    program = check(schedule).program
    assert simulate(program, Costs.of(schedule.placement, 3, 3, 3)).end.max() > 0


@pytest.mark.parametrize("theirs", FEW)
def test_what_torch_wrote_and_we_wrote_again_is_read_by_torch(theirs: str, tmp_path: Path):
    v, folded = CLASSES[theirs]
    other = torchs(theirs, 4, 8, v, folded)
    other._dump_csv(str(tmp_path / "lowered.csv"), format="compute_comms")
    write_csv(read_csv(tmp_path / "lowered.csv"), tmp_path / "ours.csv")
    again = torchs(theirs, 4, 8, v, folded)
    again._load_csv(str(tmp_path / "ours.csv"))
    assert orders(again) == orders(other)
    assert again.pipeline_order_with_comms == other.pipeline_order_with_comms


def test_torchs_gpipe_with_its_reductions_is_ours(tmp_path: Path):
    other = torch_schedules.ScheduleGPipe(Stage(0, 4, 4), 8, loss_fn=lambda output, target: 0)
    with open(tmp_path / "theirs.csv", "w", newline="") as file:
        csv.writer(file).writerows(ops for _, ops in sorted(other._get_pipeline_order().items()))
    schedule = read_csv(tmp_path / "theirs.csv")
    assert schedule == build_schedule("gpipe", 4, 8)
    (note,) = schedule.notes
    assert note.startswith("dropped 4 REDUCE_GRAD: ParallelOptions(shard=, window=, reduce_every=)")
