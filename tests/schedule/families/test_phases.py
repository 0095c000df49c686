from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.schedule.families.phases import PatternOp, occurrence, phased
from penstock.schedule.ops import Kind
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule

F0, F1 = PatternOp(Kind.F, 0), PatternOp(Kind.F, 1)
I0, I1 = PatternOp(Kind.I, 0), PatternOp(Kind.I, 1)
B0, W = PatternOp(Kind.B, 0), PatternOp(Kind.W)


def text(*arguments, **options) -> str:
    columns = phased(*arguments, **options)
    return Schedule.from_columns("phased", Placement.loop(1, 4), 9, [columns]).text(0)


@given(st.lists(st.integers(-3, 3)))
def test_occurrence_counts_equal_keys_before_each(keys: list[int]):
    assert occurrence(np.array(keys, np.int64)).tolist() == [keys[:n].count(k) for n, k in enumerate(keys)]


def test_microbatches_follow_from_counting():
    assert text([(2, [F0]), (0, [F1]), (1, [F1, B0])], (1, 3), (9, 9)) == "1F0 1F1 3F0 1B0"


def test_phases_without_ops_or_of_no_turns_are_left_out():
    # A rule made for many microbatches may give a phase fewer than none.
    assert text([(1, [F0]), (-1, [F1]), (2, []), (1, [B0])], (1, 3), (9, 9)) == "1F0 1B0"


def test_input_halves_and_full_backwards_count_together():
    assert text(
        [(3, [F0]), (1, [B0, I0, B0]), (1, [PatternOp(Kind.W, 0)])], (1, 3), (9, 9), weights_in_turn=True
    ) == ("1F0 1F1 1F2 1B0 1I1 1B2 1W1")


def test_weights_in_turn_finish_the_oldest_input_half_of_either_chunk():
    assert (
        text([(1, [I1, I0, I1, W, W, W])], (1, 3), (9, 9), weights_in_turn=True) == "3I0 1I0 3I1 3W0 1W0 3W1"
    )


def test_microbatches_beyond_those_there_are_drop_out_of_pairs_too():
    pair = [PatternOp(Kind.F, 0, True), PatternOp(Kind.B, 1)]
    phases = [(3, pair)]
    assert text(phases, (0, 3), (9, 9)) == "(0F0;3B0)OVERLAP_F_B (0F1;3B1)OVERLAP_F_B (0F2;3B2)OVERLAP_F_B"
    assert text(phases, (0, 3), (1, 2)) == "(0F0;3B0)OVERLAP_F_B 3B1"
    assert text(phases, (0, 3), (2, 1)) == "(0F0;3B0)OVERLAP_F_B 0F1"


def test_each_chunk_has_its_own_first_microbatch():
    assert text([(2, [F0, F1])], (0, 3), (2, 1), (4, 0)) == "0F4 3F0 0F5"
