from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedule.families import FAMILIES
from penstock.schedule.placement import Placement
from penstock.simulate.costs import Communication, Costs, Link
from penstock.simulate.simulator import simulate
from penstock.trace.bubbles import CAUSES, bubble_fraction, bubbles, busy, idle_spans, longest, makespan
from penstock.trace.events import COLLECTIVES, Activity
from tests.support.lanes import exhaustive
from tests.support.simulated import built, timed, timeline, written
from tests.support.traces import trace_of


def idle_of(trace, rank: int) -> dict[str, float]:
    """The causes a rank has any of."""
    split = bubbles(trace)
    return {cause: split.idle[cause][rank].item() for cause in CAUSES if split.idle[cause][rank]}


def test_1f1b_idles_while_the_pipe_fills_and_drains_and_at_no_other_time():
    trace = timed(built("1f1b", 4, 8), 1, 1, 1)
    split = bubbles(trace)
    assert (split.makespan, split.busy.tolist()) == (33, [24] * 4)
    assert split.idle["warm_up"].tolist() == [6, 5, 4, 3]
    assert split.idle["cool_down"].tolist() == [3, 4, 5, 6]
    assert sum(split.idle.values()).tolist() == [9] * 4
    assert bubble_fraction(trace) == pytest.approx(9 / 33)


@pytest.mark.parametrize(
    ("lines", "causes"),
    [
        (
            [
                "0F0@0-1 0F1@1-2 0B0@5-7 0B1@9-11 0F2@11-12 0B2@16-18",
                "1F0@1-2 1B0@3-5 1F1@6-7 1B1@7-9 1F2@13-14 1B2@14-16",
            ],
            {
                0: {"warm_up": 3, "gradient": 2, "cool_down": 4},
                1: {"warm_up": 1, "overhead": 1, "communication": 2, "activation": 3, "cool_down": 2},
            },
        ),
        # Nothing to wait for is overhead; a wait for a producer that the trace lacks is a wait.
        (["0F0@0-1 0F1@3-4 0B0@4-5 0B1@5.5-7"], {0: {"overhead": 2.5}}),
        (
            ["1F0@0-1 1B0@4-6 1F1@7-8 1B1@8-9", "2F0@1-2 2B0@2-3"],
            {0: {"communication": 1, "warm_up": 2, "activation": 1}},
        ),
        # Reductions outside of computation are communication; those that overlap count once.
        (["0F0@0-1 0B0@1-3 REDUCE@2-6 OPTIMIZER@8-9"], {0: {"communication": 3, "cool_down": 2}}),
        (
            ["0F0@0-1 0B0@1-3 REDUCE@2-5 REDUCE@3-4 REDUCE@4-7 OPTIMIZER@9-10"],
            {0: {"communication": 4, "cool_down": 2}},
        ),
        # So is a gather that an op waits for, once its input is there.
        (
            ["0F0@0-4 0B0@12-13", "1GATHER@2-7 1F0@7-10 1B0@10-12"],
            {1: {"warm_up": 4, "communication": 3, "cool_down": 1}},
        ),
        (["0GATHER@0-1 0F0@1-2 1GATHER@1-5 1F0@5-7 1B0@7-9 0B0@9-11"], {0: {"communication": 4}}),
        # A reduction beside a wait for another stage is not what the rank waits for.
        (
            [
                "0F0@0-1 0F1@1-2 0F2@2-3 0B0@4-5 REDUCE@5-8 0B1@8-9 0B2@9-10",
                "1F0@1-2 1F1@2-3 1B0@3-4 1B1@4-8 1F2@8-9 1B2@9-9",
            ],
            {0: {"warm_up": 1, "cool_down": 1, "imbalance": 2}},
        ),
        (["0F0@0-2", ""], {0: {}, 1: {"imbalance": 2}}),
        (["", ""], {0: {}, 1: {}}),
    ],
)
def test_every_cause_of_a_hand_made_trace(lines: list[str], causes: dict[int, dict[str, float]]):
    trace = trace_of(*lines)
    assert {rank: idle_of(trace, rank) for rank in causes} == causes
    assert bubbles(trace).busy.tolist() == busy(trace).tolist()
    assert_one_decomposition(trace)


@pytest.mark.parametrize(
    ("lines", "spans", "work", "fraction"),
    [
        (["0F0@0-1 0B0@1-3 REDUCE@2-6 OPTIMIZER@8-9"], (9, 9), [4], 5 / 9),
        (["0F0@0-2 0F1@2-4 0B0@3-6 0B1@8-10"], (10, 10), [8], 0.2),  # at the same time
        (["RECV@0-2 0F0@2-3 SEND@3-9 0B0@4-6"], (4, 4), [3], 0.25),  # messages are no work
        (["0F0@0-1 0B0@4-6", "1F0@1-2 1B0@2-9"], (9, 8), [3, 8], 7 / 18),
        (["", "0F0@0-2 0B0@3-5", ""], (5, 5), [0, 4, 0], 0.2),  # of the ranks that were seen
        (["", ""], (0, 0), [0, 0], 0),
    ],
)
def test_the_step_its_longest_rank_work_and_bubble(
    lines: list[str], spans, work: list[float], fraction: float
):
    trace = trace_of(*lines)
    assert (makespan(trace), longest(trace)) == spans
    assert busy(trace).tolist() == work
    assert bubble_fraction(trace) == pytest.approx(fraction)


def test_latency_is_communication_and_its_echo_a_wait():
    trace = timed(built("1f1b", 2, 2), 2, 2, 2, latency=3)
    # rank 0: 0F0 0-2, 0F1 2-4, 0B0 14-18, 0B1 20-24; rank 1: 1F0 5-7, 1B0 7-11, 1F1 11-13, 1B1 13-17
    assert idle_of(trace, 0) == {"warm_up": 7, "communication": 3 + 2}
    assert idle_of(trace, 1) == {"warm_up": 2, "communication": 3, "cool_down": 7}


@pytest.mark.parametrize("blocks", ["sender", "receiver", "both"])
def test_a_blocked_rank_communicates(blocks: str):
    split = bubbles(timed(built("1f1b", 4, 8), 2, 2, 2, latency=1, blocks=blocks))
    assert split.idle["communication"].sum() > 0
    assert split.idle["overhead"].tolist() == [0] * 4
    assert (sum(split.idle.values()) == split.makespan - split.busy).all()


def test_what_the_busiest_rank_works_more_is_imbalance():
    program = built("1f1b", 2, 4)
    costs = Costs.of(program.schedule.placement, [1, 3], 1, 1)
    trace = simulate(program, costs)
    split = bubbles(trace)
    assert split.busy.tolist() == [12, 20]
    assert split.idle["imbalance"].tolist() == [8, 0]
    assert (sum(split.idle.values()) == split.makespan - split.busy).all()


def test_a_pair_counts_once_and_waits_for_what_comes_last():
    pairs = ("0F0 0F1 (0F2;0B0)OVERLAP_F_B 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")
    trace = timed(written(Placement.loop(2), 3, *pairs), 1, 1, 1)
    assert timeline(trace, 0) == "0F0@0-1 0F1@1-2 0F2@4-7 0B0@4-7 0B1@7-9 0B2@10-12"
    assert busy(trace).tolist() == [9, 9]
    assert idle_of(trace, 0) == {"warm_up": 2, "cool_down": 1}


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_the_causes_add_up_exactly(data: st.DataObject):
    family = data.draw(st.sampled_from(sorted(FAMILIES)))
    p = data.draw(st.sampled_from([2, 4]))
    program = built(family, p, data.draw(st.sampled_from([2 * p, 3 * p])))
    stages = program.schedule.stages
    f, b, w = (data.draw(st.lists(st.integers(0, 30), min_size=stages, max_size=stages)) for _ in "FBW")
    talk = Communication(
        same_node=Link(data.draw(st.integers(0, 9))),
        blocks=data.draw(st.sampled_from(["none", "sender", "receiver", "both"])),
    )
    trace = simulate(program, Costs.of(program.schedule.placement, f, b, w, communication=talk))
    split = bubbles(trace)
    assert (sum(split.idle.values()) == split.makespan - split.busy).all()
    assert np.array_equal(split.busy, busy(trace))
    assert all((time >= 0).all() for time in split.idle.values())
    assert not split.idle["overhead"].any()
    assert np.array_equal(split.idle["imbalance"], split.busy.max() - split.busy)
    if talk.same_node.latency == 0:
        assert not split.idle["communication"].any()


def test_in_seconds_they_add_up_to_rounding():
    split = bubbles(timed(built("interleaved-1f1b", 4, 8), 0.3, 0.7, 0.1, latency=0.07))
    np.testing.assert_allclose(sum(split.idle.values()), split.makespan - split.busy, rtol=0, atol=1e-12)
    np.testing.assert_allclose(split.busy, 8 * 1.1, rtol=1e-12)


def test_causes_that_are_only_rounding_are_not_named():
    split = bubbles(trace_of("0F0@0.0-0.1 0B0@0.30000000000000004-0.4", "1F0@0.1-0.2 1B0@0.2-0.3"))
    assert split.causes == ["warm_up", "cool_down"]


def assert_one_decomposition(trace) -> None:
    """Check that the spans of every rank and cause last as long as the table says, and overlap nothing."""
    split, spans = bubbles(trace), idle_spans(trace)
    length = (spans.end - spans.start).astype(float)
    assert (length > 0).all()
    for rank in range(trace.ranks):
        for number, cause in enumerate(CAUSES):
            drawn = length[(spans.rank == rank) & (spans.cause == number)].sum()
            assert drawn == pytest.approx(float(split.idle[cause][rank]), abs=1e-9 * float(split.makespan))
    messages = (Activity.SEND, Activity.RECV, *COLLECTIVES)
    work = trace.only([kind for kind in Activity if kind not in messages])
    for rank, rows in enumerate(work.rank_slices()):
        mine = spans.rank == rank
        order = np.argsort(spans.start[mine], kind="stable")
        start, end = spans.start[mine][order], spans.end[mine][order]
        assert (start[1:] >= end[:-1] - 1e-9).all()
        for first, last in zip(start, end, strict=True):
            assert not ((work.start[rows] < last - 1e-9) & (work.end[rows] > first + 1e-9)).any()


# One stage a rank and several, there and back, copied ones, whole and split backwards.
FEW = ["1f1b", "hanayo", "zb-v", "dualpipe"]


@pytest.mark.parametrize("family", [*FEW, *exhaustive(*(name for name in FAMILIES if name not in FEW))])
def test_idle_spans_are_the_tables_decomposition(family):
    assert_one_decomposition(timed(built(family, 4, 8), 3, 4, 5, 2))


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(["1f1b", "gpipe", "zb-h1", "interleaved-1f1b", "zb-v", "dualpipe-v"]),
    st.integers(2, 4),
    st.integers(2, 6),
    st.integers(0, 2**32 - 1),
)
def test_idle_spans_of_irregular_steps_are_the_tables_decomposition(family, ranks, half, seed):
    """Random lengths of every op, and random waits before it."""
    random = np.random.default_rng(seed)
    program = built(family, ranks, ranks * half)
    stages = program.schedule.stages
    trace = timed(
        program, *(random.uniform(0.5, 2, stages).tolist() for _ in range(3)), latency=random.uniform(0, 1)
    )
    start, end = trace.start.astype(float), trace.end.astype(float)
    for rows in trace.rank_slices():
        # Later starts move everything of the rank, so ops stay in order.
        late = np.cumsum(random.exponential(0.2, rows.stop - rows.start) * (random.random() < 0.7))
        late[1:] = np.where(trace.paired[rows][:-1], late[:-1], late[1:])
        start[rows] += late
        end[rows] += late
    trace = replace(trace, start=start, end=end)
    assert_one_decomposition(trace)


def test_imbalance_takes_its_share_of_every_span_of_a_cause():
    """Rank 1 computes 3 less than rank 0, half of the 6 that it waits for activations."""
    trace = trace_of(
        "0F0@0-1 0F1@3-5 0F2@9-11 0B0@11-13 0B1@13-14 0B2@14-15",
        "1F0@1-2 1B0@2-3 1F1@5-6 1B1@6-7 1F2@11-12 1B2@12-13",
    )
    assert idle_of(trace, 1) == {"warm_up": 1, "activation": 3, "imbalance": 3, "cool_down": 2}
    spans = idle_spans(trace)
    rows = zip(*(column.tolist() for column in spans), strict=True)
    assert sorted((start, end, CAUSES[cause]) for rank, start, end, cause in rows if rank) == [
        (0, 1, "warm_up"), (3, 4, "activation"), (4, 5, "imbalance"), (7, 9, "activation"), (9, 11, "imbalance"),
        (13, 15, "cool_down"),
    ]  # fmt: skip


def test_a_gap_is_a_wait_and_then_a_message():
    spans = idle_spans(timed(written(Placement.loop(2), 1, "0F0 0B0", "1F0 1B0"), 2, 2, 2, 1))
    rows = zip(*(column.tolist() for column in spans), strict=True)
    assert sorted((rank, start, end, CAUSES[cause]) for rank, start, end, cause in rows) == [
        (0, 2, 9, "warm_up"), (0, 9, 10, "communication"),
        (1, 0, 2, "warm_up"), (1, 2, 3, "communication"), (1, 9, 14, "cool_down"),
    ]  # fmt: skip
