from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import ScheduleError
from penstock.schedule.placement import Placement


def test_a_loop_goes_round_the_ranks():
    assert Placement.loop(3, 2).holders == ((0,), (1,), (2,), (0,), (1,), (2,))
    assert Placement.loop(3, 2).stages_of == ((0, 3), (1, 4), (2, 5))


def test_waves_go_down_and_up():
    assert Placement.waves(3).stages_of == ((0, 5), (1, 4), (2, 3))
    assert Placement.waves(2, 4).stages_of == ((0, 3, 4, 7), (1, 2, 5, 6))
    assert Placement.waves(1).stages_of == ((0, 1),)


def test_two_pipes_hold_every_stage_twice_and_save_the_one_that_goes_down():
    placement = Placement.two_way(4)
    assert placement.holders == ((0, 3), (1, 2), (2, 1), (3, 0))
    assert placement.has_copies
    assert not Placement.loop(4).has_copies


@given(st.integers(1, 40), st.integers(1, 9))
def test_every_rank_of_a_loop_or_wave_holds_the_same_number_of_stages(ranks: int, virtual_stages: int):
    for placement in (Placement.loop(ranks, virtual_stages), Placement.waves(ranks, virtual_stages)):
        assert placement.stages == ranks * virtual_stages
        assert {len(held) for held in placement.stages_of} == {virtual_stages}


@pytest.mark.parametrize(
    ("ranks", "holders", "says"),
    [
        (0, ((0,),), "ranks must be at least 1"),
        (2, (), "at least one stage"),
        (2, ((0,), ()), "stage 1 is placed on ranks []"),
        (2, ((0,), (2,)), "out of 0..1"),
        (2, ((0, 0), (1,)), "each once"),
        (3, ((0,), (2,)), "rank(s) [1] hold no stage"),
    ],
)
def test_a_placement_that_makes_no_sense_is_refused(ranks: int, holders: tuple, says: str):
    with pytest.raises(ScheduleError, match=re.escape(says)):
        Placement(ranks, holders)


@pytest.mark.parametrize("ranks", [0, 1, 3])
def test_two_pipes_need_an_even_number_of_ranks(ranks: int):
    with pytest.raises(ScheduleError, match="even number of ranks"):
        Placement.two_way(ranks)


def test_loops_and_waves_of_nothing_are_refused():
    for make in (Placement.loop, Placement.waves):
        with pytest.raises(ScheduleError, match="at least 1, got 0 and 1"):
            make(0, 1)
        with pytest.raises(ScheduleError, match="at least 1, got 2 and 0"):
            make(2, 0)
