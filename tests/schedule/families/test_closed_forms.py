"""The formulas of the catalogue against times worked out op by op."""

from __future__ import annotations

from fractions import Fraction

import pytest

from penstock.base.errors import ScheduleError
from penstock.schedule.check import check
from penstock.schedule.families import FAMILIES, build_schedule
from penstock.schedule.families.closed_forms import Setting
from penstock.schedule.families.controllable import half_limit, third_limit
from penstock.schedule.families.full_backward import legal_group, smallest_group
from penstock.schedule.memory import peak
from penstock.schedule.ops import Kind
from tests.support.lanes import slow
from tests.support.schedule_oracle import timed
from tests.support.schedules import allows

COSTS = ((1, 1, 1), (3, 3, 2), (3, 4, 2), (2, 1, 1), (1, 1, 2))
GRID = [(p, m) for p in (1, 2, 3, 4, 6) for m in (1, 2, 3, 4, 6, 8, 12, 13)]


BUILT = [name for name, family in FAMILIES.items() if not family.searches]


@pytest.mark.parametrize(
    ("name", "grid"), [*((name, GRID[3::9]) for name in BUILT), *slow(*((name, GRID) for name in BUILT))]
)
def test_bubble_and_peak_are_as_the_formulas_say(name: str, grid: list[tuple[int, int]]):
    family = FAMILIES[name]
    bubbles = peaks = 0
    for v in (1, 2, 3, 4) if family.chooses_virtual_stages else (family.virtual_stages,):
        for p, m in grid:
            if not allows(family, p, v):
                continue
            schedule = family.build(p, m, v)
            held = peak(schedule)
            for r in range(p):
                formula = family.peak.value(Setting(p, m, v), r)
                assert formula in (None, held[r]), (p, m, v, r)
                peaks += formula is not None
            for costs in COSTS if grid is GRID else COSTS[1:3]:
                formula = family.bubble.value(Setting(p, m, v, *map(Fraction, costs)))
                if formula is not None:
                    # A chunk takes 1/v of a rank's time.
                    assert timed(schedule, *costs)[2] / v == formula, (p, m, v, costs)
                    bubbles += 1
    assert grid is not GRID or bubbles > 10
    assert grid is not GRID or peaks > 10 or name == "v-min"


# Where each formula begins to hold, one short of it, and costs that it takes or does not take.
EDGES = [
    # family, ranks, microbatches, stages a rank, costs of F, I and W; bubble and peaks, None where no formula holds
    ("gpipe", (3, 4, 1), (3, 4, 2), 18, [4, 4, 4]),
    ("1f1b", (3, 2, 1), (3, 4, 2), 18, [2, 2, 1]),
    ("1f1b", (3, 4, 1), (1, 1, 2), 8, [3, 2, 1]),
    ("eager-1f1b", (3, 4, 1), (3, 3, 2), 16, [4, 3, 1]),
    ("interleaved-1f1b", (3, 3, 2), (3, 4, 2), 9, [6, 6, 4]),
    ("interleaved-1f1b", (3, 2, 2), (3, 3, 2), None, [4, 4, 3]),
    ("interleaved-1f1b", (3, 6, 3), (3, 3, 2), Fraction(16, 3), [11, 9, 7]),
    ("interleaved-1f1b", (2, 1, 1), (3, 3, 2), 8, [1, 1]),
    ("breadth-first", (3, 3, 2), (3, 4, 2), 9, [6, 6, 6]),
    ("zb-h1", (3, 2, 1), (3, 4, 2), 12, [2, 2, 2]),
    ("zb-h1", (3, 4, 1), (3, 4, 2), 10, [3, 3, 3]),
    ("zb-h1", (3, 4, 1), (1, 1, 2), 2, [3, 3, 3]),
    ("zb-h2", (3, 5, 1), (2, 2, 2), 4, [5, 5, 5]),
    ("zb-h2", (3, 6, 1), (1, 1, 1), 2, [5, 5, 5]),
    ("zb-h2", (3, 4, 1), (1, 1, 1), None, [4, 4, 4]),
    ("zb-h2", (3, 5, 1), (3, 3, 2), None, [5, 5, 5]),
    ("interleaved-zb", (3, 3, 2), (3, 4, 2), 5, [6, 6, 6]),
    ("interleaved-zb", (3, 2, 2), (3, 3, 2), None, [4, 4, 4]),
    ("interleaved-zb", (3, 6, 2), (1, 1, 2), 1, [6, 6, 6]),
    ("interleaved-zb", (2, 4, 3), (3, 3, 2), Fraction(4, 3), [6, 6]),
    ("zb-v", (3, 5, 2), (2, 2, 2), 2, [6, 6, 6]),
    ("zb-v", (3, 4, 2), (1, 1, 1), None, None),
    ("v-half", (3, 6, 2), (2, 2, 2), 5, [4, 4, 4]),
    ("v-half", (3, 5, 2), (1, 1, 1), None, None),
    ("v-half", (4, 8, 2), (1, 1, 1), Fraction(5, 2), [6, 6, 6, 6]),
    ("v-half", (3, 6, 2), (3, 3, 2), None, [4, 4, 4]),
    ("v-min", (3, 6, 2), (2, 2, 2), 5, None),
    ("v-min", (3, 5, 2), (1, 1, 1), None, None),
    ("v-min", (2, 4, 2), (1, 1, 1), Fraction(3, 2), None),
    ("v-min", (5, 10, 2), (1, 1, 1), Fraction(15, 2), None),
    ("v-min", (1, 2, 2), (1, 1, 1), 0, None),
    ("v-half", (1, 2, 2), (1, 1, 1), 0, [2]),
    ("dualpipe", (4, 8, 1), (3, 3, 2), 7, [5, 5, 5, 5]),
    ("dualpipe", (4, 7, 1), (3, 3, 2), None, None),
    ("dualpipe", (4, 9, 1), (3, 3, 2), None, None),
    ("dualpipe", (4, 8, 1), (1, 1, 2), None, [5, 5, 5, 5]),
    ("dualpipe", (4, 8, 1), (3, 4, 2), None, [5, 5, 5, 5]),
    ("dualpipe", (6, 12, 1), (1, 1, 1), 4, [7, 7, 7, 7, 7, 7]),
    ("dualpipe-v", (3, 6, 2), (3, 3, 2), 7, [7, 7, 7]),
    ("dualpipe-v", (3, 5, 2), (3, 3, 2), None, None),
    ("dualpipe-v", (3, 6, 2), (1, 1, 1), 2, [7, 7, 7]),
    ("chimera", (4, 4, 1), (3, 4, 2), 12, [3, 4, 4, 3]),
    ("chimera", (4, 8, 1), (2, 1, 1), 4, [3, 4, 4, 3]),
    ("chimera", (4, 8, 1), (1, 1, 1), None, [3, 4, 4, 3]),
    ("chimera", (4, 6, 1), (2, 1, 1), None, None),
    ("hanayo", (3, 3, 2), (3, 4, 2), 12, [4, 5, 6]),
    ("hanayo", (3, 6, 2), (2, 1, 1), 4, [4, 5, 6]),
    ("hanayo", (3, 6, 2), (1, 1, 1), None, [4, 5, 6]),
    ("hanayo", (3, 4, 4), (2, 1, 1), None, [10, 11, 12]),
    ("hanayo", (3, 2, 2), (2, 1, 1), None, None),
    ("hanayo", (3, 3, 4), (1, 1, 1), 2, [10, 11, 12]),
    ("round-trip", (4, 16, 2), (3, 4, 2), Fraction(15, 2), [16, 16, 16, 16]),
    ("round-trip", (4, 8, 2), (3, 4, 2), Fraction(9, 2), [16, 13, 16, 13]),
    ("round-trip", (4, 4, 2), (3, 4, 2), Fraction(9, 2), [8, 7, 8, 7]),
    ("round-trip", (4, 3, 2), (3, 4, 2), None, None),
    ("round-trip", (4, 2, 2), (3, 4, 2), None, [4, 4, 4, 4]),
    ("round-trip", (6, 24, 1), (3, 4, 2), 30, [12] * 6),
    ("round-trip", (6, 24, 1), (1, 2, 2), 18, [12] * 6),
    ("round-trip", (3, 6, 1), (3, 4, 2), 0, [5, 5, 5]),
    ("round-trip", (2, 8, 2), (3, 4, 2), 0, [7, 7]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "size", "costs", "bubble", "peaks"), EDGES)
def test_formulas_hold_from_their_first_microbatch_on(name, size, costs, bubble, peaks):
    family, (p, _, v) = FAMILIES[name], size
    assert family.bubble.value(Setting(*size, *map(Fraction, costs))) == bubble
    found = [family.peak.value(Setting(*size), r) for r in range(p)]
    assert found == (peaks or [None] * p)
    schedule = family.build(*size)
    assert bubble in (None, timed(schedule, *costs)[2] / v)
    assert peaks in (None, peak(schedule).tolist())


@pytest.mark.parametrize(("p", "half", "third"), [
    (2, (4, 1), (4, 3)), (3, (4, 5), (4, 5)), (4, (6, 5), (4, 11)), (5, (6, 11), (6, 15)), (6, (8, 11), (6, 17)),
    (7, (8, 17), (6, 23)),
    *slow((8, (10, 17), (8, 27)), (9, (10, 23), (8, 29)), (12, (14, 29), (10, 41)), (16, (18, 41), (12, 59))),
])  # fmt: skip
def test_v_half_and_v_min_have_the_published_peaks_and_bubbles(p: int, half: tuple, third: tuple):
    for name, limit, wanted in (("v-half", half_limit, half), ("v-min", third_limit, third)):
        schedule = build_schedule(name, p, 2 * p + 1)
        assert (peak(schedule).max(), timed(schedule, 1, 1, 1)[2]) == wanted
        assert limit(p) == wanted[0]


@pytest.mark.parametrize("name", ["zb-h2", "zb-v"])
def test_zero_bubble_schedules_do_not_idle_between_their_first_and_last_op(name: str):
    v = FAMILIES[name].virtual_stages
    for p in (1, 2, 4, 5):
        for m in (2 * p - 1, 3 * p):
            assert timed(build_schedule(name, p, m), 1, 1, 1)[1] == 3 * m * v


def test_zb_h2_idles_by_what_b_exceeds_w_on_the_longest_rank():
    for p, m in ((2, 6), (4, 9), (6, 14)):
        for f, b, w in ((3, 3, 2), (4, 4, 3), (2, 2, 1)):
            longest = timed(build_schedule("zb-h2", p, m), f, b, w)[1]
            assert longest == m * (f + b + w) + (p - 1) * (f + b - 2 * w)


@pytest.mark.parametrize(("d", "n", "slots", "makespan"), [
    (4, 4, 10, 16), (4, 8, 18, 30), (6, 6, 16, 26), (6, 12, 28, 48), (8, 8, 22, 36), (8, 16, 38, 66),
])  # fmt: skip
def test_chimera_takes_two_slots_a_microbatch_and_d_minus_two(d: int, n: int, slots: int, makespan: int):
    """And with backwards of two forwards, the makespan."""
    assert timed(build_schedule("chimera", d, n), 2, 1, 1)[0] == 2 * slots
    assert timed(build_schedule("chimera", d, n), 1, 1, 1)[0] == makespan


def test_dualpipe_and_dualpipe_v_have_the_length_of_their_official_figures():
    schedule = build_schedule("dualpipe", 8, 20)
    assert timed(schedule, 1, 1, 1) == (66, 66, 6)
    assert peak(schedule).tolist() == [9] * 8
    folded = build_schedule("dualpipe-v", 4, 10)
    assert timed(folded, 1, 1, 1)[0] == 66
    assert peak(folded).tolist() == [9] * 4


@pytest.mark.parametrize(("p", "waves", "rate"), [(4, 1, (1, 3)), (4, 2, (1, 5)), (8, 1, (7, 19))])
def test_hanayo_reaches_the_optimum_that_was_proved_for_it(p: int, waves: int, rate: tuple[int, int]):
    """A constraint solver proves 0.333, 0.200 and 0.368 of the makespan for m = p and backwards of two forwards."""
    makespan, _, bubble = timed(build_schedule("hanayo", p, p, 2 * waves), 1, 1, 1)
    assert bubble / makespan == Fraction(*rate)


def test_latency_costs_1f1b_twice_a_microbatch_and_eager_1f1b_only_at_the_ends():
    for p in (2, 3, 4):
        for m in (p, 2 * p):
            f, w = 10, 10
            for c in (1, 2):
                plain = (m + p - 1) * 3 * f
                assert timed(build_schedule("gpipe", p, m), f, f, w, c)[0] == plain + 2 * (p - 1) * c
                assert timed(build_schedule("eager-1f1b", p, m), f, f, w, c)[0] == plain + 2 * (p - 1) * c
                steady = Fraction(2 * m * (p - 1), p) + 2 * p - 4
                assert timed(build_schedule("1f1b", p, m), f, f, w, c)[0] == plain + steady * c
                for v in (2, 3):
                    found = timed(build_schedule("interleaved-1f1b", p, m, v), f, f, w, c)[0]
                    assert found == (m * v + p - 1) * 3 * f + 2 * (p * v - 1) * c


def test_megatrons_own_example():
    """The order its docstring gives for 2 ranks, groups of 3 and 5 microbatches; chunk + 1, negative for backwards."""
    schedule = build_schedule("interleaved-1f1b", 2, 5, 2, group_size=3)
    signed = [(op.stage // 2 + 1) * (1 if op.kind == Kind.F else -1) for op in schedule.ops(0)]
    assert signed == [1, 1, 1, 2, 2, 2, -2, 1, -2, 1, -2, 2, -1, 2, -1, -1, -2, -2, -1, -1]
    order = [op.microbatch for op in schedule.ops(0) if op.kind == Kind.F]
    assert order == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]


@pytest.mark.parametrize(
    ("p", "v", "family"),
    [(3, 3, "interleaved-1f1b"), (4, 2, "interleaved-zb"), *slow((4, 2, "interleaved-1f1b"))],
)
def test_every_legal_group_size_has_the_same_bubble_and_the_memory_of_the_formula(
    p: int, v: int, family: str
):
    tried = 0
    for m in range(p, 11):
        for n in range(1, m + 1):
            if not legal_group(p, m, n):
                continue
            schedule = build_schedule(family, p, m, v, group_size=n)
            check(schedule)
            zb = family == "interleaved-zb"
            assert timed(schedule, 2, 3, 2)[2] == Fraction((p - 1) * (3 if zb else 7)), (m, n)
            assert peak(schedule).tolist() == [
                min(m * v, (v - 1) * n + (p if zb else 2 * (p - 1 - r) + 1)) for r in range(p)
            ]
            tried += 1
    assert tried > 10


@pytest.mark.parametrize("family", ["interleaved-1f1b", "interleaved-zb"])
def test_an_illegal_group_size_is_refused_with_the_smallest_legal_one(family: str):
    with pytest.raises(ScheduleError, match=r"group_size must be .* 4 .* 9 .* got 4, take 5$"):
        build_schedule(family, 4, 9, 2, group_size=4)
    with pytest.raises(ScheduleError, match=r"group_size must be 3, .* got 2$"):
        build_schedule(family, 4, 3, 2, group_size=2)
    with pytest.raises(ScheduleError, match="group_size must be a whole number, got 4"):
        build_schedule(family, 4, 8, 2, group_size=4.0)
    assert build_schedule(family, 4, 3, 2, group_size=3) == build_schedule(family, 4, 3, 2)


def test_the_smallest_group_is_the_first_legal_one():
    for p in range(1, 9):
        for m in range(1, 30):
            legal = [n for n in range(1, m + 1) if legal_group(p, m, n)]
            assert smallest_group(p, m) == (legal[0] if legal else m)
            assert bool(legal) == (m >= p)


def test_with_one_virtual_stage_they_are_the_schedules_they_come_from():
    for p, m in ((1, 3), (3, 2), (4, 9)):
        assert build_schedule("interleaved-zb", p, m, 1) == build_schedule("zb-h1", p, m)
