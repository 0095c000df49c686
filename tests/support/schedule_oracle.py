"""Slow, plain answers to what the schedule room computes: written apart from it, over lists of ops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from graphlib import CycleError, TopologicalSorter
from typing import Any

from penstock.schedule.ops import Kind, Op, Pair
from penstock.schedule.placement import Placement
from penstock.schedule.program import Action, Program
from penstock.schedule.schedule import Schedule

Lists = Sequence[Sequence[Op | Pair]]
Unit = tuple[int, int]


def lists(schedule: Schedule) -> list[list[Op | Pair]]:
    return [list(schedule.ops(rank)) for rank in range(schedule.ranks)]


def halves(op: Op | Pair) -> tuple[Op, ...]:
    return (op.forward, op.backward) if isinstance(op, Pair) else (op,)


def needs(op: Op, stages: int) -> Iterator[tuple[str, int, int]]:
    """What must have run: ("F" | "G" | "R", stage, microbatch), G being B or I."""
    s, j = op.stage, op.microbatch
    if op.kind == Kind.F:
        if s > 0:
            yield "F", s - 1, j
        return
    yield "F", s, j
    if op.kind == Kind.W:
        yield "G", s, j
    elif op.kind != Kind.R and s + 1 < stages:
        yield "G", s + 1, j


def yields(op: Op) -> tuple[str, int, int]:
    return "G" if op.kind in (Kind.B, Kind.I) else op.kind.name, op.stage, op.microbatch


def is_valid(placement: Placement, microbatches: int, ops: Lists) -> bool:
    """Every op once, on one rank that holds its stage, and some order of all of them respects every wait."""
    count = Counter(half for rank in ops for op in rank for half in halves(op))
    where: dict[tuple[int, int], set[int]] = {}
    for rank, listed in enumerate(ops):
        for op in listed:
            for half in halves(op):
                where.setdefault((half.stage, half.microbatch), set()).add(rank)
    for s in range(placement.stages):
        for j in range(microbatches):
            kinds = sorted(k.name for k in Kind for _ in range(count[Op(s, k, j)]))
            if kinds not in (["B", "F"], ["F", "I", "W"]):
                return False
            held = where.pop((s, j))
            if len(held) != 1 or not held <= set(placement.holders[s]):
                return False
    if where:
        return False
    maker: dict[tuple[str, int, int], Unit] = {}
    for rank, listed in enumerate(ops):
        for n, op in enumerate(listed):
            maker.update({yields(half): (rank, n) for half in halves(op)})
    graph: dict[Unit, set[Unit]] = {}
    for rank, listed in enumerate(ops):
        for n, op in enumerate(listed):
            before = {maker[need] for half in halves(op) for need in needs(half, placement.stages)}
            graph[rank, n] = before | ({(rank, n - 1)} if n else set())
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return False
    return all(unit not in before for unit, before in graph.items())


def ends(schedule: Schedule, costs: dict[str, Any], latency: Fraction | float = 0) -> list[list[tuple]]:
    """(op, start, end) of every op of every rank, each as soon as it can; a pair takes the sum of its halves.

    A cost is a number, or a list of one for each stage.
    """
    table = {kind: c if isinstance(c, list) else [c] * schedule.stages for kind, c in costs.items()}
    todo = lists(schedule)
    rank_of: dict[tuple[str, int, int], int] = {}
    done: dict[tuple[str, int, int], Fraction | int] = {}
    found: list[list[tuple]] = [[] for _ in todo]
    moved = True
    while moved:
        moved = False
        for rank, listed in enumerate(todo):
            while len(found[rank]) < len(listed):
                op = listed[len(found[rank])]
                wanted = [need for half in halves(op) for need in needs(half, schedule.stages)]
                if any(need not in done for need in wanted):
                    break
                start = max(
                    [found[rank][-1][2] if found[rank] else 0]
                    + [done[need] + (latency if rank_of[need] != rank else 0) for need in wanted]
                )
                end = start + sum(table[half.kind.name][half.stage] for half in halves(op))
                for half in halves(op):
                    done[yields(half)], rank_of[yields(half)] = end, rank
                found[rank].append((op, start, end))
                moved = True
    assert all(len(a) == len(b) for a, b in zip(found, todo, strict=True)), "deadlock"
    return found


def timed(
    schedule: Schedule, f: int, b: int, w: int, latency: Fraction | int = 0
) -> tuple[Fraction | int, Fraction | int, Fraction]:
    """(makespan, longest, bubble of a rank) if a chunk's F, I, W take f, b, w."""
    found = ends(schedule, {"F": f, "I": b, "W": w, "B": b + w, "R": f}, latency)
    makespan = max(rank[-1][2] for rank in found)
    longest = max(rank[-1][2] - rank[0][1] for rank in found)
    idle = max(makespan - sum(end - start for _, start, end in rank) for rank in found)
    return makespan, longest, Fraction(idle)


def runs_when_sends_block(program: Program) -> bool:
    """Whether all ranks reach their end if a send waits for its receive and a reduction for all its holders.

    A receive is posted by POST, or by standing at RECV.
    """
    ranks = range(program.schedule.ranks)
    todo = [list(program.instructions(rank)) for rank in ranks]
    at = [0 for _ in ranks]
    posted: set[tuple[int, int, int]] = set()
    sent: set[tuple[int, int, int]] = set()
    handed: set[int] = set()

    def may_pass(rank: int) -> bool:
        line = todo[rank][at[rank]]
        if line.action is Action.POST:
            posted.add((line.peer, rank, line.number))
        elif line.action is Action.RECV:
            posted.add((line.peer, rank, line.number))
            return (line.peer, rank, line.number) in sent
        elif line.action is Action.SEND:
            message = (rank, line.peer, line.number)
            if message in posted:
                sent.add(message)
            return message in posted
        elif line.action is Action.HAND:
            handed.add(int(program.target[line.row]))
        elif line.action is Action.TAKE:
            return line.row in handed
        elif line.action is Action.REDUCE:
            return all(
                at[other] >= next(
                    n for n, i in enumerate(todo[other]) if i.action is Action.REDUCE and i.number == line.number
                )
                for other in program.reductions[line.number]
            )  # fmt: skip
        return True

    moved = True
    while moved:
        moved = False
        for rank in ranks:
            while at[rank] < len(todo[rank]) and may_pass(rank):
                at[rank] += 1
                moved = True
    return all(at[rank] == len(todo[rank]) for rank in ranks)
