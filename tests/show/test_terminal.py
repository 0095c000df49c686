from __future__ import annotations

from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from penstock.schedule.placement import Placement
from penstock.show.terminal import MAX_LINES, bubble_table, draw_terminal
from penstock.show.units import Unit
from penstock.trace.bubbles import CAUSES, Bubbles
from tests.support.simulated import built, timed, written
from tests.support.traces import trace_of


def drawn(trace, width: int = 80) -> list[str]:
    return str(draw_terminal(trace, width)).split("\n")


def test_the_drawing_shows_stages_and_numbers_where_there_is_room():
    assert drawn(timed(built("1f1b", 2, 3), 1, 1, 1), 31) == [
        "rank 0 F0F1····B0  F2B1  ··B2  ",
        "rank 1 ··F0B0  F1B1  F2B2  ····",
        "       0                     12",
        "       F forward   B backward   · idle",
    ]
    assert drawn(timed(built("1f1b", 2, 3), 1, 1, 1), 7 + 12)[:2] == [
        "rank 0 FF··B0FB1·B2",
        "rank 1 ·FB0FB1FB2··",
    ]
    lines = drawn(timed(built("interleaved-1f1b", 2, 2, 2), 2, 2, 2), 7 + 3 * 15)
    assert lines[0] == "rank 0 0F00F12F02F1······2B0   ···2B1   0B0   0B1   "
    assert lines[1] == "rank 1 ···1F01F13F03B0   3F13B1   1B0   1B1   ······"


def test_a_long_trace_stays_on_one_line_a_rank_of_the_terminals_width(monkeypatch: pytest.MonkeyPatch):
    lines = drawn(timed(built("1f1b", 4, 200), 1, 1, 1), 60)
    assert len(lines) == 6
    assert all(len(line) <= 60 for line in lines)
    assert str(draw_terminal(trace_of("", ""), 40)) == "nothing ran"
    monkeypatch.setenv("COLUMNS", "43")
    line = str(draw_terminal(timed(built("1f1b", 2, 3), 1, 1, 1))).split("\n")[0]
    assert len(line) == 43


def test_of_many_ranks_the_first_and_the_last_are_drawn():
    lines = drawn(timed(built("gpipe", 40, 2), 1, 1, 1), 90)
    assert len(lines) == MAX_LINES + 2
    assert lines[0].startswith(" rank 0 ")
    assert lines[MAX_LINES // 2].strip() == "⋮ 9 more ranks"
    assert lines[MAX_LINES // 2 + 1].startswith("rank 25 ")
    assert lines[MAX_LINES - 1].startswith("rank 39 ")
    lines = drawn(timed(built("gpipe", MAX_LINES, 2), 1, 1, 1), 90)
    assert [line.split()[1] for line in lines[:MAX_LINES]] == [str(r) for r in range(MAX_LINES)]


def test_a_pair_is_one_op():
    pairs = ("0F0 0F1 (0F2;0B0)OVERLAP_F_B 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")
    lines = drawn(timed(written(Placement.loop(2), 3, *pairs), 1, 1, 1), 31)
    assert lines[0] == "rank 0 F0F1····F2&B0 B1  ··B2  "
    assert lines[-1].strip() == "F forward   B backward   & forward and backward in one   · idle"


def test_all_kinds_of_events_have_a_letter():
    trace = trace_of("0GATHER@0-3 0F0@0-2 0R0@2-4 0I0@4-6 0W0@6-8 SEND@6-9 0REDUCE@7-10 OPTIMIZER@10-12")
    lines = drawn(trace, 7 + 12)
    assert lines[:2] == ["rank 0 F0R0I0W0··O ", "       +++    ===  "]
    assert lines[-1].strip().endswith("= reduction   O optimizer   + gather of weights   · idle")


def test_gathers_and_reductions_that_cross_have_a_line_each():
    trace = trace_of("0GATHER@0-3 0F0@0-2 1GATHER@3-8 0REDUCE@4-6 1F0@8-9")
    assert drawn(trace, 7 + 9)[:3] == ["rank 0 F ······F", "       +0++1+++ ", "           =0   "]


def test_colours_are_added_and_change_nothing():
    text = draw_terminal(timed(built("1f1b", 2, 3), 1, 1, 1), 31)
    plain, coloured = StringIO(), StringIO()
    Console(file=plain, width=31, no_color=True).print(text, end="")
    Console(file=coloured, width=31, force_terminal=True, color_system="standard").print(text, end="")
    assert plain.getvalue().splitlines()[0] == str(text).splitlines()[0]
    assert "\x1b[30;104mF0" in coloured.getvalue()
    assert "\x1b[" not in plain.getvalue()


def test_all_causes_fit_into_80_columns_when_narrow():
    times = np.array([11.25, 2.0])
    split = Bubbles(973.0, 973.0 - len(CAUSES) * times, dict.fromkeys(CAUSES, times))
    out = StringIO()
    table = bubble_table(split, {"most\nheld": ["15.12 MiB"] * 2}, Unit("ms", 1.0), narrow=True)
    Console(file=out, width=80).print(table)
    *_, first, second = out.getvalue().splitlines()
    assert "…" not in out.getvalue()
    assert first.split() == ["0", "894", "79", *["11"] * len(CAUSES), "15.12", "MiB"]
    assert second.split() == ["1", "959", "14", *["2"] * len(CAUSES), "15.12", "MiB"]
