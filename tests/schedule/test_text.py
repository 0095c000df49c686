from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.base.errors import ScheduleError
from penstock.schedule.families import FAMILIES, build_schedule
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule
from penstock.schedule.text import csv_line, from_lists, read_csv, write_csv
from tests.support.lanes import exhaustive
from tests.support.schedules import written

SHARED = [HealthCheck.function_scoped_fixture]
FIRST = ("zb-h1", "dualpipe", "chimera", "hanayo")
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
    assert again == schedule
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
