"""Gathers and reductions in a simulated step: by hand, and beside a model that runs the instructions as events."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base.errors import ConfigError
from penstock.schedule import jit
from penstock.schedule.check import check
from penstock.schedule.families.lookup import build_schedule
from penstock.schedule.ops import Kind
from penstock.schedule.program import Action, Program
from penstock.schedule.residency import Sharding
from penstock.simulate.costs import Costs
from penstock.simulate.simulator import simulate
from penstock.trace.bubbles import makespan
from penstock.trace.events import Activity, Trace
from tests.support.simulated import priced


def sharded(name: str, ranks: int, microbatches: int, virtual: int | None = None, **choices: Any) -> Program:
    return check(build_schedule(name, ranks, microbatches, virtual), sharding=Sharding(**choices)).program


def events(trace: Trace, rank: int) -> str:
    """One rank's events as ``0F0@0-1``, ``+0@0-1`` for a gather and ``=0@0-1`` for a reduction."""
    rows = trace.rank_slices()[rank]
    texts = []
    for k in range(rows.start, rows.stop):
        kind, stage = Activity(int(trace.kind[k])), trace.stage[k]
        name = {Activity.GATHER: f"+{stage}", Activity.REDUCE: f"={stage}"}.get(
            kind, f"{stage}{kind.name}{trace.microbatch[k]}"
        )
        texts.append(f"{name}@{trace.start[k]}-{trace.end[k]}")
    return " ".join(texts)


def test_an_op_waits_for_its_weights_and_a_gather_for_the_link():
    program = sharded("breadth-first", 1, 1, 2, shard="weights", window=1, reduce_every=1)
    step = simulate(program, priced(program, 4, 4, 0, gather=[3, 5], reduce=[7, 1]))
    # No place for a gather ahead of stage 1's; the reduction of stage 1 holds up the gather of stage 0, which holds up B.
    assert (
        events(step, 0) == "+0@0-3 0F0@3-5 +1@5-10 1F0@10-12 1B0@12-14 =1@14-15 +0@15-18 0B0@18-20 =0@20-27"
    )
    assert step.info["exposed_gathers"] == [3 + 5 + 4]
    assert step.info["exposed_reductions"] == [7]
    assert makespan(step) == 27


def test_with_a_place_in_the_window_a_gather_hides_behind_the_op_before():
    program = sharded("breadth-first", 1, 1, 2, shard="weights", window=2)
    step = simulate(program, priced(program, 4, 4, 0, gather=[3, 1]))
    assert events(step, 0) == "+0@0-3 0F0@3-5 +1@3-4 1F0@5-7 1B0@7-9 0B0@9-11"
    assert step.info["exposed_gathers"] == [3]


def test_the_rank_waits_for_a_reduction_after_its_next_op():
    program = sharded("1f1b", 1, 3, shard="gradients", reduce_every=1)
    step = simulate(program, priced(program, 1, 1, 0, reduce=4))
    assert events(step, 0) == ("0F0@0-1 0B0@1-2 0F1@2-3 =0@2-6 0B1@6-7 0F2@7-8 =0@7-11 0B2@11-12 =0@12-16")
    assert step.info["exposed_reductions"] == [3 + 3 + 4]


def test_a_backward_receives_once_its_weights_are_there_and_a_forward_before():
    program = sharded("breadth-first", 2, 1, 2, shard="weights", window=1)
    costs = priced(program, 2, 2, 0, 2, gather=[10, 0, 0, 0], blocks="receiver")
    step = simulate(program, costs)
    assert events(step, 0) == "+0@0-10 0F0@10-11 +2@11-11 2F0@16-17 2B0@23-24 +0@24-34 0B0@36-37"
    assert step.info["exposed_gathers"] == [10 + 7, 0]


def test_without_a_price_a_step_is_as_it_was():
    program = sharded("zb-v", 2, 4, shard="weights", window=1)
    plain = check(program.schedule).program
    trace = simulate(program, priced(program, 1, 1, 1))
    assert trace.end.tolist() == simulate(plain, priced(plain, 1, 1, 1)).end.tolist()
    unsharded = simulate(plain, priced(plain, 1, 1, 1, gather=1, reduce=1))
    assert unsharded.end.tolist() == trace.end.tolist()
    assert "exposed_gathers" not in unsharded.info


def test_memory_of_ops_stays_known_among_gathers():
    program = sharded("breadth-first", 2, 2, 2, shard="weights", window=1)
    trace = simulate(program, priced(program, 1, 1, 0, gather=1, reduce=1))
    ops = trace.only([Activity.F, Activity.B])
    assert ops.held.tolist() == simulate(program, priced(program, 1, 1, 0)).held.tolist()
    for rows in trace.rank_slices():
        changes = np.diff(trace.held[rows], prepend=0)
        assert not changes[np.isin(trace.kind[rows], [Activity.GATHER, Activity.REDUCE])].any()


def test_prices_must_cover_the_stages_and_be_times():
    program = sharded("zb-v", 2, 4, shard="weights")
    with pytest.raises(ConfigError, match=r"gather must cover stages 0\.\.3"):
        priced(program, 1, 1, 1, gather=[1, 2])
    with pytest.raises(ConfigError, match=r"reduce must be a finite number"):
        priced(program, 1, 1, 1, reduce=-1)


CASES = st.fixed_dictionaries({
    "name": st.sampled_from(
        ("1f1b", "interleaved-1f1b", "breadth-first", "zb-v", "v-half", "dualpipe-v", "dualpipe", "chimera")
    ),
    "ranks": st.integers(1, 3), "groups": st.integers(2, 3), "shard": st.sampled_from(("gradients", "weights", "store")),
    "window": st.integers(2, 3) | st.none(), "every": st.integers(1, 4), "latency": st.integers(0, 3),
    "seconds": st.lists(st.integers(0, 6), min_size=24, max_size=24), "missing": st.sampled_from(("", "gather", "reduce")),
    "blocks": st.sampled_from(("none", "sender", "receiver", "both")),
})  # fmt: skip


def drawn(case: dict[str, Any]) -> tuple[Program, Costs]:
    virtual = 3 if case["name"] in ("interleaved-1f1b", "breadth-first") else None
    stages = virtual or (1 if case["name"] == "1f1b" else 2)
    window = min(case["window"] or stages, stages) if case["shard"] != "gradients" else None
    ranks, kept = case["ranks"], {"shard": case["shard"]}
    if twice := case["name"] in ("dualpipe", "chimera"):  # which need an even number of ranks, and no shards
        ranks, window = 2 * ((ranks + 1) // 2), 2
    if twice or case["shard"] == "store":
        kept = {"store": "host"}
    program = sharded(
        case["name"],
        ranks,
        ranks * case["groups"],
        virtual,
        window=window,
        reduce_every=case["every"],
        **kept,
    )
    numbers = [*case["seconds"]]
    seconds = {key: [numbers.pop() for _ in range(program.schedule.stages)] for key in ("gather", "reduce")}
    seconds.pop(case["missing"], None)
    f, b, w = (each * program.schedule.stages // program.schedule.ranks for each in numbers[:3])
    return program, priced(program, f, b, w, case["latency"], blocks=case["blocks"], **seconds)


@settings(deadline=None, max_examples=40)
@given(case=CASES)
def test_every_time_is_that_of_the_instructions_run_as_events(case: dict[str, Any]):
    program, costs = drawn(case)
    step = simulate(program, costs)
    oracle = Oracle(program, costs)
    oracle.run()
    found = sorted(
        zip(
            step.rank.tolist(), step.kind.tolist(), step.stage.tolist(),
            step.microbatch.tolist(), step.start.tolist(), step.end.tolist(), strict=True,
        )
    )  # fmt: skip
    assert found == sorted(oracle.events)
    assert step.info["exposed_gathers"] == oracle.exposed
    assert step.info["exposed_reductions"] == oracle.stalled


@pytest.mark.slow
@pytest.mark.parametrize("blocks", ["none", "both"])
@pytest.mark.parametrize("scale", [1, 0.1])
def test_the_compiled_kernel_agrees(monkeypatch: pytest.MonkeyPatch, blocks: str, scale: float):
    programs = (
        sharded("interleaved-1f1b", 3, 12, 3, shard="weights", window=2, reduce_every=2),
        sharded("chimera", 4, 8, store="host", window=1, reduce_every=2),
    )
    for program in programs:
        costs = priced(program, 3, 3, 3, 1, blocks=blocks, gather=6, reduce=9)
        costs = replace(costs, seconds=costs.seconds * scale)
        monkeypatch.undo()
        plain = simulate(program, costs)
        monkeypatch.setattr(jit, "COMPILE_FROM", 0)
        compiled = simulate(program, costs)
        for name in ("kind", "stage", "start", "end"):
            assert np.array_equal(getattr(plain, name), getattr(compiled, name)), name
        assert plain.info == compiled.info


class Oracle:
    """Ranks as coroutines that run the instructions of a Program, each with a link; a queue of events keeps the time."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self.program, self.costs, self.schedule = program, costs, program.schedule
        self.now = 0
        self.events: list[tuple[int, int, int, int, int, int]] = []
        self.sent: dict[int, int] = {}  # row → when its output began to travel
        self.exposed, self.stalled = [0] * self.schedule.ranks, [0] * self.schedule.ranks

    def run(self) -> None:
        ranks = [self._rank(rank) for rank in range(self.schedule.ranks)]
        queue = [(0, rank) for rank in range(self.schedule.ranks)]
        waiting: dict[int, int] = {}  # row → rank that waits until its output is sent
        while queue:
            self.now, rank = heapq.heappop(queue)
            wanted = next(ranks[rank], None)
            if isinstance(wanted, tuple):
                waiting[wanted[0]] = rank
            elif wanted is not None:
                heapq.heappush(queue, (max(wanted, self.now), rank))
            for row in [row for row in waiting if row in self.sent]:
                heapq.heappush(queue, (self.now, waiting.pop(row)))
        assert not waiting

    def _collective(self, rank: int, kind: Activity, stage: int, free: int) -> int:
        table = self.costs.gather if kind == Activity.GATHER else self.costs.reduce
        if table is None:
            return free
        start = max(self.now, free)
        self.events.append((rank, int(kind), stage, -1, start, start + int(table[stage])))
        return start + int(table[stage])

    def _rank(self, rank: int) -> Iterator[int | tuple[int]]:
        """Yield times to sleep until, and (row,) to wait until that row's output is sent."""
        schedule, blocks = self.schedule, self.costs.communication.blocks
        travel = int(self.costs.communication.same_node.latency)
        assert self.program.residency is not None
        both_ways = self.program.residency.sharding.stored  # reductions leave while gathers come
        free = reduced = 0  # when the link is free, and when its last reduction is done
        weights = dict.fromkeys(range(schedule.stages), 0)
        producers: list[tuple[int, bool]] = []
        settles = False
        last = 0
        lines = [line for line in self.program.instructions(rank) if line.action is not Action.POST]
        for number, line in enumerate(lines):
            if line.action is Action.UNSHARD:
                free = self._collective(rank, Activity.GATHER, line.number, free)
                if self.costs.gather is not None:
                    weights[line.number] = free
            elif line.action in (Action.RECV, Action.TAKE):
                producers.append((int(self.program.source[line.row]), line.action is Action.RECV))
            elif line.action is Action.RUN:
                ops = [schedule.op(row) for row in range(line.row, line.row + line.number)]
                reached = self.now
                for op in ops:
                    if op.kind not in (Kind.F, Kind.W):
                        yield weights[op.stage]
                alone = reached
                for row, far in producers:
                    if not far:
                        continue
                    if row not in self.sent:
                        yield (row,)
                    sent = self.sent[row]
                    if blocks in ("receiver", "both"):
                        alone = max(alone, sent) + travel
                        yield self.now + travel
                    else:
                        alone = max(alone, sent + travel)
                        yield sent + travel
                for op in ops:
                    if op.kind == Kind.F:
                        yield weights[op.stage]
                begin = self.now
                self.exposed[rank] += begin - alone
                yield begin + sum(int(self.costs.seconds[op.stage, op.kind]) for op in ops)
                for op in ops:
                    self.events.append((rank, int(op.kind), op.stage, op.microbatch, begin, self.now))
                producers = []
                rows = range(line.row, line.row + line.number)
                done = self.now
                for row in rows:
                    if blocks not in ("sender", "both"):
                        self.sent[row] = done
                        continue
                    self.sent[row] = self.now
                    if self.program.target[row] >= 0 and self.program.rank[self.program.target[row]] != rank:
                        yield self.now + travel
                last = self.now
                if settles:
                    more = any(later.action is Action.RUN for later in lines[number + 1 :])
                    if more:
                        self.stalled[rank] += max(0, reduced - self.now)
                        yield reduced
                    settles = False
            elif line.action is Action.REDUCE:
                done = self._collective(rank, Activity.REDUCE, line.number, reduced if both_ways else free)
                free = free if both_ways else done
                if self.costs.reduce is not None:
                    reduced, settles = done, True
        self.stalled[rank] += max(0, reduced - last)
