"""The same orders as torch.distributed.pipelining makes (torch 2.13), and files that each side reads of the other."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from penstock.schedule.families import FAMILIES, build_schedule
from penstock.schedule.text import read_csv, write_csv

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.distributed.pipelining import schedules as torch_schedules
    from torch.distributed.pipelining.stage import _PipelineStageBase


class Stage(_PipelineStageBase):
    """What torch's schedules ask of a stage while they plan; no process group, no module."""

    def __init__(self, index: int, stages: int, ranks: int) -> None:
        self.stage_index, self.num_stages, self.group_rank, self.group_size = index, stages, 0, ranks
        self.has_backward, self.stage_index_to_group_rank = False, {}
        self.submod = self.device = self.group = None

    def _create_grad_recv_info(self, *_: object) -> None: ...
    def _prepare_backward_infra(self, *_: object) -> None: ...
    def _prepare_forward_infra(self, *_: object) -> None: ...


def torchs(name: str, p: int, m: int, v: int, folded: bool = False):
    """torch's schedule, or None for counts it does not take; rank 0 holds stage 0 and, folded, the last."""
    indices = [0, 2 * p - 1] if folded else range(0, p * v, p)
    stages = [Stage(index, p * v, p) for index in indices]
    try:
        return getattr(torch_schedules, name)(stages, m, loss_fn=lambda output, target: 0)
    except ValueError:
        return None


def orders(schedule) -> list[str]:
    ranks = sorted(schedule.pipeline_order)
    return [" ".join(str(op) for op in schedule.pipeline_order[r] if op is not None) for r in ranks]


@pytest.mark.parametrize(
    ("name", "theirs"),
    [("interleaved-1f1b", "ScheduleInterleaved1F1B"), ("interleaved-zb", "ScheduleInterleavedZeroBubble")],
)
def test_interleaved_orders_are_torchs_wherever_torch_has_one(name: str, theirs: str):
    compared = 0
    for p in (1, 2, 3, 4, 5):
        for m in range(1, 13):
            for v in (1, 2, 3):
                if (other := torchs(theirs, p, m, v)) is not None:
                    schedule = build_schedule(name, p, m, v)
                    assert [schedule.text(r) for r in range(p)] == orders(other), (p, m, v)
                    compared += 1
    assert compared > 80


@pytest.mark.parametrize(
    ("name", "theirs"), [("zb-v", "ScheduleZBVZeroBubble"), ("dualpipe-v", "ScheduleDualPipeV")]
)
def test_v_orders_are_torchs(name: str, theirs: str):
    compared = 0
    for p in (1, 2, 3, 4, 6):
        for m in (1, 2, 5, 10, 13):
            if (other := torchs(theirs, p, m, 2, folded=True)) is not None:
                schedule = build_schedule(name, p, m)
                assert [schedule.text(r) for r in range(p)] == orders(other), (p, m)
                compared += 1
    assert compared > 9


def test_breadth_first_is_torchs_but_for_the_order_of_microbatches_in_the_backward():
    for p, m, v in ((2, 3, 2), (4, 5, 3)):
        turned = [
            " ".join(op.replace(f"B{j}", f"B{m - 1 - j}") for op in line.split() for j in [int(op[-1])])
            for line in orders(torchs("ScheduleLoopedBFS", p, m, v))
        ]
        schedule = build_schedule("breadth-first", p, m, v)
        assert [schedule.text(r) for r in range(p)] == turned


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.in_order])
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


@pytest.mark.parametrize(
    ("theirs", "v", "folded"),
    [
        ("ScheduleInterleaved1F1B", 2, False),
        ("ScheduleInterleavedZeroBubble", 2, False),
        ("ScheduleLoopedBFS", 3, False),
        ("ScheduleZBVZeroBubble", 2, True),
        ("ScheduleDualPipeV", 2, True),
    ],
)
def test_we_read_what_torch_writes_with_its_idle_slots(theirs: str, v: int, folded: bool, tmp_path: Path):
    other = torchs(theirs, 4, 8, v, folded)
    other._dump_csv(str(tmp_path / "theirs.csv"), format="compute_only")
    schedule = read_csv(tmp_path / "theirs.csv")
    assert [schedule.text(r) for r in range(4)] == orders(other)
    assert (schedule.stages, schedule.microbatches) == (4 * v, 8)
