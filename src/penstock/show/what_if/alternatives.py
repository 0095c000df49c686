"""Changes of a step that can be made with the same ranks and microbatches, each simulated with the step's own costs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.base.errors import PenstockError, ScheduleError
from penstock.schedule.check import check
from penstock.schedule.families import FAMILIES, CatalogueFamily
from penstock.schedule.memory import peak
from penstock.schedule.ops import Kind
from penstock.schedule.schedule import Schedule
from penstock.show.planned import PlannedStep
from penstock.show.what_if.machine_conditions import Conditions
from penstock.show.what_if.stage_parts import StageParts, recut, saved_sizes
from penstock.simulate.costs import Communication, Costs, Link, Table
from penstock.trace.bubbles import bubble_fraction, makespan
from penstock.trace.events import Trace

SPLIT_COST = 1.09
"""Time of both halves of a split backward over the full one, and of a forward that prepares for one over another.

Measured with two ranks busy, where a step itself has no split backward to measure (`bench.advice`).
"""
SLOW = 1.05
"""A stage is slow if it takes so many times the median."""
# `peak` counts whole numbers: sizes in activations are multiplied by this before they are rounded.
_FINE = 2**20
# Left out are families with copies of stages, whose weights need more memory, and the search that takes seconds.
_TRIED = tuple(name for name, family in FAMILIES.items() if not family.has_copies and not family.searches)


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
