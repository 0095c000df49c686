"""Sentences that say where a step's time went, and simulated changes that would shorten it.

Every change is simulated with the costs that the step itself shows, so its gain is over the step's plan, not over a guess.
Where ranks slow each other down, ops get longer as ranks wait less; and every op has the overhead that the step shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.errors import PenstockError
from penstock.schedule.check import check
from penstock.schedule.families import FAMILIES
from penstock.schedule.memory import peak
from penstock.schedule.ops import Kind
from penstock.schedule.program import Program
from penstock.schedule.schedule import Schedule
from penstock.show.contention import Contention, contention_of, others_beside
from penstock.show.palette import CAUSES
from penstock.show.planned import PlannedStep
from penstock.show.units import is_measured
from penstock.simulate.costs import Communication, Costs, Table
from penstock.simulate.simulator import simulate
from penstock.trace.bubbles import Bubbles, bubble_fraction, bubbles, makespan
from penstock.trace.events import Trace

MIN_GAIN = 0.02
"""The least share of the step that a change has to save to be named."""
SPLIT_COST = 1.09
"""Time of both halves of a split backward over the full one, and of a forward that prepares for one over another.

Measured with two ranks busy, where a step itself has no split backward to measure (`bench.advice`).
"""
_ROUNDS = 6
"""Rounds in which the length of ops and the ranks beside them find each other."""
SLOW = 1.05
"""A stage is slow if it takes so many times the median."""
# Left out are families with two copies of every stage, whose weights need more memory, and the search that takes seconds.
_TRIED = tuple(
    name for name, family in FAMILIES.items() if "two copies" not in family.needs and not family.searches
)


@dataclass(frozen=True)
class Change:
    """A simulated change of a step.

    Attributes:
        words: the change, as in "with zb-v in the same memory".
        schedule: name of the schedule.
        virtual_stages: stages per rank.
        memory: the most activations that a rank holds, in units of one microbatch on 1/ranks of the model.
        makespan: simulated makespan, in the trace's unit of time.
        bubble: idle share of ranks × makespan.
        layers: number of layers of every stage, if layers move; None otherwise.
    """

    words: str
    schedule: str
    virtual_stages: float
    memory: float
    makespan: float
    bubble: float
    layers: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Advice:
    """The best of all simulated changes.

    Attributes:
        sentence: the change to make.
        changes: everything that was simulated: the present order first, then the quickest first.
    """

    sentence: str
    changes: tuple[Change, ...]


def where_time_went(bubbles: Bubbles, ranks: Sequence[int]) -> str:
    """Return a sentence that says how much of the ranks' time was idle, and why.

    Args:
        bubbles: the time of every rank.
        ranks: the ranks that have events; the others do not count.
    """
    total = float(bubbles.makespan) * len(ranks)
    idle = {cause: float(time[ranks].sum()) / total if total else 0.0 for cause, time in bubbles.idle.items()}
    share = sum(idle.values())
    if share < 0.001:
        return "The ranks computed all the time."
    largest = max(idle, key=lambda cause: idle[cause])
    return f"{share:.1%} of the ranks' time was idle. The largest part, {idle[largest]:.1%}, was {CAUSES[largest].sentence}."


def compare_with_plan(bubbles: Bubbles, planned: Bubbles) -> str:
    """Return a sentence that says how much longer a step took than its plan, and what makes up most of the difference."""
    more = float(bubbles.makespan) - float(planned.makespan)
    share = more / float(planned.makespan) if planned.makespan else 0.0
    if abs(share) < 0.005:
        return "The step took as long as planned from its usual op times."
    # A rank's work and its imbalance add up to the work of the busiest rank.
    parts = {"busy": float(bubbles.busy.max() - planned.busy.max())}
    for cause in bubbles.idle:
        if cause != "imbalance":
            parts[cause] = float((bubbles.idle[cause] - planned.idle[cause]).mean())
    longer = more > 0
    largest = max(parts, key=lambda part: parts[part] if longer else -parts[part])
    if largest == "busy":
        name = f"work of the busiest rank, whose ops took {'longer' if longer else 'less'} than usual"
    else:
        name = f"{'' if longer else 'less '}{CAUSES[largest].meaning}"
    return (
        f"The step took {abs(share):.1%} {'longer' if longer else 'less'} than planned from its usual op times. The largest "
        f"part of the difference, {abs(parts[largest]) / float(planned.makespan):.1%} of the plan, is {name}."
    )


def advise(trace: Trace, plan: PlannedStep) -> Advice:
    """Simulate possible changes of a step, and name the best.

    Args:
        trace: a whole step; ``info["split"]``, a list of the stages' lists of layers, allows layers to be moved.
        plan: the same step as planned.
    """
    schedule = plan.program.schedule
    memory = _memory(schedule)
    conditions = _Conditions(contention_of(trace), _overhead(trace), is_measured(trace))
    now = _change("unchanged", schedule, memory, conditions.simulate(plan.program, plan.costs))
    moved = [
        replace(_change(words, schedule, memory, conditions.simulate(plan.program, costs)), layers=layers)
        for words, costs, layers in _moved(schedule, plan.costs, _layers(trace, schedule.stages))
    ]
    reordered = list(_other_schedules(schedule, plan.costs, memory, conditions))
    ranked = sorted([*moved, *reordered], key=lambda change: (change.makespan, change.memory))
    return Advice(_sentence(now, moved, reordered), (now, *ranked))


@dataclass(frozen=True)
class _Conditions:
    """Conditions of the machine that a change meets.

    Attributes:
        contention: slowdown of ops by ranks that compute beside them.
        overhead: time between two ops of a rank.
        measured: True if the step ran.
    """

    contention: Contention
    overhead: float
    measured: bool

    def simulate(self, program: Program, costs: Costs) -> Trace:
        """Simulate a program with ops as long as they are beside the ranks that compute meanwhile."""
        costs = _scaled(costs, 1.0, self.overhead)
        trace = simulate(program, costs)
        if not self.contention.slope:
            return trace
        factor = 1.0
        for _ in range(_ROUNDS):
            company = others_beside(trace)
            length = trace.end - trace.start
            others = float(np.average(company, weights=length)) if length.any() else 0.0
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


def _sentence(now: Change, moved: Sequence[Change], reordered: Sequence[Change]) -> str:
    if not moved and not reordered:
        return "No change was simulated: no other schedule of the catalogue fits these stages."
    total = now.makespan or 1.0
    candidates = (
        min(moved, key=lambda change: change.makespan, default=now),
        # Of orders that are equally quick, the one that needs less memory.
        min(reordered, key=lambda change: (round(change.makespan / total, 3), change.memory), default=now),
    )
    sentences = [
        f"{change.words[0].upper()}{change.words[1:]}, the step would be {1 - change.makespan / total:.0%} shorter and "
        f"{change.bubble:.1%} idle instead of {now.bubble:.1%} (simulated)."
        for change in candidates
        if 1 - change.makespan / total >= MIN_GAIN
    ]
    return " ".join(sentences) or (
        f"None of the {len(moved) + len(reordered)} changes that were simulated within the same memory makes the step "
        f"{MIN_GAIN:.0%} shorter."
    )


def _memory(schedule: Schedule) -> float:
    return float(peak(schedule).max()) * schedule.ranks / schedule.stages


def _change(words: str, schedule: Schedule, memory: float, trace: Trace) -> Change:
    virtual_stages = schedule.stages / schedule.ranks
    return Change(
        words, schedule.name, virtual_stages, memory, float(makespan(trace)), bubble_fraction(trace)
    )


def _layers(trace: Trace, stages: int) -> list[int] | None:
    """Return the number of layers of every stage, if the trace says so."""
    split = trace.info.get("split")
    if not isinstance(split, list | tuple) or len(split) != stages:
        return None
    return [len(layers) for layers in split if isinstance(layers, list | tuple)]


def _moved(
    schedule: Schedule, costs: Costs, layers: list[int] | None
) -> Iterator[tuple[str, Costs, tuple[int, ...] | None]]:
    """Move a layer off the slowest stage; if the layers are not known, make all stages equal."""
    work = _work(schedule, costs)
    median = float(np.median(work))
    slowest = int(work.argmax())
    ratio = float(work[slowest]) / median if median > 0 else 1.0
    if ratio < SLOW:
        return
    slow = f"stage {slowest} takes {ratio:.2f} times the median; with"
    if layers is None or len(layers) != schedule.stages or layers[slowest] < 2:
        even = np.broadcast_to(costs.seconds.mean(axis=0), costs.seconds.shape)
        yield f"{slow} equal stages", _repriced(costs, even), None
        return
    layer = costs.seconds[slowest] / layers[slowest]
    for other in (slowest - 1, slowest + 1):
        if 0 <= other < schedule.stages:
            table = costs.seconds.copy()
            table[slowest] -= layer
            table[other] += layer
            words = f"{slow} one of its {layers[slowest]} layers moved to stage {other}"
            counts = list(layers)
            counts[slowest] -= 1
            counts[other] += 1
            yield words, _repriced(costs, table), tuple(counts)


def _repriced(costs: Costs, seconds: Table) -> Costs:
    """Return the costs with other seconds; a pair keeps its proportion to its halves."""
    if costs.pair is None:
        return replace(costs, seconds=seconds)
    halves = costs.seconds[:, Kind.F] + costs.seconds[:, [Kind.B, Kind.I]].max(axis=1)
    now = seconds[:, Kind.F] + seconds[:, [Kind.B, Kind.I]].max(axis=1)
    pair = np.maximum(costs.pair * now / np.where(halves > 0, halves, 1), seconds.max())
    return replace(costs, seconds=seconds, pair=pair)


def _work(schedule: Schedule, costs: Costs) -> Table:
    """Return the seconds of all ops of every stage, shape (stages,)."""
    work = np.zeros(schedule.stages)
    np.add.at(work, schedule.stage, costs.seconds[schedule.stage, schedule.kind].astype(np.float64))
    return work


def _other_schedules(
    schedule: Schedule, costs: Costs, memory: float, conditions: _Conditions
) -> Iterator[Change]:
    """Simulate every family of the catalogue with the same counts that needs no more memory."""
    if schedule.placement.has_copies or (schedule.kind == Kind.R).any():
        return  # their memory is not counted in the same unit
    virtual = schedule.stages // schedule.ranks
    if conditions.measured and not (schedule.kind == Kind.W).any():
        prepared = costs.seconds.astype(np.float64)
        prepared[:, [Kind.F, Kind.I, Kind.W]] *= SPLIT_COST
        split_costs = replace(costs, seconds=prepared)
    else:
        split_costs = costs
    for name in _TRIED:
        family = FAMILIES[name]
        for v in sorted({family.virtual_stages, virtual}) if family.chooses_virtual_stages else [None]:
            try:
                other = family.build(schedule.ranks, schedule.microbatches, v)
            except PenstockError:
                continue  # the family does not allow these counts
            if other.name == schedule.name and other.stages == schedule.stages:
                continue
            needed = _memory(other)
            if needed > memory * (1 + 1e-9):
                continue
            share = "the same" if needed > memory * 0.95 else f"{needed / memory:.0%} of the"
            stages = "" if v is None or v == 1 else f", {v} stages per rank,"
            of_family = split_costs if family.splits_backward else costs
            communication = _resized(costs.communication, other.stages)
            priced = Costs(recut(of_family.seconds, other.stages), communication=communication)
            trace = conditions.simulate(check(other).program, priced)
            yield _change(f"with {name}{stages} in {share} memory", other, needed, trace)


def _resized(communication: Communication, stages: int) -> Communication:
    """Return communication that fits another number of stages: sizes of messages become the largest of all."""
    sizes = communication.message_bytes
    if isinstance(sizes, int) or len(sizes) == stages - 1:
        return communication
    return replace(communication, message_bytes=max(sizes, default=0))


def recut(seconds: Table, stages: int) -> Table:
    """Return the costs of another number of stages of the same model, shape (stages, kinds).

    Every new stage is the same share of the model, counted in old stages, and costs the sum of the old stages' parts.
    """
    edges = np.linspace(0, len(seconds), stages + 1)
    total = np.vstack([np.zeros(seconds.shape[1]), np.cumsum(seconds, axis=0)])
    at_edges = np.stack([np.interp(edges, np.arange(len(total)), column) for column in total.T], axis=1)
    return np.maximum(np.diff(at_edges, axis=0), 0)
