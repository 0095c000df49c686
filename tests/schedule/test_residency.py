"""When sharded weights and gradients come and go: exact lists, and what must hold for every schedule and window."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base.errors import ConfigError, ScheduleError
from penstock.runtime.options import ParallelOptions
from penstock.schedule.check import check
from penstock.schedule.families.lookup import build_schedule
from penstock.schedule.memory import Budget, WeightBytes
from penstock.schedule.ops import Kind
from penstock.schedule.program import Action
from penstock.schedule.residency import Residency, Sharding, make_residency
from penstock.schedule.schedule import Schedule

PAGE = Path(__file__).parents[2] / "docs" / "parallelism.md"

SEVERAL = ("interleaved-1f1b", "breadth-first", "zb-v", "v-half")
READS = (Kind.F, Kind.B, Kind.I, Kind.R)


def built(name: str, ranks: int, microbatches: int) -> Schedule:
    virtual = 3 if name in ("interleaved-1f1b", "breadth-first") else None
    return build_schedule(name, ranks, microbatches, virtual)


def sharded(schedule: Schedule, **choices: object) -> Residency:
    return make_residency(schedule, Sharding(**choices))  # type: ignore[arg-type]


def test_weights_leave_after_the_last_input_half_and_before_its_weight_halves():
    schedule = build_schedule("zb-v", 1, 2)
    line = list(sharded(schedule, shard="weights", window=1).text(schedule, 0))
    assert " ".join(line) == (
        "0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1I0 1RESHARD 1W0 0UNSHARD 0F1 0I0 0RESHARD 0W0 1UNSHARD 1F1 1I1 1RESHARD 1W1 "
        "1REDUCE_GRAD 0UNSHARD 0I1 0RESHARD 0W1 0REDUCE_GRAD"
    )


def test_breadth_first_gathers_every_stage_twice_with_a_window_of_one():
    schedule = build_schedule("breadth-first", 2, 4, 4)
    residency = sharded(schedule, shard="weights", window=1)
    # The last stage stays between its forwards and backwards.
    assert [len(runs) for runs in residency.runs] == [7, 7]
    assert [len(runs) for runs in sharded(schedule, shard="weights").runs] == [4, 4]


def test_a_gather_begins_as_soon_as_the_window_has_a_place():
    schedule = build_schedule("breadth-first", 1, 2, 3)
    line = list(sharded(schedule, shard="weights", window=2).text(schedule, 0))
    assert " ".join(line) == (
        "0UNSHARD 1UNSHARD 0F0 0F1 0RESHARD 2UNSHARD 1F0 1F1 2F0 2F1 2B0 2B1 2RESHARD 2REDUCE_GRAD 0UNSHARD 1B0 1B1 "
        "1RESHARD 1REDUCE_GRAD 0B0 0B1 0RESHARD 0REDUCE_GRAD"
    )


@settings(max_examples=30)
@given(
    name=st.sampled_from(SEVERAL), ranks=st.integers(1, 3), groups=st.integers(1, 3), window=st.integers(1, 3),
    every=st.integers(1, 4),
)  # fmt: skip
def test_every_op_finds_its_weights_and_no_window_is_exceeded(
    name: str, ranks: int, groups: int, window: int, every: int
):
    schedule = built(name, ranks, groups * max(ranks, 2))
    window = min(window, len(schedule.placement.stages_of[0]))
    residency = sharded(schedule, shard="weights", window=window, reduce_every=every)
    ones = np.ones(schedule.stages, np.int64)
    for rank in range(schedule.ranks):
        rows = schedule.rows(rank)
        held = np.zeros((rows.stop, schedule.stages), np.int64)
        for run in residency.runs[rank]:
            assert run.gathered <= run.first <= run.last
            held[run.gathered : run.last + 1, run.stage] += 1
        assert held.max() == 1  # no stage is gathered while it is there
        assert held.sum(axis=1).max() <= window
        for row in range(rows.start, rows.stop):
            if schedule.kind[row] in READS:
                assert held[row, schedule.stage[row]] == 1
        reduced = residency.reduces(rank)
        ends = [r for r in range(rows.start, rows.stop) if schedule.kind[r] in (Kind.B, Kind.W)]
        for stage in schedule.placement.stages_of[rank]:
            own = [r for r in ends if schedule.stage[r] == stage]
            at = [r for r in own if stage in reduced.get(r, ())]
            assert at[-1] == own[-1]  # no gradient is left
            assert len(at) == -(-schedule.microbatches // every)
    bytes_held = residency.held(schedule, 1000 * ones, 0 * ones, 4)
    for rank, stages in enumerate(schedule.placement.stages_of):
        most = bytes_held[schedule.rows(rank)].max()
        assert 250 * len(stages) < most <= 250 * len(stages) + 1000 * window


@settings(max_examples=20)
@given(name=st.sampled_from(SEVERAL), ranks=st.integers(1, 3), groups=st.integers(1, 2))
def test_a_larger_window_gathers_no_more(name: str, ranks: int, groups: int):
    schedule = built(name, ranks, groups * max(ranks, 2))
    most = len(schedule.placement.stages_of[0])
    counts = [len(sharded(schedule, shard="weights", window=w).runs[0]) for w in range(1, most + 1)]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == most


def test_the_program_lists_the_operations_in_their_places():
    schedule = build_schedule("breadth-first", 2, 2, 2)
    program = check(schedule, sharding=Sharding("weights", window=1, reduce_every=1)).program
    for rank in range(2):
        lines = list(program.instructions(rank))
        there: set[int] = set()
        for line in lines:
            match line.action:
                case Action.UNSHARD:
                    there.add(line.number)
                case Action.RESHARD:
                    there.remove(line.number)
                case Action.RUN if schedule.kind[line.row] in READS:
                    assert int(schedule.stage[line.row]) in there
        assert not there
        assert sum(line.action is Action.REDUCE for line in lines) == 4
        assert any(program.describe(line).startswith("unshard stage") for line in lines)


def test_a_budget_counts_sharded_weights_and_names_the_op_that_exceeds_it():
    schedule = build_schedule("breadth-first", 2, 4, 4)
    sizes = {"saved": 0, "weights": WeightBytes(1000, 1000, replicas=4)}
    assert Budget(limit=0, **sizes).peak(schedule).tolist() == [8000, 8000]
    kept = Sharding("weights", window=1)
    least = Budget(limit=0, **sizes).peak(schedule, make_residency(schedule, kept))
    # Parts of four weights and of four gradients, and one stage's of each, or two while one is being reduced.
    assert (least <= 4 * 250 + 3 * 250 + 1000 + 2000).all()
    check(schedule, budget=Budget(limit=int(least.max()), **sizes), sharding=kept)
    with pytest.raises(ScheduleError, match=r"does not fit in memory: rank \d holds \d+ after \d+B\d"):
        check(schedule, budget=Budget(limit=int(least.min()) - 1, **sizes), sharding=kept)


def test_with_a_store_a_rank_holds_what_its_window_and_open_backwards_need_and_no_parts():
    schedule = build_schedule("breadth-first", 1, 4, 4)
    held = make_residency(schedule, Sharding(store="host", window=1)).held(schedule, 1000, 10, 1)
    of_stage = {s: held[(schedule.stage == s) & (schedule.kind == Kind.F)] for s in range(3)}
    assert all((column == 1000).all() for column in of_stage.values())
    # The stage's own gradient, and that of the stage before it beside its first op.
    assert held[schedule.kind == Kind.B].tolist() == [1010, 1010, 1010, 1010, *([1020, 1010, 1010, 1010] * 3)]


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        (
            {"shard": "everything"},
            "shard must be one of none, optimizer, gradients, weights, got 'everything'",
        ),
        ({"shard": "weights", "window": 0}, "window must be a number of at least 1"),
        (
            {"shard": "gradients", "window": 2},
            "window = 2 needs shard = 'weights' or a store, and shard is 'gradients'",
        ),
        ({"store": "cloud"}, "store must be one of none, host, disk, got 'cloud'"),
        (
            {"store": "disk", "shard": "weights"},
            "store='disk' keeps .* and shard='weights' divides them over replicas; leave one of them out",
        ),
        (
            {"shard": "optimizer", "reduce_every": 2},
            "reduce_every = 2 needs shard = 'gradients' or 'weights'",
        ),
    ],
)
def test_choices_that_mean_nothing_are_refused(choices: dict, said: str):
    with pytest.raises(ScheduleError, match=said):
        Sharding(**choices)
    with pytest.raises(ConfigError, match=said):
        ParallelOptions(**choices)


def test_windows_larger_than_a_rank_are_refused_with_what_is_allowed():
    for choices in ({"store": "host"}, {"shard": "weights"}):
        with pytest.raises(
            ScheduleError,
            match=r"at most the 4 stages that breadth-first gives a rank, got 5; use 1 to 4, None for all",
        ):
            sharded(build_schedule("breadth-first", 2, 4, 4), window=5, **choices)


def test_copies_of_stages_and_windows_smaller_than_a_pair_are_refused():
    with pytest.raises(ScheduleError, match="has copies of stages"):
        check(build_schedule("dualpipe", 4, 8), sharding=Sharding("gradients"))
    pairs = build_schedule("dualpipe-v", 2, 4)
    assert pairs.paired.any()
    with pytest.raises(
        ScheduleError, match="reads the weights of 2 stages, and the window is 1; use at least 2"
    ):
        check(pairs, sharding=Sharding("weights", window=1))
    check(pairs, sharding=Sharding("weights", window=2))


def table() -> list[tuple[str, str, int, str, str]]:
    """Return the rows of the page's table: schedule, window, gathers, stages in full of weights and of gradients."""
    lines = PAGE.read_text().partition("| schedule | window |")[2].split("\n\n")[0].splitlines()[2:]
    rows = []
    for line in lines:
        names, window, gathers, weights, gradients = (cell.strip() for cell in line.strip("|").split("|"))
        for name in names.removesuffix("(one stage)").split(","):
            rows.append((name.strip(), window, int(gathers), weights, gradients))
    for number, row in enumerate(rows):
        if row[4] == "the same":
            rows[number] = (*row[:4], rows[number - 1][4])
    return rows


@pytest.mark.parametrize(("name", "window", "gathers", "weights", "gradients"), table())
def test_the_pages_table_is_what_a_schedule_needs(
    name: str, window: str, gathers: int, weights: str, gradients: str
):
    schedule = build_schedule(name, 4, 16, 4 if name in ("interleaved-1f1b", "breadth-first") else None)
    limit = int(window) if window.isdigit() else None
    sharding = Sharding("weights", window=limit)
    residency = make_residency(schedule, sharding)
    assert max(map(len, residency.runs)) == gathers
    of_rank = len(schedule.placement.stages_of[0])

    def in_full(found: Residency, weight: int, gradient: int) -> int:
        """The most stages in full; with so many replicas a share is a byte of each."""
        held = found.held(schedule, 10**6 * weight, 10**6 * gradient, 10**6)
        return int(held.max()) // 10**6

    assert weights == f"{in_full(residency, 1, 0)} of {of_rank}"
    said = re.match(
        r"(\d) of (\d)(?:; (\d) with `reduce_every=(\d)`, at (\d) times the reductions)?$", gradients
    )
    assert said, gradients
    assert said.group(1, 2) == (str(in_full(residency, 0, 1)), str(of_rank))
    if said[3]:
        more = make_residency(schedule, Sharding("weights", window=limit, reduce_every=int(said[4])))
        assert in_full(more, 0, 1) == int(said[3])
        assert len(more.reductions[0]) == int(said[5]) * len(residency.reductions[0])
