"""Files of schedules: read back as written, and as other programs write them; what is dropped and assumed is said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.base.errors import ScheduleError
from penstock.schedule.check import check
from penstock.schedule.families import FAMILIES, build_schedule
from penstock.schedule.ops import Kind
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule
from penstock.schedule.text import csv_line, from_lists, read_csv, write_csv
from tests.support.lanes import exhaustive
from tests.support.schedules import written

SHARED = [HealthCheck.function_scoped_fixture]
FIRST = ("zb-h1", "dualpipe", "chimera", "hanayo", "round-trip")
FUZZ = settings(deadline=None, derandomize=True, max_examples=80, suppress_health_check=SHARED)


def read(path: Path, text: str | bytes) -> Schedule:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_csv(path)


# one op a cell, pairs, copies, and more than two stages a rank
@pytest.mark.parametrize("name", [*FIRST, *exhaustive(*(name for name in FAMILIES if name not in FIRST))])
def test_what_is_written_is_read_back(name: str, tmp_path: Path):
    schedule = build_schedule(name, 4, 10)
    write_csv(schedule, tmp_path / "s.csv")
    again = read_csv(tmp_path / "s.csv")
    assert again == schedule == read_csv(tmp_path / "s.csv", "auto" if Kind.I in schedule.kind else "full")
    assert again.notes == ()
    assert again.name == str(tmp_path / "s.csv")
    lines = (tmp_path / "s.csv").read_text().splitlines()
    assert lines == [csv_line(schedule, rank) for rank in range(4)]


def test_idle_slots_spaces_and_line_ends_of_other_systems_are_read(tmp_path: Path):
    schedule = written(Placement.loop(2), 2, "0F0 0F1 0B0 0B1", "1F0 (1F1;1B0)OVERLAP_F_B 1B1")
    text = "0F0,0F1,,, 0B0,0B1\r\n,1F0,(1F1;1B0)OVERLAP_F_B ,1B1,,\r\n,,\r\n\r\n"
    assert read(tmp_path / "s.csv", text) == schedule
    assert read(tmp_path / "s.csv", b"\xef\xbb\xbf" + text.encode()) == schedule


def test_comments_are_skipped_and_keep_the_numbers_of_lines(tmp_path: Path):
    path = tmp_path / "mine.csv"
    path.write_text("# two ranks, one microbatch\n0F0,0B0\n # the second\n1F0,1B0\n")
    assert read_csv(path).ranks == 2
    path.write_text("# one\n0F0,0X0\n")
    with pytest.raises(ScheduleError, match="line 2, column 2"):
        read_csv(path)


def test_a_copy_that_a_file_does_not_show_is_still_one_of_two_pipes(tmp_path: Path):
    path = tmp_path / "s.csv"
    write_csv(build_schedule("chimera", 4, 2), path)
    assert read_csv(path).placement == Placement.two_way(4)
    assert read(path, "0F0,1F0,1B0,0B0\n0F1,1F1,1B1,0B1\n").placement.holders == ((0, 1), (1, 0))
    assert read(path, "0F0,1F0,2F0,2B0,1B0,0B0\n0F1,1F1,2F1,2B1,1B1,0B1\n").placement.holders == ((0, 1),) * 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0F0,0B0\n1F0,1X0\n", "line 2, column 2: '1X0' is not an op"),
        ("0F0,,hello,0B0\n", "line 1, column 3: 'hello' is not an op"),
        ("0F0,0SENDF0,0B0\n", "line 1, column 2: '0SENDF0' is not an op"),
        ("0F0,0B0\n1RECV_F0,1SEND_B0\n", "line 2 (rank 1) holds no op"),
        ("0F0,0B0\n\n1F0,1B0\n", "line 2 (rank 1) holds no op"),
        ("", "holds no op"),
        ("\n\n", "holds no op"),
        ("0F0,0B0\n2F0,2B0\n", "stage 1 has no op, but stage 2 has"),
        ("0F0,0B0,0F900000000\n", "microbatch 900000000 appears in a file of 3 ops"),
        ('"0F0,0B0\n', "cannot read the schedule"),
        (b"\xff\xfe0F0", "cannot read the schedule"),
        ('"0F0\n",0B0\n1Q0\n', "line 3, column 1: '1Q0'"),  # a line that spans two, counted as an editor does
    ],
)
def test_what_cannot_be_read_is_said_with_its_place(text: str | bytes, says: str, tmp_path: Path):
    with pytest.raises(ScheduleError, match=re.escape(says)):
        read(tmp_path / "s.csv", text)


def test_files_that_are_not_there_are_said(tmp_path: Path):
    with pytest.raises(ScheduleError, match="cannot read the schedule"):
        read_csv(tmp_path / "none.csv")
    with pytest.raises(ScheduleError, match="cannot read the schedule"):
        read_csv(tmp_path)
    with pytest.raises(ScheduleError, match="cannot write the schedule"):
        write_csv(build_schedule("1f1b", 1, 1), tmp_path / "no" / "s.csv")
    with pytest.raises(ScheduleError, match="none holds no op"):
        from_lists("none", [])


@FUZZ
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(tmp_path: Path, content: bytes):
    try:
        schedule = read(tmp_path / "s.csv", content)
    except ScheduleError:
        return
    assert len(schedule) > 0


CELLS = st.sampled_from(
    ["0F0", "0B0", "1F0", "1B1", "0F1", "(0F1;0B0)OVERLAP_F_B", "", " ", "0R0", "0UNSHARD", "9F9", "0W1"]
)
NO_OPS = {"", "0UNSHARD"}


@FUZZ
@given(st.lists(st.lists(CELLS, max_size=6), max_size=4), st.sampled_from(["\n", "\r\n", "\r"]))
def test_any_cells_are_read_as_they_stand_or_refused(tmp_path: Path, rows: list[list[str]], line_end: str):
    text = line_end.join(",".join(row) for row in rows)
    try:
        schedule = read(tmp_path / "s.csv", text)
    except ScheduleError:
        return
    full = [[cell for cell in row if cell.strip() not in NO_OPS] for row in rows]
    while full and not full[-1]:
        full.pop()
    assert [csv_line(schedule, rank).split(",") for rank in range(schedule.ranks)] == full


GOOD = "".join(csv_line(build_schedule("dualpipe-v", 2, 3), rank) + "\n" for rank in range(2))


@FUZZ
@given(st.integers(0, 10_000), st.characters(), st.booleans())
def test_one_wrong_character_in_a_schedule_is_read_or_refused(
    tmp_path: Path, where: int, what: str, insert: bool
):
    where %= len(GOOD)
    text = GOOD[:where] + what + GOOD[where + 1 - insert :]
    try:
        schedule = read(tmp_path / "s.csv", text.encode("utf-8", "replace"))
    except ScheduleError:
        return
    assert schedule.ranks >= 1


TORCH_BEFORE_I = """\
0F0,0F1,2F0,,2F1,2B0,2W0,0F2,2B1,2W1,0F3,0B0,0W0,2F2,0B1,0W1,2F3,2B2,2W2,2B3,2W3,0B2,0W2,0B3,0W3
,1F0,1F1,3F0,3B0,3F1,3B1,3W0,1F2,1B0,3W1,1F3,1B1,1W0,3F2,3B2,1W1,3F3,3B3,3W2,1B2,3W3,1B3,1W2,1W3
"""
"""In the manner of torch's test file zb1p_2rank_2stagep_compute.csv, with four microbatches: B beside W, and no I."""


def read_as(folder: Path, text: str, backward: str = "auto") -> Schedule:
    (folder / "s.csv").write_text(text)
    return read_csv(folder / "s.csv", backward)


def lines(schedule: Schedule) -> str:
    return "\n".join(schedule.text(rank) for rank in range(schedule.ranks))


def test_b_beside_w_is_the_input_gradient(tmp_path: Path):
    schedule = read_as(tmp_path, TORCH_BEFORE_I)
    assert check(schedule).ops == 4 * 4 * 3
    assert not (schedule.kind == Kind.B).any()
    assert lines(schedule).split() == TORCH_BEFORE_I.replace("B", "I").replace(",", " ").split()
    assert schedule.notes == (
        "read 16 B as I, the input gradient: a W of the same stage and microbatch is there",
    )
    assert schedule.notes[0] in str(check(schedule))
    again = read_as(tmp_path, TORCH_BEFORE_I.replace("B", "I"))
    assert again == schedule
    assert again.notes == ()


def test_bw_is_the_full_backward_and_b_then_the_input_gradient(tmp_path: Path):
    schedule = read_as(
        tmp_path, "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0BW0,0RECV_B1,0BW1\n1RECV_F0,1F0,1B0,1F1,1W0,1BW1\n"
    )
    assert lines(schedule) == "0F0 0F1 0B0 0B1\n1F0 1I0 1F1 1W0 1B1"
    assert schedule.notes == (
        "dropped 2 SEND_F, 2 RECV_B, 1 RECV_F: communication follows from the compute ops",
        "read 1 B as I, the input gradient: BW is the full backward",
    )
    pair = read_as(tmp_path, "0F0,(0F1;0BW0)OVERLAP_F_B,0B1,0W1\n")
    assert lines(pair) == "0F0 (0F1;0B0)OVERLAP_F_B 0I1 0W1"
    with pytest.raises(ScheduleError, match=r"1W0 is missing \(1I0 is there\)"):
        check(read_as(tmp_path, "0F0,0F1,0BW0,0BW1\n1F0,1B0,1F1,1BW1\n"))


def test_a_file_says_that_its_gathers_are_not_used_but_the_options_decide(tmp_path: Path):
    messages, gathers = read_as(
        tmp_path, "0UNSHARD,0F0,0RESHARD,0SEND_F0,0RECV_B0,0UNSHARD,0B0,0REDUCE_GRAD\n1F0,1B0\n"
    ).notes
    assert messages == "dropped 1 SEND_F, 1 RECV_B: communication follows from the compute ops"
    assert gathers.startswith("dropped 2 UNSHARD, 1 RESHARD, 1 REDUCE_GRAD: ParallelOptions(shard=")


def test_a_pair_may_have_the_input_gradient_too(tmp_path: Path):
    schedule = read_as(tmp_path, "0F0,(0F1;0B0)OVERLAP_F_B,0W0,0B1,0W1\n")
    assert csv_line(schedule, 0) == "0F0,(0F1;0I0)OVERLAP_F_B,0W0,0I1,0W1"
    assert check(schedule).ops == 6


MIXED = "0F0,0F1,0B0,0W0,0B1\n"


def test_an_ambiguous_file_says_what_is_assumed_and_can_be_forced(tmp_path: Path):
    schedule = read_as(tmp_path, MIXED)
    assert lines(schedule) == "0F0 0F1 0I0 0W0 0B1"
    assert schedule.notes[1] == (
        "read 1 B without a W as full backwards; if a W is missing instead, read the file with backward=input"
    )
    check(schedule)
    with pytest.raises(ScheduleError, match=r"0W1 is missing \(0I1 is there\)"):
        check(read_as(tmp_path, MIXED, "input"))
    with pytest.raises(
        ScheduleError, match="0B0 and 0W0 both appear: one backward too many; if B means the input gradient"
    ):
        check(read_as(tmp_path, MIXED, "full"))


def test_a_file_with_i_means_the_full_backward_by_b(tmp_path: Path):
    assert lines(read_as(tmp_path, "0F0,0F1,0I0,0W0,0B1\n")) == "0F0 0F1 0I0 0W0 0B1"
    with pytest.raises(ScheduleError, match="0B1 and 0W1 both appear: one backward too many"):
        check(read_as(tmp_path, "0F0,0F1,0I0,0W0,0B1,0W1\n"))
    forced = read_as(tmp_path, "0F0,0F1,0I0,0W0,0B1,0W1\n", "input")
    assert lines(forced) == "0F0 0F1 0I0 0W0 0I1 0W1"
    assert forced.notes == ("read 1 B as I, the input gradient: as asked",)


@pytest.mark.parametrize("cell", ["0SEND_F", "0SEND_X1", "SEND_F0", "0UNSHARDED", "0BW", "0REDUCE"])
def test_what_only_looks_like_a_known_word_is_refused(tmp_path: Path, cell: str):
    with pytest.raises(ScheduleError, match=re.escape(f"line 1, column 2: '{cell}' is not an op")):
        read_as(tmp_path, f"0F0,{cell},0B0\n")


def test_another_meaning_of_b_is_refused(tmp_path: Path):
    for backward in ("I", "", None, "FULL"):
        with pytest.raises(ScheduleError, match="backward must be auto, full or input, got"):
            read_as(tmp_path, "0F0,0B0\n", backward)
