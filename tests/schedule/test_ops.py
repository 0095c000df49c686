from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import ScheduleError
from penstock.schedule.ops import Kind, Op, Pair, parse_op

OPS = st.builds(Op, st.integers(0, 10**9 - 1), st.sampled_from(Kind), st.integers(0, 10**9 - 1))


@given(OPS)
def test_an_op_is_read_as_it_is_written(op: Op):
    assert parse_op(str(op)) == op
    assert parse_op(f"  {op}\t") == op


@given(OPS, OPS)
def test_only_a_forward_and_then_a_backward_make_a_pair(a: Op, b: Op):
    text = str(Pair(a, b))
    if a.kind == Kind.F and b.kind in (Kind.B, Kind.I):
        assert parse_op(text) == Pair(a, b)
    else:
        with pytest.raises(ScheduleError, match="a pair is a forward"):
            parse_op(text)


def test_the_text_form_is_pytorchs():
    assert str(Op(3, Kind.F, 0)) == "3F0"
    assert str(Pair(Op(0, Kind.F, 7), Op(7, Kind.B, 3))) == "(0F7;7B3)OVERLAP_F_B"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F0",
        "3F",
        "3X0",
        "3F0 1B0",
        "-1F0",
        "3f0",
        "3F0.5",
        "(0F7)OVERLAP_F_B",
        "(0F7;7B3)",
        "3SEND_F0",
        "٣F٠",
    ],
)
def test_anything_else_is_refused_with_what_an_op_looks_like(text: str):
    with pytest.raises(ScheduleError, match="3F0"):
        parse_op(text)


@pytest.mark.parametrize("text", ["1" * 10 + "F0", "0F" + "9" * 5000])
def test_numbers_too_long_to_be_counts_are_refused(text: str):
    with pytest.raises(ScheduleError, match="nine digits"):
        parse_op(text)
