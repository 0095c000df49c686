"""The user's own functions: what they may return, and what is said of their mistakes."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from itertools import repeat
from pathlib import Path

import pytest

from penstock.base.errors import ScheduleCodeError, ScheduleError
from penstock.schedule.check import check
from penstock.schedule.families import OwnFamily, build_schedule
from penstock.schedule.ops import Op
from penstock.schedule.placement import Placement
from tests.support import own_schedules as own

GOOD = build_schedule("1f1b", 2, 4)
HERE = Path(own.__file__).name


def family(function, name: str = "mine") -> OwnFamily:
    return OwnFamily(name, function)


def test_texts_of_ops_make_a_schedule():
    schedule = family(own.waiting).build(2, 4)
    assert schedule.name == "mine"
    assert schedule.placement == Placement.loop(2)
    assert schedule.text(1) == "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3"
    assert check(schedule).ops == 24


def test_ops_pairs_texts_and_generators_make_one_too():
    assert family(own.by_ops).build(3, 4) == build_schedule("gpipe", 3, 4)
    pairs = family(own.with_pairs).build(1, 3)
    assert pairs.text(0) == "0F0 (0F1;0B0)OVERLAP_F_B (0F2;0B1)OVERLAP_F_B 0B2"
    assert check(pairs).ops == 6


def test_a_schedule_keeps_its_placement_and_gets_the_familys_name():
    schedule = family(own.folded).build(3, 5)
    assert schedule == build_schedule("zb-v", 3, 5)
    assert schedule.name == "mine"


def test_options_reach_the_function_and_others_are_refused():
    assert family(own.waiting).build(2, 4, hold=0) != family(own.waiting).build(2, 4)
    assert family(own.waiting).options == ["hold"]
    with pytest.raises(
        ScheduleError, match=r"mine has no option 'held' \(did you mean 'hold'\?\); it takes hold"
    ):
        family(own.waiting).build(2, 4, held=0)
    with pytest.raises(ScheduleError, match="mine needs the option slots; give it, as in slots=VALUE"):
        family(lambda ranks, microbatches, slots: []).build(2, 4)
    free = family(lambda ranks, microbatches, **free: own.waiting(ranks, microbatches, **free))
    assert free.build(2, 4, hold=2) == family(own.waiting).build(2, 4, hold=2)


def test_the_number_of_stages_is_the_functions_unless_it_takes_one():
    assert family(own.folded).default_virtual_stages == 2
    assert family(own.folded).chooses_virtual_stages
    assert family(own.folded).build(2, 2, 2).stages == 4
    with pytest.raises(ScheduleError, match=rf"a V has two stages per rank, not 3 \(.*{HERE}, line \d+\)"):
        family(own.folded).build(2, 2, 3)
    assert family(own.waiting).build(2, 2, 1).stages == 2
    with pytest.raises(
        ScheduleError, match=r"mine has 1 stages per rank, got virtual_stages=2; leave it out"
    ):
        family(own.waiting).build(2, 2, 2)


def line_of(text: str) -> int:
    lines = Path(own.__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def test_an_error_in_the_function_names_file_and_line_and_counts():
    with pytest.raises(ScheduleCodeError) as caught:
        family(own.divides_by_zero).build(2, 4)
    assert "mine with ranks=2, microbatches=4 failed with ZeroDivisionError" in str(caught.value)
    assert f"{HERE}, line {line_of('1 // 0')})" in str(caught.value)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_value_error_refuses_the_counts_in_the_functions_words():
    with pytest.raises(ScheduleError) as caught:
        family(own.refuses).build(2, 4)
    assert not isinstance(caught.value, ScheduleCodeError)
    where = f"{HERE}, line {line_of('are too few')})"
    assert "mine with ranks=2, microbatches=4: 2 ranks are too few (" in str(caught.value)
    assert str(caught.value).endswith(where)


def test_an_endless_generator_is_noticed():
    def of_ranks(ranks, microbatches):
        while True:
            yield "0F0 0B0"

    def of_ops(ranks, microbatches):
        return [repeat("0F0"), ["1F0", "1B0"]]

    with pytest.raises(ScheduleCodeError, match="returned more than 2 lists of ops with ranks=2"):
        family(of_ranks).build(2, 1)
    with pytest.raises(ScheduleCodeError, match="returned more than 1,000,000 ops for rank 0"):
        family(of_ops).build(2, 1)


def test_a_mistake_in_a_generator_is_the_functions_too():
    def late(ranks, microbatches):
        yield "0F0 0B0"
        raise KeyError("late")

    with pytest.raises(ScheduleCodeError, match=rf"KeyError: 'late' \(.*{Path(__file__).name}, line \d+\)"):
        family(late).build(2, 1)


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (None, "returned NoneType None, not a Schedule or a list with the ops of every rank"),
        ("0F0 0B0", "returned str '0F0 0B0', not a Schedule or a list"),
        ({0: ["0F0"]}, "returned dict {0: ['0F0']}, not a Schedule or a list"),
        (7, "returned int 7, not a Schedule"),
        ([["0F0", "0B0"]], "returned 1 lists of ops with ranks=2; return one for each rank"),
        ([["0F0"], 5], "returned int 5 for rank 1, not a list of ops or a text of ops"),
        ([["0F0", "0X0"], []], "returned no op at place 1 of rank 0: '0X0' is not an op"),
        ([["0F0", 3], []], "returned no op at place 1 of rank 0: int 3 is not an op; an op is an Op, a Pair, or a text"),
        ([[Op(0, "F", 0)], []], "must be one of Kind.F, B, I, W, R, got 'F'"),
        ([[Op(0, 0, 0)], []], "must be one of Kind.F, B, I, W, R, got 0"),
        ([["0F0", "0B0"], []], "returned no ops for rank 1"),
        ([["0F0", "0B0"], ["2F0", "2B0"]], "mine: stage 1 has no op, but stage 2 has"),
        (replace(GOOD, offsets=GOOD.offsets + 1), "returned a Schedule whose columns do not fit each other; make it by"),
        (replace(GOOD, stage=GOOD.stage[:-1]), "a Schedule whose columns do not fit each other"),
        (replace(GOOD, kind=GOOD.kind.astype(float)), "a Schedule whose columns do not fit each other"),
        (build_schedule("1f1b", 2, 5), "returned a schedule of 2 ranks and 5 microbatches, not of 2 and 4"),
    ],
)  # fmt: skip
def test_what_is_no_schedule_is_named_with_the_function(returned: object, says: str):
    def made(ranks, microbatches):
        return returned

    with pytest.raises(ScheduleCodeError, match=re.escape(says)) as caught:
        family(made).build(2, 4)
    assert Path(__file__).name in str(caught.value)


@pytest.mark.parametrize("number", [-1, 1.5, "0", None, 10**12])
def test_numbers_of_ops_must_be_whole(number: object):
    from penstock.schedule.ops import Kind

    with pytest.raises(ScheduleCodeError, match="stage and microbatch must be whole numbers from 0"):
        family(lambda ranks, microbatches: [[Op(0, Kind.F, number)]]).build(1, 1)


def test_ops_that_are_missing_are_found_by_the_check():
    schedule = family(own.without_last_weight).build(2, 4)
    with pytest.raises(
        ScheduleError, match=r"mine is not a valid schedule: 0W3 is missing .*; 1W3 is missing"
    ):
        check(schedule)
    fewer = family(lambda ranks, microbatches: own.waiting(ranks, microbatches - 1)).build(2, 4)
    with pytest.raises(ScheduleError, match="0F3 is missing; 1F3 is missing"):
        check(fewer)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda p, m: [], "must have the parameters ranks and microbatches, and has p, m"),
        (lambda: [], "must have the parameters ranks and microbatches, and has none"),
        (lambda ranks, microbatches, /: [], "must have the parameters ranks and microbatches"),
        (lambda **counts: [], "must have the parameters ranks and microbatches, and has counts"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_at_once(function, says: str):
    with pytest.raises(ScheduleCodeError, match=says):
        family(function)


def test_partial_functions_and_objects_are_functions():
    class Maker:
        def __call__(self, ranks, microbatches):
            return own.waiting(ranks, microbatches)

    wanted = family(own.waiting).build(2, 3)
    assert family(Maker()).build(2, 3) == wanted
    assert family(partial(own.waiting, hold=1)).build(2, 3) == wanted


@pytest.mark.parametrize("count", [0, True, "2"])
def test_counts_are_checked_before_the_function_runs(count: object):
    with pytest.raises(ScheduleError, match="ranks must be a whole number of at least 1"):
        family(own.divides_by_zero).build(count, 1)
    with pytest.raises(ScheduleError, match="a schedule has at most"):
        family(own.divides_by_zero).build(10**6, 1)
