from __future__ import annotations

import math

import numpy as np
import pytest

from penstock.base.errors import ConfigError, ScheduleError
from penstock.schedule import jit
from penstock.schedule.families import FAMILIES
from penstock.schedule.ops import Kind, parse_op
from penstock.schedule.placement import Placement
from penstock.schedule.program import lower
from penstock.schedule.schedule import Schedule
from penstock.simulate.costs import Communication, Costs, Link
from penstock.simulate.simulator import _Rows, _Rules, _run, _Seconds, _Times, simulate
from penstock.trace.bubbles import makespan
from tests.support.lanes import exhaustive, slow
from tests.support.simulated import built, priced, timed, timeline, written

TWO = Placement.loop(2)
FIRST = ("1f1b", "interleaved-1f1b", "zb-v", "dualpipe", "hanayo")


ONE, THREE = Placement.loop(1), Placement.loop(3)
F1B3 = ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]
F1B2 = ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]
PAIRS = ["0F0 0F1 (0F2;0B0)OVERLAP_F_B 0B1 0B2", F1B3[1]]
EARLY = ["0F0 (0F1;0B0)OVERLAP_F_B 0F2 0B1 0B2", F1B3[1]]
SLOW = {"f": 2, "b": 2, "w": 2, "latency": 3}
TIMELINES: dict[str, tuple[Placement, int, list[str], dict[str, object], list[str]]] = {
    "1F1B as in the drawing": (TWO, 3, F1B3, {}, [
        "0F0@0-1 0F1@1-2 0B0@4-6 0F2@6-7 0B1@7-9 0B2@10-12", "1F0@1-2 1B0@2-4 1F1@4-5 1B1@5-7 1F2@7-8 1B2@8-10",
    ]),
    "split backwards hand the gradient over before the weights": (
        TWO, 2, ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1"], {"f": 2, "b": 3, "w": 4}, [
            "0F0@0-2 0F1@2-4 0I0@7-10 0W0@10-14 0I1@14-17 0W1@17-21", "1F0@2-4 1I0@4-7 1F1@7-9 1I1@9-12 1W0@12-16 1W1@16-20",
        ],
    ),
    "latency delays messages between ranks and nothing else": (
        Placement.waves(2), 1, ["0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"], {"f": 2, "b": 2, "w": 2, "latency": 5}, [
            "0F0@0-1 3F0@13-14 3B0@14-16 0B0@30-32", "1F0@6-7 2F0@7-8 2B0@21-23 1B0@23-25",
        ],
    ),
    "a recompute takes as long as a forward": (
        ONE, 1, ["0F0 0R0 0B0"], {"f": 2, "b": 3, "w": 4}, ["0F0@0-2 0R0@2-4 0B0@4-11"],
    ),
    "a recompute takes its own time": (
        ONE, 1, ["0F0 0R0 0B0"], {"f": 2, "b": 3, "w": 4, "recompute": 1, "full": 5}, ["0F0@0-2 0R0@2-3 0B0@3-8"],
    ),
    "a message blocks no rank": (TWO, 2, F1B2, {**SLOW, "blocks": "none"}, [
        "0F0@0-2 0F1@2-4 0B0@14-18 0B1@20-24", "1F0@5-7 1B0@7-11 1F1@11-13 1B1@13-17",
    ]),
    "a message blocks its sender": (TWO, 2, F1B2, {**SLOW, "blocks": "sender"}, [
        "0F0@0-2 0F1@5-7 0B0@14-18 0B1@23-27", "1F0@5-7 1B0@7-11 1F1@14-16 1B1@16-20",
    ]),
    "a message blocks its receiver": (TWO, 2, F1B2, {**SLOW, "blocks": "receiver"}, [
        "0F0@0-2 0F1@2-4 0B0@14-18 0B1@23-27", "1F0@5-7 1B0@7-11 1F1@14-16 1B1@16-20",
    ]),
    "a message blocks both": (TWO, 2, F1B2, {**SLOW, "blocks": "both"}, [
        "0F0@0-2 0F1@5-7 0B0@14-18 0B1@26-30", "1F0@5-7 1B0@7-11 1F1@17-19 1B1@19-23",
    ]),
    "both outputs of a pair leave at its end": (TWO, 3, PAIRS, {}, [
        "0F0@0-1 0F1@1-2 0F2@4-7 0B0@4-7 0B1@7-9 0B2@10-12", "1F0@1-2 1B0@2-4 1F1@4-5 1B1@5-7 1F2@7-8 1B2@8-10",
    ]),
    "a pair may take less than its halves": (TWO, 3, PAIRS, {"pair": 2}, [
        "0F0@0-1 0F1@1-2 0F2@4-6 0B0@4-6 0B1@7-9 0B2@10-12",
    ]),
    "the halves of a pair run and hand over together": (TWO, 3, EARLY, {"pair_output": "end"}, [
        "0F0@0-1 0F1@4-7 0B0@4-7 0F2@7-8 0B1@10-12 0B2@13-15", "1F0@1-2 1B0@2-4 1F1@7-8 1B1@8-10 1F2@10-11 1B2@11-13",
    ]),
    "the halves of a pair run and hand over on their own": (TWO, 3, EARLY, {"pair_output": "early"}, [
        "0F0@0-1 0F1@1-2 0B0@4-6 0F2@6-7 0B1@7-9 0B2@10-12", "1F0@1-2 1B0@2-4 1F1@4-5 1B1@5-7 1F2@7-8 1B2@8-10",
    ]),
    "every pair's message follows the other when the sender is blocked": (
        THREE, 2, ["0F0 0F1 0B0 0B1", "1F0 (1F1;1B0)OVERLAP_F_B 1B1", "2F0 2B0 2F1 2B1"],
        {"latency": 1, "blocks": "sender"}, [
            "0F0@0-1 0F1@2-3 0B0@13-15 0B1@19-21", "1F0@2-3 1F1@8-11 1B0@8-11 1B1@16-18",
            "2F0@4-5 2B0@5-7 2F1@12-13 2B1@13-15",
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", TIMELINES)
def test_ops_run_at_these_times(what: str):
    placement, microbatches, ranks, costs, expected = TIMELINES[what]
    trace = timed(written(placement, microbatches, *ranks), **{"f": 1, "b": 1, "w": 1, **costs})
    assert [timeline(trace, rank) for rank in range(len(expected))] == expected
    assert trace.paired.sum() == (0 if costs.get("pair_output") == "early" else str(ranks).count(";"))


def test_halves_on_their_own_take_the_pairs_time_when_both_can_start_at_once():
    program = written(TWO, 3, "0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 (1F2;1B0)OVERLAP_F_B 1B1 1B2")
    costs = {"pair": 4, "pair_output": "early"}
    assert (
        timeline(timed(program, 2, 1, 2, **costs), 1)
        == "1F0@2-4 1F1@4-6 1F2@6-8 1B0@7-10 1B1@10-13 1B2@13-16"
    )
    late = timed(program, 2, 1, 2, latency=9, **costs)
    assert timeline(late, 1) == "1F0@11-13 1F1@13-15 1F2@15-17 1B0@16-19 1B1@19-22 1B2@22-25"


def test_handing_over_early_halves_dualpipes_bubble():
    program = built("dualpipe", 8, 20)
    assert makespan(timed(program, 1, 1, 1)) == 66
    assert makespan(timed(program, 1, 1, 1, pair_output="early")) == 63


def test_a_pair_shorter_than_a_half_is_refused():
    with pytest.raises(ConfigError, match=r"at least as long .* \(0F2;0B0\) has 1, its halves 1 and 2"):
        timed(written(TWO, 3, *PAIRS), 1, 1, 1, pair=1)


def test_links_within_a_node_and_between_nodes_differ():
    talk = Communication(100, Link(1, 100), Link(10, 10), ranks_per_node=2)
    program = built("1f1b", 4, 1)
    trace = simulate(program, Costs.of(program.schedule.placement, 1, 1, 1, communication=talk))
    assert [trace.start[rows.start] for rows in trace.rank_slices()] == [0, 3, 24, 27]


def test_whole_costs_give_whole_times_and_other_costs_floats():
    program = built("1f1b", 2, 3)
    assert timed(program, 1, 1, 1).start.dtype == np.int64
    assert timed(program, 1, 1, 0.5).start.dtype == np.float64
    assert timed(program, 1, 1, 1, latency=0.5).start.dtype == np.float64
    big = 2**60
    assert makespan(timed(built("1f1b", 1, 1), big + 1, big, 0)) == 2 * big + 1


def test_the_trace_says_where_it_is_from_and_what_is_held():
    trace = timed(built("1f1b", 2, 3), 1, 1, 1)
    about = {"source": "simulated", "schedule": "1f1b", "stages": 2, "microbatches": 3, "held": "chunks"}
    assert dict(trace.info) == about
    assert trace.held.tolist() == [1, 2, 1, 2, 1, 0] + [1, 0] * 3


def test_a_deadlock_is_named():
    ops = [[parse_op(op) for op in line.split()] for line in ("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0")]
    program = lower(Schedule.from_ops("crossed", TWO, 2, ops))
    with pytest.raises(ScheduleError, match=r"crossed deadlocks: 0B0 on rank 0 never runs"):
        simulate(program, Costs.of(TWO, 1, 1, 1))


def test_costs_of_other_stages_are_refused():
    with pytest.raises(ConfigError, match=r"the costs must cover stages 0\.\.3 .*: stage 2 has no cost"):
        simulate(built("1f1b", 4, 4), Costs.of(TWO, 1, 1, 1))


@pytest.mark.parametrize(
    ("f", "b", "w", "c", "blocks"),
    [
        (3, 5, 2, 1, "both"),
        *slow((3, 5, 2, 1, "none"), (0.3, 0.5, 0.2, 0.1, "none"), (0.3, 0.5, 0.2, 0.1, "both")),
    ],
)
def test_the_compiled_kernel_gives_the_times_of_the_plain_one(
    monkeypatch: pytest.MonkeyPatch, f: float, b: float, w: float, c: float, blocks: str
):
    program = built("interleaved-1f1b", 4, 8, 2)
    plain = timed(program, f, b, w, c, blocks=blocks)
    monkeypatch.setattr(jit, "COMPILE_FROM", 0)
    compiled = timed(program, f, b, w, c, blocks=blocks)
    assert np.array_equal(plain.start, compiled.start)
    assert np.array_equal(plain.end, compiled.end)


@pytest.mark.slow
def test_the_compiled_kernel_does_pairs(monkeypatch: pytest.MonkeyPatch):
    program = written(TWO, 3, *PAIRS)
    plain = timed(program, 1, 1, 1, 1, pair=2, pair_output="early")
    monkeypatch.setattr(jit, "COMPILE_FROM", 0)
    assert np.array_equal(timed(program, 1, 1, 1, 1, pair=2, pair_output="early").end, plain.end)


# whole backwards, stages on a loop, split backwards on a V, pairs, waves
@pytest.mark.parametrize("family", [*FIRST, *exhaustive(*(name for name in FAMILIES if name not in FIRST))])
def test_every_op_starts_as_soon_as_it_can_and_no_sooner(family: str):
    """The definition of the simulation, checked op by op against its own result."""
    for ranks, microbatches in ((2, 6), (4, 8)):
        program = built(family, ranks, microbatches)
        schedule = program.schedule
        costs = priced(program, 12, 18, 6, latency=5)
        trace = simulate(program, costs)
        arrives = {}
        for row in range(len(schedule)):
            giver = program.source[row]
            if giver >= 0:
                arrives[row] = trace.end[giver] + 5 * int(program.rank[giver] != program.rank[row])
        for rank in range(schedule.ranks):
            free = 0
            rows = schedule.rows(rank)
            row = rows.start
            while row < rows.stop:
                width = 2 if schedule.paired[row] else 1
                group = range(row, row + width)
                spent = sum(costs.seconds[schedule.stage[k], schedule.kind[k]] for k in group)
                for k in group:
                    assert trace.start[k] == max([free, *(arrives[j] for j in group if j in arrives)])
                    assert trace.end[k] == trace.start[k] + spent
                free = trace.end[row]
                row += width


def test_time_grows_with_the_number_of_ops_alone():
    """Every op is touched a bounded number of times: the sweep never starts over."""
    touched = []

    class Counting(list):
        def __getitem__(self, key):
            touched.append(key)
            return super().__getitem__(key)

    per_op = []
    for microbatches in (25, 100):
        program = built("1f1b", 8, microbatches)
        schedule = program.schedule
        touched.clear()
        columns = [[-1] * len(schedule) for _ in range(3)]
        rows = _Rows(
            schedule.offsets.tolist(), Counting(program.source.tolist()), program.target.tolist(),
            program.rank.tolist(), schedule.paired.tolist(), schedule.stage.tolist(), schedule.kind.tolist(),
        )  # fmt: skip
        seconds = _Seconds([1] * 8 * len(Kind), [], [0] * 14, [0] * 8)
        _run(rows, seconds, _Rules(False, False, False), _Times(*columns), None)
        per_op.append(len(touched) / len(schedule))
    assert max(per_op) <= 2
    assert math.isclose(per_op[0], per_op[1], rel_tol=0.05)
