"""A schedule made executable: every hand-over, receive slot, release and reduction explicit, per rank.

The Program keeps the schedule's columns and adds who takes from whom. `Program.instructions` spells one rank's part
out, one instruction a line, and that is what the executor compiles:

    POST   get ready to receive a message into one of the edge's slots
    RECV   wait for that message, take it, and free its slot
    TAKE   take what another stage of the same rank handed over
    RUN    compute one op, or the two of a fused pair
    SEND   give the result to another rank, without waiting for it
    HAND   give the result to another stage of the same rank
    FREE   drop what the stage saved for this microbatch
    REDUCE the stage's gradients are complete: reduce them over its copies and replicas

A stage of which several ranks hold a copy is reduced on all its holders, once on each, also on one that saw none of its
microbatches. Its REDUCE stands after the unit-time step in which the last copy is complete, and stages that are complete
together come in ascending order, so that all holders meet in the same order and may even block until they have met.

A value may also skip stages: what stage i gives and stage j > i + 1 takes goes straight from the one to the other, and
its gradient straight back. Such a hand-over has a route of its own, 1 for the first skip and so on; route 0 is the
hand-over between neighbours. Nothing waits longer for it: the ops it ties together depend on each other already.

Between two ranks there is one directed edge each way. Its messages arrive in the order in which the sender produces them;
the receiver has `slots` receives posted ahead. That many suffice for the unit-time execution never to block a
sender, which proves that the program cannot deadlock even if every send blocks until its receive is posted; one
more is posted to absorb jitter.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.schedule.index import index, links, rank_column
from penstock.schedule.ops import Kind
from penstock.schedule.order import levels
from penstock.schedule.schedule import IntColumn, Schedule

JITTER_SLOTS = 1


class Action(Enum):
    """What one instruction does; see the module's list."""

    POST = "post"
    RECV = "recv"
    TAKE = "take"
    RUN = "run"
    SEND = "send"
    HAND = "hand"
    FREE = "free"
    REDUCE = "reduce"


class Instruction(NamedTuple):
    """One line of a rank's program.

    Attributes:
        action: what to do.
        row: the schedule row it belongs to: the op that runs, sends, or will take the message.
        peer: the other rank of POST, RECV and SEND; -1 otherwise.
        number: the message's place in its edge's order for POST, RECV and SEND; 2 for RUN of a pair, 1 of
            a single op; the stage for REDUCE; 0 otherwise.
        route: of RECV, TAKE, SEND, HAND and POST: 0 between neighbouring stages, n for the n-th skip.
    """

    action: Action
    row: int
    peer: int = -1
    number: int = 0
    route: int = 0


@dataclass(frozen=True)
class Edge:
    """The messages from one rank to another.

    Attributes:
        source, target: the ranks.
        takers: rows (on the target) that take the messages, in the order they are sent.
        routes: through which route each comes.
        slots: receives the target keeps posted.
        capacity: the most messages that can ever wait, whatever the timing: none is taken later than the backward of
            its microbatch, so as many as one of the two ranks has microbatches in flight. Without backwards: slots.
    """

    source: int
    target: int
    takers: tuple[int, ...]
    routes: tuple[int, ...]
    slots: int
    capacity: int


@dataclass(frozen=True, eq=False)
class Program:
    """A Schedule with its waits resolved.

    Attributes:
        schedule: the ops.
        rank: int32 (ops,), the rank of every row.
        source: int32 (ops,), the row whose hand-over this row takes, or -1.
        target: int32 (ops,), the row that takes this row's hand-over, or -1.
        level: int32 (ops,), the unit-time step of every row: an order that respects every wait.
        skips: (source stage, target stage) of the values that skip stages, in a fixed order.
    """

    schedule: Schedule
    rank: IntColumn
    source: IntColumn
    target: IntColumn
    level: IntColumn
    skips: tuple[tuple[int, int], ...] = ()

    def tag(self, row: int, route: int = 0) -> int:
        """A number for what a row takes through a route, below `tags`; no two hand-overs have the same."""
        return route * len(self.rank) + row

    @property
    def tags(self) -> int:
        return (1 + len(self.skips)) * len(self.rank)

    @cached_property
    def hand_overs(self) -> dict[int, tuple[tuple[int, int, int], ...]]:
        """Row → (giving row, taking row, route) of every skip that it gives or takes."""
        found: dict[int, list[tuple[int, int, int]]] = {}
        for giver, taker, route in self._skipping.T.tolist():
            found.setdefault(giver, []).append((giver, taker, route))
            found.setdefault(taker, []).append((giver, taker, route))
        return {row: tuple(sorted(overs, key=lambda over: over[2])) for row, overs in found.items()}

    @cached_property
    def _skipping(self) -> npt.NDArray[np.int64]:
        """Giving rows, taking rows and routes of all skips, shape (3, hand-overs)."""
        if not self.skips:
            return np.empty((3, 0), np.int64)
        where = index(self.schedule)
        parts = []
        for n, (source, target) in enumerate(self.skips):
            for giver, taker in (
                (where.forward[source], where.forward[target]),
                (where.backward[target], where.backward[source]),
            ):
                real = (giver >= 0) & (taker >= 0)
                parts.append(np.stack([giver[real], taker[real], np.full(real.sum(), n + 1)]))
        return np.concatenate(parts, axis=1).astype(np.int64)

    @cached_property
    def edges(self) -> dict[tuple[int, int], Edge]:
        """Every directed pair of ranks that exchange messages, in a fixed order (by source, then target)."""
        near = np.flatnonzero(self.source >= 0)
        givers = np.concatenate([self.source[near], self._skipping[0]])
        takers = np.concatenate([near, self._skipping[1]])
        routes = np.concatenate([np.zeros(len(near), np.int64), self._skipping[2]])
        crossing = self.rank[takers] != self.rank[givers]
        takers, givers, routes = takers[crossing], givers[crossing], routes[crossing]
        order = np.lexsort((routes, givers, self.rank[takers], self.rank[givers]))
        takers, givers, routes = takers[order], givers[order], routes[order]
        pair = np.stack([self.rank[givers], self.rank[takers]], axis=1)
        cuts = np.flatnonzero((pair[1:] != pair[:-1]).any(axis=1)) + 1
        in_flight = self._in_flight
        found = {}
        for part in np.split(np.arange(len(takers)), cuts) if len(takers) else []:
            key = (int(pair[part[0], 0]), int(pair[part[0], 1]))
            rows = takers[part]
            needed = _slots(self.level[givers[part]].tolist(), (self.level[rows] - 1).tolist())
            slots = min(len(rows), needed + JITTER_SLOTS)
            kinds = len(np.unique(routes[part]))
            capacity = max(kinds * max(in_flight[key[0]], in_flight[key[1]]), slots) if in_flight else slots
            found[key] = Edge(*key, tuple(rows.tolist()), tuple(routes[part].tolist()), slots, capacity)
        return found

    @property
    def _in_flight(self) -> list[int]:
        """Most forwards a rank is ahead of its backwards; empty for a schedule without backwards."""
        kind = self.schedule.kind
        change = (kind == Kind.F).astype(np.int64) - ((kind == Kind.B) | (kind == Kind.I))
        if not (change < 0).any():
            return []
        return [int(np.cumsum(change[self.schedule.rows(r)]).max()) for r in range(self.schedule.ranks)]

    @cached_property
    def message_number(self) -> dict[tuple[int, int], int]:
        """(taker row, route) → its message's place in its edge's order."""
        return {
            key: n
            for edge in self.edges.values()
            for n, key in enumerate(zip(edge.takers, edge.routes, strict=True))
        }

    @cached_property
    def last_gradient_rows(self) -> dict[tuple[int, int], int]:
        """(rank, stage) → the row after which that copy's weight gradients are complete."""
        rows = np.flatnonzero((self.schedule.kind == Kind.B) | (self.schedule.kind == Kind.W))
        keys = self.rank[rows].astype(np.int64) * self.schedule.stages + self.schedule.stage[rows]
        found, last = np.unique(keys[::-1], return_index=True)
        ends = rows[len(rows) - 1 - last]
        return {
            (int(key) // self.schedule.stages, int(key) % self.schedule.stages): int(row)
            for key, row in zip(found, ends, strict=True)
        }

    @cached_property
    def reductions(self) -> dict[int, tuple[int, ...]]:
        """Stage → the ranks over which its gradients are summed: all that hold it; empty without backwards."""
        holders = self.schedule.placement.holders
        return {stage: holders[stage] for stage in sorted({stage for _, stage in self.last_gradient_rows})}

    @cached_property
    def reduction_steps(self) -> dict[int, int]:
        """Stage → the unit-time step after which its gradients are reduced: all copies complete, all holders begun."""
        steps = dict.fromkeys(self.reductions, 0)
        for (_, stage), row in self.last_gradient_rows.items():
            steps[stage] = max(steps[stage], int(self.level[row]))
        for stage, ranks in self.reductions.items():
            begun = [int(self.level[self.schedule.rows(rank).start]) for rank in ranks]
            steps[stage] = max(steps[stage], *begun)
        return steps

    def reductions_after(self, rank: int) -> dict[int, list[int]]:
        """Row → the stages whose REDUCE stands after it, in order, on one rank."""
        rows = self.schedule.rows(rank)
        after: dict[int, list[int]] = {}
        for stage, step in sorted(self.reduction_steps.items(), key=lambda item: (item[1], item[0])):
            if rank in self.reductions[stage]:
                row = rows.start + int(np.searchsorted(self.level[rows], step, side="right")) - 1
                after.setdefault(row, []).append(stage)
        return after

    def instructions(self, rank: int) -> Iterator[Instruction]:
        """One rank's part, in the order it is carried out."""
        schedule = self.schedule
        incoming = {s: e for (s, t), e in self.edges.items() if t == rank}
        posted = {}
        for peer, edge in incoming.items():
            posted[peer] = edge.slots
            for number in range(edge.slots):
                yield Instruction(Action.POST, edge.takers[number], peer, number, edge.routes[number])
        reduced = self.reductions_after(rank)
        rows = schedule.rows(rank)
        row = rows.start
        while row < rows.stop:
            width = 2 if schedule.paired[row] else 1
            group = range(row, row + width)
            for k in group:
                for giver, route in self.givers(k):
                    peer = int(self.rank[giver])
                    if peer == rank:
                        yield Instruction(Action.TAKE, k, route=route)
                        continue
                    yield Instruction(Action.RECV, k, peer, self.message_number[k, route], route)
                    edge, number = incoming[peer], posted[peer]
                    if number < len(edge.takers):
                        yield Instruction(Action.POST, edge.takers[number], peer, number, edge.routes[number])
                        posted[peer] += 1
            yield Instruction(Action.RUN, row, number=width)
            for k in group:
                for taker, route in self.takers(k):
                    peer = int(self.rank[taker])
                    if peer == rank:
                        yield Instruction(Action.HAND, k, route=route)
                    else:
                        yield Instruction(Action.SEND, k, peer, self.message_number[taker, route], route)
                if schedule.kind[k] in (Kind.B, Kind.W):
                    yield Instruction(Action.FREE, k)
                for stage in reduced.get(k, ()):
                    yield Instruction(Action.REDUCE, k, number=stage)
            row += width

    def givers(self, row: int) -> list[tuple[int, int]]:
        """(giving row, route) of everything a row takes."""
        near = [(int(self.source[row]), 0)] if self.source[row] >= 0 else []
        return near + [(g, route) for g, t, route in self.hand_overs.get(row, ()) if t == row]

    def takers(self, row: int) -> list[tuple[int, int]]:
        """(taking row, route) of everything a row gives."""
        near = [(int(self.target[row]), 0)] if self.target[row] >= 0 else []
        return near + [(t, route) for g, t, route in self.hand_overs.get(row, ()) if g == row]

    def describe(self, instruction: Instruction) -> str:
        """One instruction as a line of text, for people."""
        action, row, peer, number, route = instruction
        op: object = f"{self.schedule.op(row)} (skip {route})" if route else self.schedule.op(row)
        match action:
            case Action.POST | Action.RECV:
                return f"{action.value} #{number} for {op} from rank {peer}"
            case Action.SEND:
                return f"send #{number} of {op} to rank {peer}"
            case Action.RUN if number == 2:
                return f"run ({op};{self.schedule.op(row + 1)})OVERLAP_F_B"
            case Action.REDUCE:
                return f"reduce stage {number} after {op}"
        return f"{action.value} {op}"


def _slots(sent: list[int], taken: list[int]) -> int:
    """The most messages that wait at once, the one just sent included; both lists are in sending order.

    A message is sent at the end of one step and taken at the end of another, when all sends of that step are done: one
    taken in the step of a send still waits then.
    """
    waiting: list[int] = []
    most = 1
    for send, take in zip(sent, taken, strict=True):
        while waiting and waiting[0] < send:
            waiting.pop(0)
        most = max(most, len(waiting) + 1)
        insort(waiting, take)
    return most


def lower(schedule: Schedule) -> Program:
    """Resolve every wait of a schedule. `check` says whether it can run; an op that never can has level 0."""
    source, target = links(schedule, index(schedule))
    rank = rank_column(schedule)
    level = levels(schedule.offsets, source, target, schedule.paired, rank)
    return Program(schedule, rank, source, target, level)
