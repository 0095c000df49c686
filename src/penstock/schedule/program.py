"""An executable schedule: every message, receive slot, release and reduction of each rank is explicit.

The Program keeps the schedule's columns and adds the producer and the consumer of every message. `Program.instructions`
lists the instructions of one rank, which the executor compiles:

    POST   post a receive for a message into one of the edge's slots
    RECV   wait for that message, receive it, and free its slot
    TAKE   receive the output of another stage of the same rank
    RUN    compute one op, or the two of a fused pair
    SEND   send the output to another rank, without waiting for it
    HAND   pass the output to another stage of the same rank
    FREE   drop the activations that the stage saved for this microbatch
    REDUCE the stage's gradients are complete: reduce them over its copies and replicas

and, if replicas shard weights (`penstock.schedule.residency`, which then also says where REDUCE comes):

    UNSHARD begin to gather the stage's weights from the replicas
    RESHARD drop all of the stage's weights but this replica's part

The executor compiles neither POST nor FREE. The transport between processes posts receives itself, as many as the edge
has slots. A stage drops the graph of a microbatch as it runs B or I, and what I left for W in W. They are listed because
people read the program, and because the tests replay it with sends that block until the receive is posted.

A stage with copies on several ranks is reduced once on each of them, also on a rank that saw none of its microbatches.
Its REDUCE is placed after the unit-time step in which the last copy is complete. Stages that are complete together are
reduced in ascending order. So all holders reduce in the same order, and may even block until the other holders have come.

A value may also skip stages: it goes straight from stage i to stage j > i + 1, and its gradient straight back. Each
skip has a route, numbered from 1; route 0 is between neighbouring stages. Skips add no waits, because the ops that they
connect depend on each other already.

There is one directed edge each way between two ranks. Messages arrive in the order in which the sender produces them, and
the receiver has `slots` receives posted ahead. With that many, no sender blocks in the unit-time execution. This proves
that the program cannot deadlock even if every send blocks until its receive is posted. One more receive is posted to
absorb jitter.

`levels` makes the proof. Every rank runs its list strictly in order, and an op runs once the producer of its input has run.
The sweep advances every rank as far as possible until nothing moves. If every op ran, the levels of the ops (the step in
which each runs when every op takes one step) are an order that respects all waits.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.schedule.index import index, links, rank_column
from penstock.schedule.jit import choose
from penstock.schedule.ops import Kind
from penstock.schedule.residency import Residency
from penstock.schedule.schedule import BoolColumn, IntColumn, Schedule

JITTER_SLOTS = 1


class Action(Enum):
    """Kind of an instruction; the module's docstring explains each."""

    POST = "post"
    RECV = "recv"
    TAKE = "take"
    RUN = "run"
    SEND = "send"
    HAND = "hand"
    FREE = "free"
    REDUCE = "reduce"
    UNSHARD = "unshard"
    RESHARD = "reshard"


class Instruction(NamedTuple):
    """One instruction of a rank.

    Attributes:
        action: kind of the instruction.
        row: schedule row of the op that runs, sends or receives.
        peer: the other rank of POST, RECV and SEND; -1 otherwise.
        number: place of the message in its edge's order for POST, RECV and SEND; number of ops (1, or 2 for a pair) for
            RUN; the stage for REDUCE, UNSHARD and RESHARD; 0 otherwise.
        route: route of POST, RECV, TAKE, SEND and HAND: 0 between neighbouring stages, n for the n-th skip.
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
        source, target: the sending and the receiving rank.
        consumers: rows on the target that receive the messages, in the order in which they are sent.
        routes: route of each message.
        slots: number of receives that the target keeps posted.
        capacity: largest number of messages that can ever wait, whatever the timing. Each is received no later than the
            backward of its microbatch, so this is the number of microbatches that one of the two ranks has in flight.
            Without backwards it equals `slots`.
    """

    source: int
    target: int
    consumers: tuple[int, ...]
    routes: tuple[int, ...]
    slots: int
    capacity: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Program:
    """A Schedule with its waits resolved.

    Attributes:
        schedule: the ops.
        rank: int32 (ops,), the rank of every row.
        source: int32 (ops,), the row that produces the input of each row, or -1.
        target: int32 (ops,), the row that consumes the output of each row, or -1.
        level: int32 (ops,), the unit-time step of every row: an order that respects every wait.
        skips: (source stage, target stage) of the values that skip stages, in a fixed order.
        residency: when weights and gradients come and go, if replicas shard them; otherwise None.
    """

    schedule: Schedule
    rank: IntColumn
    source: IntColumn
    target: IntColumn
    level: IntColumn
    skips: tuple[tuple[int, int], ...] = ()
    residency: Residency | None = None

    def tag(self, row: int, route: int = 0) -> int:
        """Return a number below `tags` that is unique to the value a row receives through a route."""
        return route * len(self.rank) + row

    @property
    def tags(self) -> int:
        """Upper bound of `tag`."""
        return (1 + len(self.skips)) * len(self.rank)

    @cached_property
    def _skips_of(self) -> dict[int, list[tuple[int, int, int]]]:
        """Row → (producer row, consumer row, route) of every skip that it sends or receives, by route."""
        skips: dict[int, list[tuple[int, int, int]]] = {}
        for skip in sorted(map(tuple, self._skipping.T.tolist()), key=lambda skip: skip[2]):
            for row in skip[:2]:
                skips.setdefault(row, []).append(skip)
        return skips

    @cached_property
    def _skipping(self) -> npt.NDArray[np.int64]:
        """Producer rows, consumer rows and routes of all values that skip stages, shape (3, values)."""
        if not self.skips:
            return np.empty((3, 0), np.int64)
        where = index(self.schedule)
        columns = []
        for n, (source, target) in enumerate(self.skips):
            for producer, consumer in (
                (where.forward[source], where.forward[target]),
                (where.backward[target], where.backward[source]),
            ):
                exists = (producer >= 0) & (consumer >= 0)
                routes = np.full(exists.sum(), n + 1)
                columns.append(np.stack([producer[exists], consumer[exists], routes]))
        return np.concatenate(columns, axis=1).astype(np.int64)

    @cached_property
    def edges(self) -> dict[tuple[int, int], Edge]:
        """(source, target) → edge of every two ranks that exchange messages, sorted by source, then target."""
        near = np.flatnonzero(self.source >= 0)
        producers = np.concatenate([self.source[near], self._skipping[0]])
        consumers = np.concatenate([near, self._skipping[1]])
        routes = np.concatenate([np.zeros(len(near), np.int64), self._skipping[2]])
        crossing = self.rank[consumers] != self.rank[producers]
        consumers, producers, routes = consumers[crossing], producers[crossing], routes[crossing]
        # The last key of lexsort counts first: edges by source and target, their messages by producer, then by route.
        order = np.lexsort((routes, producers, self.rank[consumers], self.rank[producers]))
        consumers, producers, routes = consumers[order], producers[order], routes[order]
        pair = np.stack([self.rank[producers], self.rank[consumers]], axis=1)
        cuts = np.flatnonzero((pair[1:] != pair[:-1]).any(axis=1)) + 1
        in_flight = self._in_flight
        edges = {}
        for messages in np.split(np.arange(len(consumers)), cuts) if len(consumers) else []:
            source, target = map(int, pair[messages[0]])
            rows, ways = consumers[messages], routes[messages]
            # A message is received before its op's step, at the end of the step before.
            needed = _slots(self.level[producers[messages]].tolist(), (self.level[rows] - 1).tolist())
            slots = min(len(rows), needed + JITTER_SLOTS)
            capacity = slots
            if in_flight:
                capacity = max(len(np.unique(ways)) * max(in_flight[source], in_flight[target]), slots)
            edge = Edge(source, target, tuple(rows.tolist()), tuple(ways.tolist()), slots, capacity)
            edges[source, target] = edge
        return edges

    @property
    def _in_flight(self) -> list[int]:
        """Largest lead of forwards over backwards on each rank; empty for a schedule without backwards."""
        kind = self.schedule.kind
        change = (kind == Kind.F).astype(np.int64) - ((kind == Kind.B) | (kind == Kind.I))
        if not (change < 0).any():
            return []
        return [int(np.cumsum(change[self.schedule.rows(r)]).max()) for r in range(self.schedule.ranks)]

    @cached_property
    def message_number(self) -> dict[tuple[int, int], int]:
        """(consumer row, route) → place of the message in its edge's order."""
        return {
            key: n
            for edge in self.edges.values()
            for n, key in enumerate(zip(edge.consumers, edge.routes, strict=True))
        }

    @cached_property
    def last_gradient_rows(self) -> dict[tuple[int, int], int]:
        """(rank, stage) → the row after which that copy's weight gradients are complete."""
        rows = np.flatnonzero((self.schedule.kind == Kind.B) | (self.schedule.kind == Kind.W))
        keys = self.rank[rows].astype(np.int64) * self.schedule.stages + self.schedule.stage[rows]
        # np.unique finds first places; in the reversed column they are the last.
        unique, last = np.unique(keys[::-1], return_index=True)
        ends = rows[len(rows) - 1 - last]
        return {
            divmod(key, self.schedule.stages): row
            for key, row in zip(unique.tolist(), ends.tolist(), strict=True)
        }

    @cached_property
    def reductions(self) -> dict[int, tuple[int, ...]]:
        """Stage → the ranks that hold it and sum its gradients; empty without backwards."""
        holders = self.schedule.placement.holders
        return {stage: holders[stage] for stage in sorted({stage for _, stage in self.last_gradient_rows})}

    @cached_property
    def reduction_steps(self) -> dict[int, int]:
        """Unit-time step after which a stage's gradients are reduced (all copies complete, all holders begun), by stage."""
        steps = dict.fromkeys(self.reductions, 0)
        for (_, stage), row in self.last_gradient_rows.items():
            steps[stage] = max(steps[stage], int(self.level[row]))
        for stage, ranks in self.reductions.items():
            started = [int(self.level[self.schedule.rows(rank).start]) for rank in ranks]
            steps[stage] = max(steps[stage], *started)
        return steps

    def reductions_after(self, rank: int) -> dict[int, list[int]]:
        """Row of a rank → the stages whose REDUCE is placed after it, in order."""
        if self.residency is not None:
            return self.residency.reduces(rank)
        rows = self.schedule.rows(rank)
        after: dict[int, list[int]] = {}
        for stage, step in sorted(self.reduction_steps.items(), key=lambda item: (item[1], item[0])):
            if rank in self.reductions[stage]:
                row = rows.start + int(np.searchsorted(self.level[rows], step, side="right")) - 1
                after.setdefault(row, []).append(stage)
        return after

    def instructions(self, rank: int) -> Iterator[Instruction]:
        """Yield the instructions of one rank in the order of execution."""
        schedule = self.schedule
        incoming = {s: e for (s, t), e in self.edges.items() if t == rank}
        posted = {}
        for peer, edge in incoming.items():
            posted[peer] = edge.slots
            for number in range(edge.slots):
                yield Instruction(Action.POST, edge.consumers[number], peer, number, edge.routes[number])
        reduced = self.reductions_after(rank)
        gathered = self.residency.unshards(rank) if self.residency is not None else {}
        dropped = self.residency.reshards(rank) if self.residency is not None else {}
        rows = schedule.rows(rank)
        row = rows.start
        while row < rows.stop:
            width = 2 if schedule.paired[row] else 1
            group = range(row, row + width)
            yield from (Instruction(Action.UNSHARD, row, number=stage) for stage in gathered.get(row, ()))
            for k in group:
                for producer, route in self.producers(k):
                    peer = int(self.rank[producer])
                    if peer == rank:
                        yield Instruction(Action.TAKE, k, route=route)
                        continue
                    yield Instruction(Action.RECV, k, peer, self.message_number[k, route], route)
                    edge, number = incoming[peer], posted[peer]
                    if number < len(edge.consumers):
                        yield Instruction(
                            Action.POST, edge.consumers[number], peer, number, edge.routes[number]
                        )
                        posted[peer] += 1
            yield Instruction(Action.RUN, row, number=width)
            for k in group:
                for consumer, route in self.consumers(k):
                    peer = int(self.rank[consumer])
                    if peer == rank:
                        yield Instruction(Action.HAND, k, route=route)
                    else:
                        yield Instruction(Action.SEND, k, peer, self.message_number[consumer, route], route)
                if schedule.kind[k] in (Kind.B, Kind.W):
                    yield Instruction(Action.FREE, k)
                for stage in dropped.get(k, ()):
                    yield Instruction(Action.RESHARD, k, number=stage)
                for stage in reduced.get(k, ()):
                    yield Instruction(Action.REDUCE, k, number=stage)
            row += width

    def producers(self, row: int) -> list[tuple[int, int]]:
        """Return (producer row, route) of every value that a row receives."""
        near = [(int(self.source[row]), 0)] if self.source[row] >= 0 else []
        return near + [(p, route) for p, c, route in self._skips_of.get(row, []) if c == row]

    def consumers(self, row: int) -> list[tuple[int, int]]:
        """Return (consumer row, route) of every value that a row sends."""
        near = [(int(self.target[row]), 0)] if self.target[row] >= 0 else []
        return near + [(c, route) for p, c, route in self._skips_of.get(row, []) if p == row]

    def describe(self, instruction: Instruction) -> str:
        """Return an instruction as a line of text."""
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
            case Action.UNSHARD:
                return f"unshard stage {number} before {op}"
            case Action.RESHARD:
                return f"reshard stage {number} after {op}"
        return f"{action.value} {op}"


def _slots(sent: list[int], received: list[int]) -> int:
    """Return the largest number of messages that wait at once, the one just sent included.

    `sent` and `received` are steps, in sending order. All sends of a step come before its receives, so a message
    received in the step of a send still waits then.
    """
    waiting: list[int] = []
    slots = 1
    for send, receive in zip(sent, received, strict=True):
        while waiting and waiting[0] < send:
            waiting.pop(0)
        slots = max(slots, len(waiting) + 1)
        insort(waiting, receive)
    return slots


def lower(schedule: Schedule) -> Program:
    """Resolve every wait of a schedule; ops that can never run get level 0, which `check` rejects."""
    source, target = links(schedule, index(schedule))
    rank = rank_column(schedule)
    level = levels(schedule.offsets, source, target, schedule.paired, rank)
    return Program(schedule=schedule, rank=rank, source=source, target=target, level=level)


def levels(
    offsets: npt.NDArray[np.int64],
    source: IntColumn,
    target: IntColumn,
    paired: BoolColumn,
    rank: IntColumn,
) -> IntColumn:
    """Return the unit-time step in which every op runs, from 1; 0 for ops that can never run."""
    arrays: tuple[Any, ...] = (offsets, source, target, paired, rank)
    kernel = choose(_levels, len(source))
    if kernel is _levels:
        level = [0] * len(source)
        kernel(*(array.tolist() for array in arrays), level)
        return np.array(level, np.int32)
    column = np.zeros(len(source), np.int32)
    kernel(*arrays, column)
    return column


def _levels(offsets: Any, source: Any, target: Any, paired: Any, rank: Any, level: Any) -> None:
    ranks = len(offsets) - 1
    position = [offsets[r] for r in range(ranks)]
    clock = [0 for r in range(ranks)]
    todo = [ranks - 1 - r for r in range(ranks)]
    while len(todo) > 0:
        r = todo.pop()
        end = offsets[r + 1]
        row = position[r]
        while row < end:
            width = 2 if paired[row] else 1
            step = clock[r]
            ready = True
            for k in range(row, row + width):
                producer = source[k]
                if producer >= 0:
                    if level[producer] == 0:
                        ready = False
                    else:
                        step = max(step, level[producer])
            if not ready:
                break
            clock[r] = step + 1
            for k in range(row, row + width):
                level[k] = step + 1
                if target[k] >= 0:
                    receiver = rank[target[k]]
                    # Wake the receiver only if it waits at the consumer (or at the consumer's pair).
                    gap = target[k] - position[receiver]
                    if receiver != r and (gap == 0 or gap == 1):
                        todo.append(receiver)
            row += width
            position[r] = row
