"""Files as other programs write them: what is dropped and assumed is said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.base.errors import ScheduleError
from penstock.schedule.check import check
from penstock.schedule.families import build_schedule
from penstock.schedule.ops import Kind
from penstock.schedule.schedule import Schedule
from penstock.schedule.text import csv_line, read_csv

TORCH_BEFORE_I = """\
0F0,0F1,2F0,,2F1,2B0,2W0,0F2,2B1,2W1,0F3,0B0,0W0,2F2,0B1,0W1,2F3,2B2,2W2,2B3,2W3,0B2,0W2,0B3,0W3
,1F0,1F1,3F0,3B0,3F1,3B1,3W0,1F2,1B0,3W1,1F3,1B1,1W0,3F2,3B2,1W1,3F3,3B3,3W2,1B2,3W3,1B3,1W2,1W3
"""
"""In the manner of torch's test file zb1p_2rank_2stagep_compute.csv, with four microbatches: B beside W, and no I."""


def read(folder: Path, text: str, backward: str = "auto") -> Schedule:
    (folder / "s.csv").write_text(text)
    return read_csv(folder / "s.csv", backward)


def lines(schedule: Schedule) -> str:
    return "\n".join(schedule.text(rank) for rank in range(schedule.ranks))


def test_b_beside_w_is_the_input_gradient(tmp_path: Path):
    schedule = read(tmp_path, TORCH_BEFORE_I)
    assert check(schedule).ops == 4 * 4 * 3
    assert not (schedule.kind == Kind.B).any()
    assert lines(schedule).split() == TORCH_BEFORE_I.replace("B", "I").replace(",", " ").split()
    assert schedule.notes == (
        "read 16 B as I, the input gradient: a W of the same stage and microbatch is there",
    )
    assert schedule.notes[0] in str(check(schedule))
    again = read(tmp_path, TORCH_BEFORE_I.replace("B", "I"))
    assert again == schedule
    assert again.notes == ()


def test_bw_is_the_full_backward_and_b_then_the_input_gradient(tmp_path: Path):
    schedule = read(
        tmp_path, "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0BW0,0RECV_B1,0BW1\n1RECV_F0,1F0,1B0,1F1,1W0,1BW1\n"
    )
    assert lines(schedule) == "0F0 0F1 0B0 0B1\n1F0 1I0 1F1 1W0 1B1"
    assert schedule.notes == (
        "dropped 2 SEND_F, 2 RECV_B, 1 RECV_F: communication follows from the compute ops",
        "read 1 B as I, the input gradient: BW is the full backward",
    )
    with pytest.raises(ScheduleError, match=r"1W0 is missing \(1I0 is there\)"):
        check(read(tmp_path, "0F0,0F1,0BW0,0BW1\n1F0,1B0,1F1,1BW1\n"))


def test_a_file_says_that_its_gathers_are_not_used_but_the_options_decide(tmp_path: Path):
    messages, gathers = read(
        tmp_path, "0UNSHARD,0F0,0RESHARD,0SEND_F0,0RECV_B0,0UNSHARD,0B0,0REDUCE_GRAD\n1F0,1B0\n"
    ).notes
    assert messages == "dropped 1 SEND_F, 1 RECV_B: communication follows from the compute ops"
    assert gathers.startswith("dropped 2 UNSHARD, 1 RESHARD, 1 REDUCE_GRAD: ParallelOptions(shard=")


def test_a_pair_may_have_the_input_gradient_too(tmp_path: Path):
    schedule = read(tmp_path, "0F0,(0F1;0B0)OVERLAP_F_B,0W0,0B1,0W1\n")
    assert csv_line(schedule, 0) == "0F0,(0F1;0I0)OVERLAP_F_B,0W0,0I1,0W1"
    assert check(schedule).ops == 6


MIXED = "0F0,0F1,0B0,0W0,0B1\n"


def test_an_ambiguous_file_says_what_is_assumed_and_can_be_forced(tmp_path: Path):
    schedule = read(tmp_path, MIXED)
    assert lines(schedule) == "0F0 0F1 0I0 0W0 0B1"
    assert schedule.notes[1] == (
        "read 1 B without a W as full backwards; if a W is missing instead, read the file with backward=input"
    )
    check(schedule)
    with pytest.raises(ScheduleError, match=r"0W1 is missing \(0I1 is there\)"):
        check(read(tmp_path, MIXED, "input"))
    with pytest.raises(
        ScheduleError, match="0B0 and 0W0 both appear: one backward too many; if B means the input gradient"
    ):
        check(read(tmp_path, MIXED, "full"))


def test_a_file_with_i_means_the_full_backward_by_b(tmp_path: Path):
    assert lines(read(tmp_path, "0F0,0F1,0I0,0W0,0B1\n")) == "0F0 0F1 0I0 0W0 0B1"
    with pytest.raises(ScheduleError, match="0B1 and 0W1 both appear: one backward too many"):
        check(read(tmp_path, "0F0,0F1,0I0,0W0,0B1,0W1\n"))
    forced = read(tmp_path, "0F0,0F1,0I0,0W0,0B1,0W1\n", "input")
    assert lines(forced) == "0F0 0F1 0I0 0W0 0I1 0W1"
    assert forced.notes == ("read 1 B as I, the input gradient: as asked",)


def test_full_backwards_alone_stay_as_they_are(tmp_path: Path):
    schedule = build_schedule("1f1b", 2, 4)
    text = "".join(csv_line(schedule, rank) + "\n" for rank in range(2))
    for backward in ("auto", "full"):
        again = read(tmp_path, text, backward)
        assert again == schedule
        assert again.notes == ()


@pytest.mark.parametrize("cell", ["0SEND_F", "0SEND_X1", "SEND_F0", "0UNSHARDED", "0BW", "0REDUCE"])
def test_what_only_looks_like_a_known_word_is_refused(tmp_path: Path, cell: str):
    with pytest.raises(ScheduleError, match=re.escape(f"line 1, column 2: '{cell}' is not an op")):
        read(tmp_path, f"0F0,{cell},0B0\n")


@pytest.mark.parametrize("backward", ["I", "", None, "FULL"])
def test_another_meaning_of_b_is_refused(tmp_path: Path, backward: object):
    with pytest.raises(ScheduleError, match="backward must be auto, full or input, got"):
        read(tmp_path, "0F0,0B0\n", backward)
