from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import pytest

from penstock.base.errors import ScheduleError
from penstock.schedule.check import check
from penstock.schedule.families import build_schedule
from penstock.schedule.memory import peak
from penstock.schedule.ops import Kind, Op
from penstock.schedule.schedule import Schedule
from tests.support.lanes import exhaustive
from tests.support.schedule_oracle import ends

# equal ops, a long input half with a latency, a long weight half, a long forward
MIXES = ((10, 10, 10, 0), (7, 13, 11, 1), (10, 10, 20, 0), (20, 10, 10, 1))
OTHERS = exhaustive(
    ((10, 10, 8, 1),), ((10, 12, 6, 2),), ((20, 20, 13, 3),), ((8, 14, 10, 2),), ((10, 20, 10, 0),), ((12, 12, 4, 5),)
)  # fmt: skip
Costs = Sequence[object]


def makespan(schedule: Schedule, costs: Costs, latency: float) -> float:
    """The makespan, each stage with its own costs."""
    return max(rank[-1][2] for rank in ends(schedule, dict(zip("FIW", costs, strict=True)), latency))


# Table 9 and table 5 of 2401.10241: p, m, (F, B, W), latency, rate of ZB-1p.
PUBLISHED = (
    (8, 24, (29.718, 29.444, 19.927), 0.527, 0.1323),
    (8, 32, (29.802, 29.428, 19.530), 0.577, 0.1045),
    (8, 64, (29.935, 29.621, 19.388), 0.535, 0.0554),
    (32, 96, (10.419, 10.207, 7.715), 0.408, 0.1421),
)


@pytest.mark.slow
@pytest.mark.parametrize(("p", "m", "costs", "latency", "one"), [PUBLISHED[0], *exhaustive(*PUBLISHED[1:])])
def test_the_papers_rate_in_p_activations_or_better_and_the_optimum_in_2p(
    p: int, m: int, costs: tuple[float, float, float], latency: float, one: float
):
    tight = build_schedule("zb-auto", p, m, costs=costs, latency=latency, memory_limit=p)
    assert peak(tight).max() <= p
    span = makespan(tight, costs, latency)
    assert round((span - m * sum(costs)) / span, 4) <= one
    loose = build_schedule("zb-auto", p, m, costs=costs, latency=latency)
    assert peak(loose).max() <= 2 * p
    # No schedule with a stage per rank is shorter: the last rank waits for its first forward.
    assert makespan(loose, costs, latency) == pytest.approx((p - 1) * (costs[0] + latency) + m * sum(costs))


@pytest.mark.slow
@pytest.mark.parametrize("mix", [*MIXES[:2], *OTHERS])
def test_never_worse_than_the_handcrafted_schedules_in_their_memory(mix: tuple[int, int, int, int]):
    *costs, latency = mix
    for p, m in ((1, 4), (2, 5), (3, 2), (5, 12), (8, 20), (16, 24)):
        for handcrafted, limit in (("zb-h1", p), ("zb-h2", 2 * p - 1)):
            theirs = makespan(build_schedule(handcrafted, p, m), costs, latency)
            schedule = build_schedule(
                "zb-auto", p, m, costs=tuple(costs), latency=latency, memory_limit=limit, rounds=1
            )
            check(schedule)
            assert peak(schedule).max() <= limit
            assert makespan(schedule, costs, latency) <= theirs * (1 + 1e-9), (p, m, handcrafted)


def lists_of(m: int, limit: int) -> list[str]:
    """Every order of m forwards, input halves and weight halves of one stage that holds at most `limit`."""
    found = [""]
    for _ in range(3 * m):
        found = [
            order + kind
            for order in found
            for kind in "FIW"
            if order.count(kind) < m
            and (kind != "I" or order.count("I") < order.count("F"))
            and (kind != "W" or order.count("W") < order.count("I"))
            and (kind != "F" or order.count("F") - order.count("W") < limit)
        ]
    return found


def best(p: int, m: int, limit: int, mix: tuple[int, int, int, int]) -> float:
    """The least makespan of all orders, found one by one."""
    f, b, w, latency = mix
    cost = {"F": f, "I": b, "W": w}
    least = math.inf
    for orders in product(lists_of(m, limit), repeat=p):
        clock, at = [0] * p, [0] * p
        done: list[dict[str, list[int]]] = [{"F": [], "I": [], "W": []} for _ in range(p)]
        moved = True
        while moved:
            moved = False
            for r in range(p):
                while at[r] < 3 * m:
                    kind = orders[r][at[r]]
                    n, start = len(done[r][kind]), clock[r]
                    giver = (r - 1, "F") if kind == "F" else (r + 1, "I")
                    if kind != "W" and 0 <= giver[0] < p:
                        given = done[giver[0]][giver[1]]
                        if len(given) <= n:
                            break
                        start = max(start, given[n] + latency)
                    clock[r] = start + cost[kind]
                    done[r][kind].append(clock[r])
                    at[r] += 1
                    moved = True
        if min(at) == 3 * m:
            least = min(least, max(clock))
    return least


@pytest.mark.parametrize("mix", [*MIXES[:4], *OTHERS])
def test_the_optimum_is_reached_where_every_order_can_be_tried(mix: tuple[int, int, int, int]):
    *costs, latency = mix
    for limit in (1, 2, 3):
        schedule = build_schedule("zb-auto", 2, 3, costs=tuple(costs), latency=latency, memory_limit=limit)
        assert makespan(schedule, costs, latency) == best(2, 3, limit, mix), limit


def test_more_memory_never_makes_it_longer():
    costs = (10, 12, 6)
    found = []
    for limit in (1, 2, 3, 4, 6, 8):
        schedule = build_schedule("zb-auto", 4, 8, costs=costs, latency=1, memory_limit=limit, rounds=1)
        assert peak(schedule).max() <= limit
        found.append(makespan(schedule, costs, 1))
    assert found == sorted(found, reverse=True)


def test_stages_may_cost_differently():
    costs = ([7, 15, 9, 6], [9, 12, 10, 8], [12, 8, 7, 8])
    schedule = build_schedule("zb-auto", 4, 8, costs=costs, memory_limit=4, rounds=4)
    check(schedule)
    # The slowest stage works all the time but for what comes before it and after.
    assert makespan(schedule, costs, 0) <= 1.05 * (7 + 8 * (15 + 12 + 8) + 9)
    assert schedule.options["costs"] == ((7.0, 15.0, 9.0, 6.0), (9.0, 12.0, 10.0, 8.0), (12.0, 8.0, 7.0, 8.0))


def test_the_same_call_gives_the_same_schedule():
    one, two = (build_schedule("zb-auto", 5, 9, costs=(1.1, 1.7, 0.9), latency=0.3) for _ in range(2))
    assert one == two
    assert one.options["memory_limit"] == 10


def test_ops_that_cost_nothing_are_scheduled_too():
    for costs in ((0, 1, 1), (1, 0, 0), (0, 0, 0)):
        check(build_schedule("zb-auto", 3, 4, costs=costs))


def test_one_activation_is_enough_to_run_one_microbatch_after_the_other():
    schedule = build_schedule("zb-auto", 3, 2, memory_limit=1)
    assert list(schedule.ops(2)) == [Op(2, kind, j) for j in range(2) for kind in (Kind.F, Kind.I, Kind.W)]
    assert ends(schedule, {"F": 1, "I": 1, "W": 1})[0][-1][2] == 14


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"memory_limit": 0}, "no order can meet a memory limit of 0: .* 1 is the least"),
        ({"memory_limit": math.nan}, "memory_limit must be a whole number of at least 1, got nan"),
        ({"memory_limit": "2p"}, "memory_limit must be a whole number of at least 1, got '2p'"),
        ({"costs": (1, -1, 1)}, "the cost of I must be a number of seconds of at least 0, got -1"),
        ({"costs": (1, math.nan, 1)}, "the cost of I must be"),
        ({"costs": (1, 1, [1, 1, math.inf])}, "the cost of W must be"),
        ({"costs": (1, [1, 2], 1)}, r"the cost of I is one number or one per stage \(3\), got 2"),
        ({"costs": (1, 1)}, "costs are three, of F, I and W, got"),
        ({"costs": 3}, "costs are three, of F, I and W, got 3"),
        ({"latency": -1}, "latency must be a number of seconds of at least 0, got -1"),
        ({"objective": "longest"}, "zb-auto has no option 'objective'"),
    ],
)
def test_costs_and_limits_that_make_no_sense_are_refused(options: dict[str, object], says: str):
    with pytest.raises(ScheduleError, match=says):
        build_schedule("zb-auto", 3, 4, **options)
