from __future__ import annotations

import re
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base.errors import ScheduleError
from penstock.schedule.check import check
from penstock.schedule.families import FAMILIES, build_schedule
from penstock.schedule.memory import Budget
from penstock.schedule.ops import Kind, Op, Pair
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule
from tests.support.schedule_oracle import Lists, ends, is_valid, lists
from tests.support.schedules import allows, schedules, written

TWO = Placement.loop(2)


def passes(schedule: Schedule) -> bool:
    try:
        check(schedule)
    except ScheduleError:
        return False
    return True


def changed(schedule: Schedule, ops: Lists) -> Schedule:
    return Schedule.from_ops("changed", schedule.placement, schedule.microbatches, ops)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if not family.searches])
def test_every_family_is_valid_for_all_small_counts(name: str):
    family = FAMILIES[name]
    for v in range(1, 5) if family.chooses_virtual_stages else [family.virtual_stages]:
        for p in range(1, 9):
            if allows(family, p, v):
                for m in range(1, 17):
                    assert check(family.build(p, m, v)).ops >= 2 * p * m * v


def test_a_proof_prints_as_a_summary():
    proof = check(build_schedule("dualpipe", 4, 8))
    assert str(proof) == (
        "dualpipe: 4 ranks, 4 stages, 8 microbatches: valid\n"
        "74 ops (32 F, 22 B, 10 I, 10 W, 12 pairs), each once and after its inputs; the longest chain of waits has 16 ops\n"
        "48 messages between ranks; no deadlock, even if every send blocks; at most 3 receives posted ahead on an edge\n"
        "peak activations on every rank: 5\n"
        "every copied stage is reduced once on each of its ranks\n"
        "gradients are not summed in the order of the microbatches, so a run equals plain PyTorch to rounding only"
    )
    assert str(check(build_schedule("1f1b", 3, 4))).splitlines()[3:] == ["peak activations by rank: 3 2 1"]
    assert str(check(build_schedule("1f1b", 20, 40))).endswith("by rank: 20 19 18 17 ... 3 2 1")
    assert repr(proof).startswith("Proof(Schedule('dualpipe', 4 ranks")


@given(schedules())
@settings(deadline=None, derandomize=True, max_examples=40)
def test_check_agrees_with_brute_force_on_every_family(schedule: Schedule):
    proof = check(schedule)
    assert is_valid(schedule.placement, schedule.microbatches, lists(schedule))
    assert proof.ops == len(schedule)
    unit = ends(schedule, {kind.name: 1 for kind in Kind})
    steps = [0] * schedule.ranks
    for rank in range(schedule.ranks):
        steps[rank] = max(proof.program.level[schedule.rows(rank)])
    assert proof.critical_path == max(steps)
    if not schedule.paired.any():
        assert proof.critical_path == max(rank[-1][2] for rank in unit)


@given(schedules(ranks=5, microbatches=7, virtual_stages=3), st.data())
@settings(deadline=None, derandomize=True, max_examples=150)
def test_any_change_is_judged_as_by_brute_force(schedule: Schedule, data: st.DataObject):
    ops = lists(schedule)
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    place = st.integers(0, len(ops[rank]) - 1)
    match data.draw(
        st.sampled_from(["delete", "duplicate", "swap", "swap near", "move away", "rename", "part"])
    ):
        case "delete":
            del ops[rank][data.draw(place)]
        case "duplicate":
            ops[rank].insert(data.draw(place), ops[rank][data.draw(place)])
        case "swap":
            a, b = data.draw(place), data.draw(place)
            ops[rank][a], ops[rank][b] = ops[rank][b], ops[rank][a]
        case "swap near":
            a = data.draw(place)
            b = min(a + data.draw(st.integers(1, 3)), len(ops[rank]) - 1)
            ops[rank][a], ops[rank][b] = ops[rank][b], ops[rank][a]
        case "move away":
            other = data.draw(st.integers(0, schedule.ranks - 1))
            op = ops[rank].pop(data.draw(place))
            ops[other].insert(data.draw(st.integers(0, len(ops[other]))), op)
        case "part":  # a pair's halves on their own, in either order
            for n, op in enumerate(ops[rank]):
                if isinstance(op, Pair):
                    ops[rank][n : n + 1] = data.draw(st.permutations([op.forward, op.backward]))
        case "rename":
            ops[rank][data.draw(place)] = Op(
                data.draw(st.integers(0, schedule.stages)),
                data.draw(st.sampled_from([Kind.F, Kind.B, Kind.I, Kind.W])),
                data.draw(st.integers(0, schedule.microbatches)),
            )
    verdict = is_valid(schedule.placement, schedule.microbatches, ops)
    assert passes(changed(schedule, ops)) == verdict


REFUSED = {
    "2F0 is on rank 0, but its stage is on rank(s) [2]": (
        Placement.loop(3), ["0F0 2F0 0B0", "1F0 1B0", "2B0"],
    ),
    "row 1 (stage 2, kind 0, microbatch 0) is outside stages 0..1": (TWO, ["0F0 2F0", "1F0"]),
    "0F0 appears twice": (TWO, ["0F0 0F0 0B0", "1F0 1B0"]),
    "1F0 is missing": (TWO, ["0F0 0B0", "1B0"]),
    "0B0 is missing (or 0I0 and 0W0)": (TWO, ["0F0", "1F0 1B0"]),
    "0W0 is missing (0I0 is there)": (TWO, ["0F0 0I0", "1F0 1B0"]),
    "0I0 is missing (0W0 is there)": (TWO, ["0F0 0W0", "1F0 1B0"]),
    "0B0 and 0W0 both appear: one backward too many": (TWO, ["0F0 0B0 0W0", "1F0 1B0"]),
    "0B0 on rank 0 does not come after 0F0": (TWO, ["0B0 0F0", "1F0 1B0"]),
    "0W0 on rank 0 does not come after 0I0": (TWO, ["0F0 0W0 0I0", "1F0 1B0"]),
    "0B0 on rank 0 does not come after 0R0": (TWO, ["0F0 0B0 0R0", "1F0 1B0"]),
    "1B0 on rank 1 does not come after 1F0": (TWO, ["0F0 0B0", "(1F0;1B0)OVERLAP_F_B"]),
    "but 0B0 on rank 1; the saved activations are where the forward ran": (
        Placement(2, ((0, 1), (1, 0))), ["0F0", "1F0 1B0 0B0"],
    ),
    "rank 1 holds stage(s) [0, 1] but has no op": (
        Placement(2, ((0, 1), (0, 1))), ["0F0 1F0 1B0 0B0", ""],
    ),
}  # fmt: skip


@pytest.mark.parametrize("says", REFUSED)
def test_what_is_wrong_is_named(says: str):
    placement, ranks = REFUSED[says]
    with pytest.raises(ScheduleError, match=re.escape(says)):
        check(written(placement, 1, *ranks))


def test_a_pair_is_a_forward_and_then_a_backward():
    schedule = written(TWO, 2, "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    for row, says in ((0, "0F0 and 0F1 are marked as a pair"), (3, "no op follows it on its rank")):
        paired = schedule.paired.copy()
        paired[row] = True
        columns = [schedule.columns(0)._replace(paired=paired[:4]), schedule.columns(1)]
        with pytest.raises(ScheduleError, match=says):
            check(Schedule.from_columns("paired", TWO, 2, columns))


def test_many_mistakes_are_not_all_listed():
    with pytest.raises(ScheduleError) as caught:
        check(written(TWO, 20, "0F0 0B0", "1F0 1B0"))
    assert str(caught.value).endswith("; and more")
    assert str(caught.value).count("is missing") == 8


def test_an_op_that_nothing_follows_is_named_and_not_all_that_its_microbatch_lacks():
    with pytest.raises(ScheduleError) as caught:
        check(written(TWO, 3, "0F0 0F1 0B0 0B1", "1F1 1B0 1F2 1B1"))
    assert str(caught.value).endswith(
        "schedule: microbatch 2 has only 1F2, but needs a forward and a backward on 2 stages; 1F0 is missing"
    )
    with pytest.raises(ScheduleError, match=r"microbatch 1 has only 1F1, but needs a forward on 3 stages$"):
        check(written(Placement.loop(3), 2, "0F0", "1F0 1F1", "2F0"), forward_only=True)
    many = written(
        Placement.loop(1, 20), 2, " ".join(f"{s}F0 {s}F1" if s < 9 else f"{s}F0" for s in range(20))
    )
    with pytest.raises(ScheduleError, match=r"microbatch 1 has only 0F1, .*, 7F1, \.\.\., but needs"):
        check(many)


def test_a_deadlock_is_told_as_its_cycle():
    schedule = written(TWO, 2, "0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0")
    with pytest.raises(ScheduleError) as caught:
        check(schedule)
    assert str(caught.value) == (
        "written deadlocks: rank 0 is blocked at 0B0, which needs 1B0 of rank 1 <- "
        "rank 1 is blocked at 1F1, which needs 0F1 of rank 0"
    )


def test_of_several_cycles_the_shortest_is_told():
    placement = Placement(5, ((0,), (1,), (2,), (0,), (3,), (4,)))
    # Ranks 0, 2 and 1 wait for each other in a circle over microbatch 1, and ranks 3 and 4 for each other.
    schedule = written(
        placement, 2, "0F0 3F0 3F1 0F1 3B0 3B1 0B0 0B1", "1F0 1F1 1B0 1B1", "2F0 2F1 2B0 2B1", "4F0 4B0 4F1 4B1",
        "5F1 5B1 5F0 5B0",
    )  # fmt: skip
    with pytest.raises(ScheduleError, match="at 4B0, which needs 5B0 of rank 4 <- rank 4 is blocked at 5F1"):
        check(schedule)


def test_an_evaluation_has_forwards_only():
    schedule = written(TWO, 2, "0F0 0F1", "1F0 1F1")
    proof = check(schedule, forward_only=True)
    assert proof.critical_path == 3
    assert proof.program.reductions == {}
    with pytest.raises(ScheduleError, match="0B0 is missing"):
        check(schedule)
    with pytest.raises(ScheduleError, match="0B0 appears in a schedule of forwards only"):
        check(written(TWO, 1, "0F0 0B0", "1F0 1B0"), forward_only=True)


def test_what_a_check_takes_does_not_grow_with_ranks_times_stages():
    schedule = build_schedule("gpipe", 1000, 1)
    tracemalloc.start()
    try:
        check(schedule)
        assert tracemalloc.get_traced_memory()[1] < 1000 * 2000
    finally:
        tracemalloc.stop()


def test_a_schedule_over_its_budget_is_refused_at_the_first_op_over_it():
    schedule = build_schedule("1f1b", 4, 8)
    assert check(schedule, budget=Budget(4)).ops == 64
    assert check(schedule, budget=Budget([4, 3, 2, 1])).ops == 64
    with pytest.raises(ScheduleError) as caught:
        check(schedule, budget=Budget(3))
    assert str(caught.value) == (
        "1f1b does not fit in memory: rank 0 holds 4 after 0F3, op 4 of its list, and may hold 3; "
        "running one microbatch after the other would take 1"
    )


def test_a_budget_that_no_order_meets_says_the_least_that_can():
    schedule = build_schedule("interleaved-1f1b", 2, 4)
    sizes = [10, 20, 30, 45]
    with pytest.raises(
        ScheduleError, match=re.escape("one microbatch alone takes 65 on rank 1, so 65 is the least")
    ):
        check(schedule, budget=Budget(64, sizes))
    alone = written(
        schedule.placement, 2, "0F0 2F0 2B0 0B0 0F1 2F1 2B1 0B1", "1F0 3F0 3B0 1B0 1F1 3F1 3B1 1B1"
    )  # fmt: skip
    assert check(alone, budget=Budget(65, sizes)).ops == 16


def test_the_first_op_over_the_budget_is_the_first_in_time_not_in_the_list():
    schedule = build_schedule("chimera", 4, 8)
    # Rank 0 is over its limit in its second op, rank 3 in its first, which comes at the same time as rank 0's first.
    with pytest.raises(ScheduleError, match="rank 3 holds 1 after 0F2, op 1 of its list, and may hold 0"):
        check(schedule, budget=Budget([1, 9, 9, 0]))
