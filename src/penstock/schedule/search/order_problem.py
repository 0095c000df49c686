"""Orders of a pipeline's ops as columns of codes: the form that the search times and changes.

Microbatches are alike. If the n-th run of each op is given to the n-th microbatch, an order stays valid and takes as long.
So an order is a list of (stage, kind) a rank, and the microbatch follows from counting. With two pipes in opposite
directions each pipe counts its own microbatches, and a stage has one *node* on each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.base.errors import ScheduleError
from penstock.schedule.memory import Budget
from penstock.schedule.ops import Kind
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Columns, Schedule, plain_columns

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
BackwardMode = Literal["full", "split"]

FORWARD, GRADIENT, WEIGHT, WHOLE = range(4)
"""Types of a code, ``4 * node + type``: F, the op that yields the gradient (B or I), W, and a B among split backwards."""
ROWS = (0, 1, 2, 1)
"""Row of a type in tables that have one row for each op of a node and microbatch: F, gradient, W."""
# Above any number of bytes, and far enough from the end of int64 to be added to.
UNLIMITED = 2**60


def pipes_of(placement: Placement) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of the stages along each pipe."""
    if not placement.has_copies:
        return (tuple(held[0] for held in placement.holders),)
    if placement.stages != placement.ranks or placement != Placement.two_way(placement.ranks):
        raise ScheduleError("a search needs stages without copies, or two pipes in opposite directions")
    return tuple(range(placement.ranks)), tuple(reversed(range(placement.ranks)))


class CodeTables(NamedTuple):
    """Facts about each code, for the kernels.

    Attributes:
        offsets: int64, places of each rank in the columns of an order, shape (ranks + 1,).
        row: int64, row in tables of ops, 3 · node + (0 F, 1 gradient, 2 W), shape (codes,).
        source: int64, row of the op that yields the input, -1 for none or for an op of the same node, shape (codes,).
        receiver: int64, rank that waits for the output, -1 for none, shape (codes,).
        lag: float64, seconds from the end of the source until its output is there, shape (codes,).
        seconds: float64, seconds on the rank, shape (codes,).
        tail: float64, seconds that follow the op at least, along its microbatch's way, shape (codes,).
        memory: int64, bytes or activations that the rank holds more after the op, shape (codes,).
        limit: int64, bytes or activations that each rank may hold, shape (ranks,).
    """

    offsets: Ints
    row: Ints
    source: Ints
    receiver: Ints
    lag: Floats
    seconds: Floats
    tail: Floats
    memory: Ints
    limit: Ints


@dataclass(frozen=True, eq=False, kw_only=True)
class OrderProblem:
    """Ops to order, with their costs and the memory of the ranks.

    Attributes:
        placement: placement of the stages; at most two pipes in opposite directions (`Placement.two_way`).
        backward: "full" (B) or "split" (I and W).
        seconds: seconds of every op, shape (stages, kinds of op).
        travel: seconds of a message over each boundary between stages of each pipe, shape (pipes, stages - 1); 0 where both
            stages are on one rank.
        sender_blocks, receiver_blocks: whether a message takes the time of its sender or receiver (default False).
        mixed: whether a split backward may be joined to a B where that is quicker (default False).
        in_first: number of microbatches of the first of two pipes; the other has the rest (default: half, rounded up).
    """

    placement: Placement
    microbatches: int
    backward: BackwardMode
    seconds: Floats
    travel: Floats
    budget: Budget | None = None
    sender_blocks: bool = False
    receiver_blocks: bool = False
    mixed: bool = False
    in_first: int | None = None

    @property
    def ranks(self) -> int:
        return self.placement.ranks

    @property
    def stages(self) -> int:
        return self.placement.stages

    @property
    def kinds(self) -> int:
        """Number of ops of a stage and microbatch."""
        return 3 if self.backward == "split" else 2

    @cached_property
    def pipes(self) -> tuple[tuple[int, ...], ...]:
        return pipes_of(self.placement)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Number of microbatches of each pipe."""
        if len(self.pipes) == 1:
            return (self.microbatches,)
        first = (self.microbatches + 1) // 2 if self.in_first is None else self.in_first
        return first, self.microbatches - first

    @cached_property
    def assignments(self) -> list[OrderProblem]:
        """This problem with other numbers of microbatches in two pipes that differ; those that may take least come first."""
        if len(self.pipes) == 1 or np.array_equal(*self.travel):
            return [self]
        half = self.microbatches // 2
        numbers = {self.counts[0], half, self.microbatches - half, self._least_assignment}
        made = [replace(self, in_first=number) for number in sorted(numbers, reverse=True)]
        return sorted(made, key=lambda problem: problem.least)

    @cached_property
    def least_of_all(self) -> float:
        """Makespan that no order can beat, however the microbatches are divided between two pipes."""
        if len(self.pipes) == 1:
            return self.least
        return self._least_in(self._least_assignment)

    @cached_property
    def _least_assignment(self) -> int:
        """The number of microbatches in the first of two pipes with the smallest `least`."""
        # With microbatches in both pipes it is the largest of some linear functions of the number, and so convex.
        low, high = 1, self.microbatches - 1
        while low < high:
            middle = (low + high) // 2
            if self._least_in(middle) <= self._least_in(middle + 1):
                high = middle
            else:
                low = middle + 1
        ends = {0, self.microbatches, *([low] if self.microbatches > 1 else [])}
        return min(sorted(ends, reverse=True), key=self._least_in)

    def _least_in(self, first: int) -> float:
        return replace(self, in_first=first).least

    @cached_property
    def node_ranks(self) -> Ints:
        """Rank of every node, shape (nodes,); pipe q's stage s is node q · stages + s."""
        return np.array([rank for pipe in self.pipes for rank in pipe])

    @cached_property
    def node_counts(self) -> Ints:
        """Number of microbatches of every node, shape (nodes,)."""
        return np.repeat(self.counts, self.stages)

    @cached_property
    def tables(self) -> CodeTables:
        nodes, stages = len(self.node_ranks), self.stages
        stage, pipe = np.arange(nodes) % stages, np.arange(nodes) // stages
        first, last = stage == 0, stage == stages - 1
        one, split = np.arange(nodes), self.backward == "split"
        kinds = [Kind.F, Kind.I if split else Kind.B, Kind.W, Kind.B]
        source, receiver = np.full((nodes, 4), -1), np.full((nodes, 4), -1)
        arrival, departure = np.zeros((nodes, 4)), np.zeros((nodes, 4))
        # Columns of padding, so that stages at the ends may look beyond them.
        travel = np.pad(self.travel.astype(np.float64), ((0, 0), (1, 1)))
        before, after = travel[pipe, stage], travel[pipe, stage + 1]
        neighbour = np.append(self.node_ranks, -1)
        for kind in (FORWARD, GRADIENT, WHOLE):
            at_start, at_end = (first, last) if kind == FORWARD else (last, first)
            step = 1 if kind == FORWARD else -1
            source[:, kind] = np.where(at_start, -1, 3 * (one - step) + ROWS[kind])
            away = np.where(at_end, -1, neighbour[np.where(at_end, -1, one + step)])
            receiver[:, kind] = np.where(away == self.node_ranks, -1, away)
            arrival[:, kind], departure[:, kind] = (before, after) if kind == FORWARD else (after, before)
        # A message that blocks a rank makes the op longer there; the receiver counts on from when the message was sent.
        seconds = self.seconds[stage][:, kinds].astype(np.float64)
        seconds = seconds + arrival * self.receiver_blocks + departure * self.sender_blocks
        lag = arrival * (1.0 - self.sender_blocks - self.receiver_blocks)
        change = self._memory(stage)
        size = np.bincount(self.node_ranks, self.node_counts * self.kinds, self.ranks).astype(np.int64)
        offsets, row = np.concatenate([[0], np.cumsum(size)]), (3 * one[:, None] + np.array(ROWS)).ravel()
        links = (source.ravel(), receiver.ravel(), lag.ravel())
        ends = (self._tails(seconds, lag).ravel(), change.ravel())
        return CodeTables(offsets, row, *links, seconds.ravel(), *ends, self.limits)

    @cached_property
    def least(self) -> float:
        """Makespan that no order can beat: one microbatch alone, or a rank's work with what comes before and after."""
        tables = self.tables
        seconds, lag, tail = (table.reshape(-1, 4) for table in (tables.seconds, tables.lag, tables.tail))
        way = np.cumsum((seconds + lag)[:, FORWARD].reshape(-1, self.stages), axis=1).ravel()
        head = way - seconds[:, FORWARD]
        own = seconds[:, : self.kinds].sum(axis=1)
        if self.mixed:
            own = np.minimum(own, seconds[:, FORWARD] + seconds[:, WHOLE])
        if self.mixed:
            return self._least_of(own, head, np.zeros(len(own)))
        # What is left after all gradients of a rank counts, too.
        through = self._least_of(seconds[:, [FORWARD, GRADIENT]].sum(axis=1), head, tail[:, GRADIENT])
        whole = self._least_of(
            own, head, tail[:, GRADIENT] if self.backward == "full" else np.zeros(len(own))
        )
        return max(float((way + tail[:, FORWARD])[self.node_counts > 0].max()), through, whole)

    def _least_of(self, seconds: Floats, head: Floats, after: Floats) -> float:
        """Return the largest time of a rank: before its first op, in the ops of its nodes, and after its last."""
        work = np.bincount(self.node_ranks, seconds * self.node_counts, self.ranks)
        used = [held[self.node_counts[held] > 0] for held in self.nodes_of]
        ends = [head[held].min() + after[held].min() for held in used]
        return float((work + np.array(ends)).max())

    @cached_property
    def nodes_of(self) -> list[Ints]:
        """Nodes of each rank."""
        return [np.flatnonzero(self.node_ranks == rank) for rank in range(self.ranks)]

    @cached_property
    def limits(self) -> Ints:
        """Bytes or activations that each rank may hold, shape (ranks,)."""
        if self.budget is None:
            return np.full(self.ranks, UNLIMITED)
        return np.ascontiguousarray(self.budget.limits(self.ranks))

    def _tails(self, seconds: Floats, lag: Floats) -> Floats:
        """Return the least time that follows the ops of every node and type."""
        tail = np.zeros(seconds.shape)
        late = WEIGHT if self.backward == "split" else WHOLE
        # With mixed backwards a B may do the work of both halves in less time.
        weight = seconds[:, late] if late == WEIGHT and not self.mixed else np.zeros(len(seconds))
        inputs = seconds[:, [GRADIENT, WHOLE]].min(axis=1) if self.mixed else seconds[:, GRADIENT]
        for q in range(len(self.pipes)):
            for s in range(self.stages):
                node = q * self.stages + s
                before = lag[node - 1, GRADIENT] + inputs[node - 1] + tail[node - 1, GRADIENT] if s else 0.0
                tail[node, WHOLE] = before
                tail[node, GRADIENT] = max(weight[node], before)
            for s in reversed(range(self.stages)):
                node = q * self.stages + s
                if s == self.stages - 1:
                    tail[node, FORWARD] = inputs[node] + tail[node, GRADIENT]
                else:
                    after = node + 1
                    tail[node, FORWARD] = lag[after, FORWARD] + seconds[after, FORWARD] + tail[after, FORWARD]
        if self.mixed:
            tail[:, FORWARD] -= (tail[:, GRADIENT] - tail[:, WHOLE]).max()
        return np.maximum(tail, 0.0)

    def _memory(self, stage: Ints) -> Ints:
        """Return the change of memory by node and type."""
        budget = self.budget or Budget(UNLIMITED)
        saved, waiting = (
            np.broadcast_to(np.asarray(size, np.int64), (self.stages,))[stage]
            for size in (budget.saved, budget.waiting)
        )
        if self.backward == "full":
            return np.stack([saved, -saved, 0 * saved, -saved], axis=1)
        early = saved if budget.freed_at == "B" else 0 * saved
        return np.stack([saved, waiting - early, early - saved - waiting, -saved], axis=1)

    def require_possible(self) -> None:
        """Raise `ScheduleError` if no order can meet the memory limit; the message names the least."""
        if self.budget is None:
            return
        least = self.budget.least(self.schedule(self.one_by_one(), "one by one"))
        if (least > self.limits).any():
            tight = int(np.argmax(least - self.limits))
            raise ScheduleError(
                f"no order can meet a memory limit of {self.limits[tight]}: one microbatch alone takes {least[tight]} on "
                f"rank {tight}, so {least.max()} is the least; raise the limit"
            )

    def allows(self, schedule: Schedule) -> bool:
        """Return whether a schedule may be the answer: it has the problem's kind of backward, and fits the memory."""
        split = bool(((schedule.kind == Kind.I) | (schedule.kind == Kind.W)).any())
        if split and self.backward == "full":
            return False
        return self.budget is None or bool((self.budget.peak(schedule) <= self.limits).all())

    def one_by_one(self) -> Ints:
        """Return the order that runs one microbatch after the other."""
        way: list[list[int]] = [[] for _ in range(self.ranks)]
        alone: list[list[list[int]]] = []
        for q, pipe in enumerate(self.pipes):
            lists: list[list[int]] = [[] for _ in range(self.ranks)]
            for s, rank in enumerate(pipe):
                lists[rank].append(4 * (q * self.stages + s) + FORWARD)
            for s in reversed(range(self.stages)):
                code = 4 * (q * self.stages + s)
                lists[pipe[s]] += [code + GRADIENT, code + WEIGHT][: self.kinds - 1]
            alone.append(lists)
        for n in range(max(self.counts)):
            for q, count in enumerate(self.counts):
                for rank in range(self.ranks):
                    way[rank] += alone[q][rank] if n < count else []
        return np.array([code for codes in way for code in codes], np.int64)

    def codes(self, schedule: Schedule) -> Ints:
        """Return the order of a schedule with this placement, whatever its kind of backward.

        A fused pair counts as its two ops. Halves of a backward are joined or taken apart as the problem has them; a B among
        split backwards stays one op if the problem is `mixed`.
        """
        ranks = np.repeat(np.arange(schedule.ranks), np.diff(schedule.offsets))
        kind, stage = schedule.kind, schedule.stage.astype(np.int64)
        node = stage if len(self.pipes) == 1 else np.where(stage == ranks, stage, stage + self.stages)
        column = np.array([FORWARD, WHOLE if self.mixed else GRADIENT, GRADIENT, WEIGHT, -1])
        codes: Ints = 4 * node + column[kind]
        if self.backward == "full":
            codes = codes[kind != Kind.W]
        elif not self.mixed and len(full := np.flatnonzero(kind == Kind.B)):
            codes = np.insert(codes, full + 1, 4 * node[full] + WEIGHT)
        return codes

    def schedule(self, codes: Ints, name: str, options: dict[str, object] | None = None) -> Schedule:
        """Return an order as a schedule; pipe 1's microbatches are numbered after pipe 0's microbatches."""
        return Schedule.from_columns(
            name, self.placement, self.microbatches, self._columns(codes), dict(options or {})
        )

    def _columns(self, codes: Ints) -> Iterator[Columns]:
        first = np.concatenate([[0], np.cumsum(self.counts)[:-1]])
        kinds = np.array([Kind.F, Kind.I if self.backward == "split" else Kind.B, Kind.W, Kind.B], np.int8)
        for own in self.lists(codes):
            node, kind = np.divmod(own, 4)
            number = numbers(own)
            pipe = node // self.stages
            yield plain_columns(node % self.stages, kinds[kind], number + first[pipe])

    def lists(self, codes: Ints) -> list[Ints]:
        """Return an order as one list per rank."""
        offsets = self.tables_of(codes).offsets
        return [codes[a:b] for a, b in pairwise(offsets)]

    def tables_of(self, codes: Ints) -> CodeTables:
        """Return the tables with the offsets of an order: a B among split backwards is one op instead of two."""
        if len(codes) == self.tables.offsets[-1]:
            return self.tables
        size = np.bincount(self.node_ranks[codes // 4], minlength=self.ranks)
        return self.tables._replace(offsets=np.concatenate([[0], np.cumsum(size)]))

    def shortened(self, microbatches: int) -> OrderProblem:
        """Return the same problem with fewer microbatches, in two pipes in proportion."""
        first = None if self.in_first is None else round(self.in_first * microbatches / self.microbatches)
        return replace(self, microbatches=microbatches, in_first=first)


def numbers(codes: Ints) -> Ints:
    """Return the microbatch of each op of a rank's list, counted within its pipe: how many of its row came before."""
    rows = 3 * (codes // 4) + np.array(ROWS)[codes % 4]
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    count = np.empty(len(codes), np.int64)
    count[order] = np.arange(len(codes)) - np.repeat(starts, np.diff(np.append(starts, len(codes))))
    whole = np.flatnonzero(codes % 4 == WHOLE)
    if len(whole):
        # A W finishes the oldest I without one: a B before it has taken a microbatch, too.
        weights = np.flatnonzero(codes % 4 == WEIGHT)
        for node in np.unique(codes[whole] // 4):
            own = weights[codes[weights] // 4 == node]
            count[own] = count[codes == 4 * node + GRADIENT][: len(own)]
    return count


def joined(problem: OrderProblem, codes: Ints) -> Ints:
    """Return an order with a B in place of every I that its W follows at once."""
    changed = codes.copy()
    first = np.flatnonzero((codes[:-1] % 4 == GRADIENT) & (codes[1:] == codes[:-1] - GRADIENT + WEIGHT))
    number = np.concatenate([numbers(own) for own in problem.lists(codes)])
    first = first[number[first] == number[first + 1]]
    changed[first] += WHOLE - GRADIENT
    return np.delete(changed, first + 1)
