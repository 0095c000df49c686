"""Changes of a step that can be made with the same ranks and microbatches, each simulated with the step's own costs.

Ranks that share cores, caches or memory bandwidth slow each other down. A schedule that lets ranks wait less then makes
every op longer, and saves less time than a simulation with the present costs promises. A change therefore meets the
conditions of the machine as the trace shows them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from penstock.base.errors import PenstockError, ScheduleError, SplitError
from penstock.schedule.check import check
from penstock.schedule.families import FAMILIES, CatalogueFamily
from penstock.schedule.memory import peak
from penstock.schedule.ops import Kind
from penstock.schedule.program import Program
from penstock.schedule.schedule import Schedule
from penstock.show.planned import PlannedStep
from penstock.show.units import is_measured
from penstock.simulate.costs import Communication, Costs, Link, Table
from penstock.simulate.simulator import simulate
from penstock.stage.partition import even
from penstock.trace.beside import time_beside
from penstock.trace.bubbles import bubble_fraction, bubbles, makespan
from penstock.trace.events import Activity, Trace

_OPS = tuple(Activity(kind) for kind in Kind)
_LEAST_OPS = 12
"""Fewest ops that say anything."""
_ROUNDS = 6
"""Simulations until the length of ops and the number of ranks that compute at the same time agree."""


@dataclass(frozen=True)
class Contention:
    """Length of ops as a function of the other ranks that compute meanwhile: 1 + slope × (others - usual)."""

    # Growth of an op's length with each rank that computes meanwhile, relative to its usual length; at
    # least 0.
    slope: float = 0.0
    usual: float = 0.0  # mean number of other ranks that computed during an op in the trace

    def factor(self, others: float) -> float:
        """Return the length of ops during which `others` ranks compute, over their length in the trace."""
        # Far from the usual company, the line must not fall to 0.
        return max(0.1, 1.0 + self.slope * (others - self.usual))


def contention_of(trace: Trace) -> Contention:
    """Return the slowdown in a measured trace: the line through lengths of ops over the ranks that computed meanwhile.

    Lengths are relative to the median of the same stage and kind of op. A trace with few ops, or ops that all had the same
    company, shows none.
    """
    work = trace.only(_OPS)
    if trace.info.get("source") != "measured" or trace.ranks < 2 or len(work) < _LEAST_OPS:
        return Contention()
    length = (work.end - work.start).astype(np.float64)
    others = others_beside(work)
    relative = np.ones(len(work))
    for stage, kind in np.unique(np.stack([work.stage, work.kind]), axis=1).T:
        same = (work.stage == stage) & (work.kind == kind)
        relative[same] = length[same] / max(float(np.median(length[same])), 1e-12)
    # Single ops that the system interrupted would turn the line.
    sound = (relative > 0.5) & (relative < 2.0) & (length > 0)
    usual = float(np.average(others, weights=np.maximum(length, 1e-12)))
    spread = others[sound] - others[sound].mean() if sound.any() else np.zeros(0)
    if sound.sum() < _LEAST_OPS or float(spread @ spread) < 1e-3 * sound.sum():
        return Contention(0.0, usual)
    slope = float(spread @ relative[sound]) / float(spread @ spread)
    return Contention(max(0.0, slope), usual)


def others_beside(work: Trace) -> npt.NDArray[np.float64]:
    """Return the mean number of other ranks that compute during each op, shape (ops,)."""
    length = (work.end - work.start).astype(np.float64)
    beside = time_beside(work, np.arange(len(work)), np.ones(len(work)))
    return np.where(length > 0, beside / np.maximum(length, 1e-12), 0.0)


@dataclass(frozen=True)
class Conditions:
    """Conditions of the machine, the same for every simulated change."""

    contention: Contention
    overhead: float  # time between two ops of a rank
    measured: bool  # the step ran

    @classmethod
    def of(cls, trace: Trace) -> Self:
        """Return the conditions that a trace shows."""
        return cls(contention_of(trace), _overhead(trace), is_measured(trace))

    def simulate(self, program: Program, costs: Costs) -> Trace:
        """Simulate a program with ops as long as the ranks that compute meanwhile make them."""
        costs = _scaled(costs, 1.0, self.overhead)
        trace = simulate(program, costs)
        if not self.contention.slope:
            return trace
        factor = 1.0
        for _ in range(_ROUNDS):
            company = others_beside(trace)
            length = trace.end - trace.start
            others = float(np.average(company, weights=length)) if length.any() else 0.0
            # Half of the change, because full changes may swing between two answers.
            factor = (factor + self.contention.factor(others)) / 2
            trace = simulate(program, _scaled(costs, factor, 0.0))
        return trace


def _scaled(costs: Costs, factor: float, extra: float) -> Costs:
    if factor == 1.0 and not extra:
        return costs
    pair = None if costs.pair is None else costs.pair * factor + 2 * extra
    return replace(costs, seconds=costs.seconds * factor + extra, pair=pair)


def _overhead(trace: Trace) -> float:
    """Return the mean time that a rank of a measured trace spends between two ops although the second could begin."""
    if not is_measured(trace):
        return 0.0
    idle = bubbles(trace).idle.get("overhead")
    ops = int((trace.kind <= max(Kind)).sum())
    return float(idle.sum()) / ops if idle is not None and ops else 0.0


@dataclass(frozen=True)
class StageParts:
    """Parts of the stages that can move to another stage."""

    counts: tuple[int, ...]  # number of parts of every stage
    # The parts are the blocks that a split counts, and the first stage also has the embedding, the last one
    # the head; False: they are all layers, because the trace does not tell which are blocks.
    blocks: bool

    @classmethod
    def of(cls, trace: Trace, stages: int) -> Self | None:
        """Return the parts of a trace's stages: from ``info["blocks"]``, or from ``info["split"]``; None without either."""
        blocks = _list(trace.info.get("blocks"), stages)
        if blocks and all(isinstance(count, int) and count >= 1 for count in blocks):
            return cls(tuple(blocks), True)
        split = _list(trace.info.get("split"), stages)
        if split and all(isinstance(layers, list | tuple) and layers for layers in split):
            return cls(tuple(len(layers) for layers in split), False)
        return None

    def moved(self, source: int, target: int) -> Self:
        """Return the parts after one of stage `source` has moved to stage `target`."""
        counts = list(self.counts)
        counts[source] -= 1
        counts[target] += 1
        return type(self)(tuple(counts), self.blocks)

    def evenly(self, stages: int) -> Self | None:
        """Return an even split over so many stages; None if there are too few parts."""
        try:
            ranges = even(sum(self.counts), stages)
        except SplitError:
            return None
        return type(self)(tuple(stop - start for start, stop in ranges), self.blocks)

    def recost(self, table: Table, other: Self) -> Table:
        """Return a table, one row a stage, of another split of the same parts.

        Every part of a stage counts the same. Of the first and the last stage, what exceeds the blocks of other stages is
        the embedding's or the head's, and stays there.
        """
        each = table / np.array(self.counts, np.float64)[:, None]
        ends = np.zeros((2, table.shape[1]))
        if self.blocks:
            inner = np.median(each[1:-1], axis=0) if len(each) > 2 else each.min(axis=0)
            for n, stage in enumerate((0, len(each) - 1)):
                usual = np.minimum(each[stage], inner)
                ends[n] += (each[stage] - usual) * self.counts[stage]
                each[stage] = usual
        parts = np.repeat(each, self.counts, axis=0)
        edges = np.cumsum([0, *other.counts])
        stages = np.stack([parts[a:b].sum(axis=0) for a, b in pairwise(edges)])
        stages[0] += ends[0]
        stages[-1] += ends[1]
        return stages

    @property
    def setting(self) -> list[int] | list[tuple[int, int]]:
        """Value of ``Pipeline(split=...)``: counts of blocks, or ranges of layers."""
        if self.blocks:
            return list(self.counts)
        return [(int(a), int(b)) for a, b in pairwise(np.cumsum([0, *self.counts]))]


def _list(value: object, stages: int) -> list[Any]:
    """Return a list of one entry per stage; empty if the value from a file is none."""
    return list(value) if isinstance(value, list | tuple) and len(value) == stages else []


def saved_sizes(trace: Trace, stages: int) -> Table:
    """Return what a forward of every stage keeps for its backward, float64, shape (stages,): the median in the trace.

    All stages are alike (1) if the trace does not tell, or nothing is kept.
    """
    sizes = np.zeros(stages)
    if trace.held is not None:
        change = np.zeros(len(trace))
        for rows in trace.rank_slices():
            change[rows] = np.diff(trace.held[rows], prepend=np.int64(0))
        for stage in range(stages):
            forward = change[(trace.kind == Kind.F) & (trace.stage == stage)]
            sizes[stage] = max(0.0, float(np.median(forward))) if len(forward) else 0.0
    return sizes if sizes.any() else np.ones(stages)


def recut(seconds: Table, stages: int) -> Table:
    """Return the costs of another number of stages of the same model, shape (stages, kinds).

    Every new stage is the same share of the model, counted in old stages, and costs the sum of the old stages' parts.
    """
    edges = np.linspace(0, len(seconds), stages + 1)
    total = np.vstack([np.zeros(seconds.shape[1]), np.cumsum(seconds, axis=0)])
    at_edges = np.stack([np.interp(edges, np.arange(len(total)), column) for column in total.T], axis=1)
    return np.maximum(np.diff(at_edges, axis=0), 0)


SPLIT_COST = 1.09
"""Time of both halves of a split backward over the full one, and of a forward that prepares for one over another.

Measured with two ranks busy, where a step itself has no split backward to measure (`bench.advice`).
"""
SLOW = 1.05
"""A stage is slow if it takes so many times the median."""
# `peak` counts whole numbers: sizes in activations are multiplied by this before they are rounded.
_FINE = 2**20
# Left out are families with two copies of every stage, whose weights need more memory, and the search that takes seconds.
_TRIED = tuple(
    name for name, family in FAMILIES.items() if "two copies" not in family.needs and not family.searches
)


@dataclass(frozen=True)
class ChangeLines:
    """The lines that make a change."""

    train: str = ""  # options of penstock train; empty if it has none for the change
    pipeline: str = ""  # keywords of `Pipeline`; empty for the step as it is

    def of(self, api: object) -> list[str]:
        """Return the line to copy for the API that a run used (`API`), or for an unknown one a line for each of them."""
        ways = {}
        if self.train:
            ways["train"] = f"penstock train {self.train}"
        if self.pipeline:
            ways["Pipeline"] = f"Pipeline(..., {self.pipeline})"
        if api == "Trainer":
            keys = re.sub(r"(\w+)=", r'"\1": ', self.pipeline)
            return [f"pipeline={{..., {keys}}}"] if keys else []
        return [line for way, line in ways.items() if way == api or api not in ("train", "Pipeline")]


@dataclass(frozen=True, kw_only=True)
class Change:
    """A simulated change of a step."""

    words: str  # the change, as in "with zb-v in the same memory"
    schedule: str
    virtual_stages: float
    # The most that a rank holds for backwards, in the unit of the trace's `held`; in forwards of a present
    # stage, if the trace does not tell.
    memory: float
    makespan: float  # simulated makespan, in the trace's unit of time
    bubble: float  # idle share of ranks × makespan
    # Blocks of every stage (layers, if the trace does not tell blocks) where they move.
    split: tuple[int, ...] | None = None
    lines: ChangeLines = ChangeLines()


class Alternatives:
    """Changes of one step."""

    def __init__(self, trace: Trace, plan: PlannedStep) -> None:
        self._schedule, self._program, self._costs = plan.program.schedule, plan.program, plan.costs
        self._conditions = Conditions.of(trace)
        self._parts = StageParts.of(trace, self._schedule.stages)
        self._sizes = saved_sizes(trace, self._schedule.stages)
        self._memory = _peak(self._schedule, self._sizes)
        residency = plan.program.residency
        self._sharding = None if residency is None else residency.sharding

    def unchanged(self) -> Change:
        """Return the step as it is, simulated under the same conditions as its changes."""
        trace = self._conditions.simulate(self._program, self._costs)
        return _change("unchanged", self._schedule, self._memory, trace)

    def slow_stage(self) -> str | None:
        """Return a clause that names the slowest stage; None if it is not slow."""
        slowest, ratio = self._slowest()
        return None if ratio < SLOW else f"stage {slowest} takes {ratio:.2f} times the median"

    def _slowest(self) -> tuple[int, float]:
        spent = _work(self._schedule, self._costs)
        median = float(np.median(spent))
        slowest = int(spent.argmax())
        return slowest, float(spent[slowest]) / median if median > 0 else 1.0

    def moved(self) -> Iterator[Change]:
        """Yield changes that move one block off the slowest stage, or equal stages if the trace names no layers."""
        schedule, costs, parts = self._schedule, self._costs, self._parts
        named = self.slow_stage()
        if named is None:
            return
        slowest, slow = self._slowest()[0], f"{named}; with"
        if parts is None:
            seconds = np.broadcast_to(costs.seconds.mean(axis=0), costs.seconds.shape)
            trace = self._conditions.simulate(self._program, _repriced(costs, seconds))
            change = _change(f"{slow} equal stages", schedule, self._memory, trace)
            yield replace(change, lines=ChangeLines(pipeline='split={"measured": (x, y)}'))
            return
        if parts.counts[slowest] < 2:
            return
        for target in (slowest - 1, slowest + 1):
            if not 0 <= target < schedule.stages:
                continue
            other = parts.moved(slowest, target)
            memory = _peak(schedule, parts.recost(self._sizes[:, None], other)[:, 0])
            if memory > self._memory * (1 + 1e-9):
                continue
            priced = _repriced(costs, parts.recost(costs.seconds, other))
            name = "blocks" if parts.blocks else "layers"
            words = f"{slow} one of its {parts.counts[slowest]} {name} moved to stage {target}"
            change = _change(words, schedule, memory, self._conditions.simulate(self._program, priced))
            yield replace(change, split=other.counts, lines=_split_lines(other))

    def reordered(self) -> Iterator[Change]:
        """Yield every family with the same counts that needs no more memory, and no more stages than there are blocks."""
        schedule = self._schedule
        if schedule.placement.has_copies or (schedule.kind == Kind.R).any():
            return  # their memory is not counted in the same unit
        virtual = schedule.stages // schedule.ranks
        for name in _TRIED:
            family = FAMILIES[name]
            for v in sorted({family.virtual_stages, virtual}) if family.chooses_virtual_stages else [None]:
                try:
                    other = family.build(schedule.ranks, schedule.microbatches, v)
                except PenstockError:
                    continue  # the family does not allow these counts
                if (other.name, other.stages) == (schedule.name, schedule.stages):
                    continue
                if (change := self._reordered(family, other)) is not None:
                    yield change

    def _reordered(self, family: CatalogueFamily, other: Schedule) -> Change | None:
        parts = self._parts
        even = None if parts is None else parts.evenly(other.stages)
        if parts is not None and even is None:
            return None
        sizes = self._in_stages(self._sizes[:, None], other.stages, even)[:, 0]
        needed = _peak(other, sizes)
        if needed > self._memory * (1 + 1e-9):
            return None
        share = "the same" if needed > self._memory * 0.95 else f"{needed / self._memory:.0%} of the"
        v = other.stages // other.ranks
        stages = f", {v} stages per rank," if family.chooses_virtual_stages and v > 1 else ""
        priced = Costs(
            self._in_stages(self._seconds(family), other.stages, even),
            communication=_resized(self._costs.communication, other.stages),
            gather=self._of_stages(self._costs.gather, other.stages, even),
            reduce=self._of_stages(self._costs.reduce, other.stages, even),
        )
        try:
            program = check(other, sharding=self._sharding).program
        except ScheduleError:
            return None  # the window is too small for its pairs, or its copies' gradients are joined first
        trace = self._conditions.simulate(program, priced)
        change = _change(f"with {family.name}{stages} in {share} memory", other, needed, trace)
        return replace(change, lines=self._schedule_lines(family, other))

    def _seconds(self, family: CatalogueFamily) -> Table:
        """Return the costs of the present stages under a family, which may split backwards that were not split before."""
        seconds = self._costs.seconds
        if (
            not family.splits_backward
            or not self._conditions.measured
            or (self._schedule.kind == Kind.W).any()
        ):
            return seconds
        prepared = seconds.astype(np.float64)
        prepared[:, [Kind.F, Kind.I, Kind.W]] *= SPLIT_COST
        return prepared

    def _in_stages(self, table: Table, stages: int, even: StageParts | None) -> Table:
        """Return a table, one row a stage, in another number of stages: in an even split, if the parts are known."""
        if stages == self._schedule.stages:
            return table  # the split stays as it is
        if self._parts is None or even is None or not even.blocks:
            return recut(table, stages)
        return self._parts.recost(table, even)

    def _of_stages(self, column: Table | None, stages: int, even: StageParts | None) -> Table | None:
        return None if column is None else self._in_stages(column[:, None], stages, even)[:, 0]

    def _schedule_lines(self, family: CatalogueFamily, other: Schedule) -> ChangeLines:
        v, before = other.stages // other.ranks, self._schedule.stages // self._schedule.ranks
        train, pipeline = [f"schedule.name={family.name}"], [f'schedule="{family.name}"']
        if (v, before) != (family.virtual_stages, family.virtual_stages):
            train.append(f"parallel.virtual_stages={v}")
        if (v, before) != (1, 1):
            pipeline.append(f"virtual_stages={v}")
        if v != before:  # a list of counts would not fit
            train.append("schedule.split=even")
            pipeline.append('split="even"')
        return ChangeLines(f"--set {' '.join(train)}", ", ".join(pipeline))


def _change(words: str, schedule: Schedule, memory: float, trace: Trace) -> Change:
    virtual_stages = schedule.stages / schedule.ranks
    return Change(
        words=words,
        schedule=schedule.name,
        virtual_stages=virtual_stages,
        memory=memory,
        makespan=float(makespan(trace)),
        bubble=bubble_fraction(trace),
    )


def _split_lines(parts: StageParts) -> ChangeLines:
    counts = str(list(parts.counts)).replace(" ", "")
    return ChangeLines(f"--set 'schedule.split={counts}'" if parts.blocks else "", f"split={parts.setting}")


def _peak(schedule: Schedule, sizes: Any) -> float:
    """Return the most that a rank keeps for its backwards if a forward of each stage keeps its size; shape (stages,)."""
    fine = _FINE if max(sizes) < _FINE else 1
    return float(peak(schedule, np.round(np.asarray(sizes) * fine).astype(np.int64)).max()) / fine


def _work(schedule: Schedule, costs: Costs) -> Table:
    """Return the seconds of all ops of every stage, shape (stages,)."""
    work = np.zeros(schedule.stages)
    np.add.at(work, schedule.stage, costs.seconds[schedule.stage, schedule.kind].astype(np.float64))
    return work


def _repriced(costs: Costs, seconds: Table) -> Costs:
    """Return the costs with other seconds; a pair keeps its proportion to its halves."""
    if costs.pair is None:
        return replace(costs, seconds=seconds)
    halves = costs.seconds[:, Kind.F] + costs.seconds[:, [Kind.B, Kind.I]].max(axis=1)
    now = seconds[:, Kind.F] + seconds[:, [Kind.B, Kind.I]].max(axis=1)
    pair = np.maximum(costs.pair * now / np.where(halves > 0, halves, 1), seconds.max())
    return replace(costs, seconds=seconds, pair=pair)


def _resized(communication: Communication, stages: int) -> Communication:
    """Return communication that fits another number of stages: the largest message of all, over the slowest link."""
    sizes, links = communication.message_bytes, communication.boundaries
    if links and len(links) != stages - 1:
        slowest = Link(max(link.latency for link in links), min(link.bandwidth for link in links))
        communication = replace(communication, same_node=slowest, other_node=slowest, boundaries=None)
    if isinstance(sizes, int) or len(sizes) == stages - 1:
        return communication
    return replace(communication, message_bytes=max(sizes, default=0))
