"""What a step's time went to, in a sentence, and what would change it most: found by simulating the changes.

Every change is simulated with the costs that the step itself shows, so its gain is over the step's plan, not over a guess.
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
from penstock.schedule.schedule import Schedule
from penstock.show.colours import CAUSES
from penstock.show.planned import PlannedStep
from penstock.simulate.costs import Costs, Table
from penstock.simulate.simulator import simulate
from penstock.trace.bubbles import bubble_fraction, bubbles, makespan
from penstock.trace.events import Trace

WORTH = 0.02
"""The least share of the step that a change has to save to be named."""
SLOW = 1.05
"""How many times the median a stage takes that is called slow."""
# Left out are families with two copies of every stage, whose weights need more memory, and the search that takes seconds.
_TRIED = tuple(
    name for name, family in FAMILIES.items() if "two copies" not in family.needs and name != "zb-auto"
)


@dataclass(frozen=True)
class Change:
    """Something that could be changed, and what the step would then be.

    Attributes:
        words: what to do, as in "with zb-v at the same memory".
        schedule: the schedule's name.
        virtual_stages: stages a rank.
        memory: the most activations a rank holds, in units of one microbatch on 1/ranks of the model.
        makespan: simulated, in the trace's unit of time.
        bubble: the idle share of ranks × makespan.
    """

    words: str
    schedule: str
    virtual_stages: float
    memory: float
    makespan: float
    bubble: float


@dataclass(frozen=True)
class Advice:
    """What a person should know first.

    Attributes:
        where: where the time went, a sentence.
        what: what to change, a sentence.
        changes: all that was simulated, the present order first, then the quickest first.
    """

    where: str
    what: str
    changes: tuple[Change, ...]


def where_it_went(trace: Trace) -> str:
    """Say how much of the ranks' time was idle, and what for."""
    split = bubbles(trace)
    whole = float(split.makespan) * max(1, len(np.unique(trace.rank)))
    idle = {cause: float(time.sum()) / whole if whole else 0.0 for cause, time in split.idle.items()}
    total = sum(idle.values())
    if total < 0.001:
        return "The ranks computed all the time."
    worst = max(idle, key=lambda cause: idle[cause])
    return f"{total:.1%} of the ranks' time was idle. Most of it, {idle[worst]:.1%}, was {_reason(worst)}."


def _reason(cause: str) -> str:
    reasons = {
        "warm_up": "warm-up: the pipeline fills",
        "cool_down": "cool-down: the pipeline drains",
        "overhead": "overhead between ops: everything an op needed was there",
        "communication": "communication that no computation hides",
        "imbalance": "imbalance: some ranks have less work than the busiest one",
    }
    return reasons.get(cause, CAUSES[cause][1])


def over_plan(trace: Trace, plan: PlannedStep) -> str:
    """Say how much longer the step took than its plan, and what most of the difference is."""
    took, planned = bubbles(trace), bubbles(plan.trace)
    more = float(took.makespan) - float(planned.makespan)
    share = more / float(planned.makespan) if planned.makespan else 0.0
    if abs(share) < 0.005:
        return "The step took as long as the plan from its own usual op times."
    # A rank's work and its imbalance are together the work of the busiest rank.
    parts = {"busy": float(took.busy.max() - planned.busy.max())}
    for cause in took.idle:
        if cause != "imbalance":
            parts[cause] = float((took.idle[cause] - planned.idle[cause]).mean())
    sign = 1 if more > 0 else -1
    most = max(parts, key=lambda part: sign * parts[part])
    named = (
        "work of the busiest rank, whose ops took longer than usual" if most == "busy" else CAUSES[most][1]
    )
    if sign < 0:
        named = (
            "work of the busiest rank, whose ops took less than usual" if most == "busy" else f"less {named}"
        )
    return (
        f"The step took {abs(share):.1%} {'longer' if sign > 0 else 'less'} than the plan from its own usual op times; most "
        f"of the difference, {abs(parts[most]) / float(planned.makespan):.1%} of the plan, is {named}."
    )


def advise(trace: Trace, plan: PlannedStep) -> Advice:
    """Simulate what could be changed, and name the best.

    Args:
        trace: of a whole step; ``info["split"]``, a list of the stages' lists of layers, lets a layer be moved.
        plan: of the same.
    """
    schedule = plan.program.schedule
    now = _change("as it is", schedule, plan.costs, plan.trace)
    split = _layers(trace, schedule.stages)
    moved = [*_moved(schedule, plan.costs, split)]
    ordered = [*_other_schedules(schedule, plan.costs, now.memory)]
    found = sorted([*moved, *ordered], key=lambda change: (change.makespan, change.memory))
    return Advice(where_it_went(trace), _what(now, moved, ordered), (now, *found))


def _what(now: Change, moved: Sequence[Change], ordered: Sequence[Change]) -> str:
    words = []
    for best in (
        min(moved, key=lambda change: change.makespan, default=now),
        # Of orders that are equally quick the one that needs less memory is the better.
        min(
            ordered,
            key=lambda change: (round(change.makespan / (now.makespan or 1.0), 3), change.memory),
            default=now,
        ),
    ):
        gain = 1 - best.makespan / now.makespan if now.makespan else 0.0
        if gain >= WORTH:
            words.append(
                f"{best.words} the step would be {gain:.0%} shorter, and the bubble {best.bubble:.1%} instead of "
                f"{now.bubble:.1%}"
            )
    if not moved and not ordered:
        return "No change was simulated: no other schedule of the catalogue suits these stages."
    if not words:
        return (
            f"Of the {len(moved) + len(ordered)} changes simulated with these costs, in no more memory, none makes the "
            f"step {WORTH:.0%} shorter."
        )
    sentence = "; ".join(words)
    return sentence[0].upper() + sentence[1:] + " (simulated)."


def _change(words: str, schedule: Schedule, costs: Costs, trace: Trace | None = None) -> Change:
    done = simulate(check(schedule).program, costs) if trace is None else trace
    each = schedule.ranks / schedule.stages
    return Change(
        words,
        schedule.name,
        schedule.stages / schedule.ranks,
        float(peak(schedule).max()) * each,
        float(makespan(done)),
        bubble_fraction(done),
    )


def _layers(trace: Trace, stages: int) -> list[int] | None:
    """How many layers every stage has, if the trace says so."""
    split = trace.info.get("split")
    if not isinstance(split, list | tuple) or len(split) != stages:
        return None
    return [len(layers) for layers in split if isinstance(layers, list | tuple)]


def _moved(schedule: Schedule, costs: Costs, layers: list[int] | None) -> Iterator[Change]:
    """A layer moved off the slowest stage, or all stages made equal if the layers are not known."""
    work = _work(schedule, costs)
    middle = float(np.median(work))
    slowest = int(work.argmax())
    ratio = float(work[slowest]) / middle if middle > 0 else 1.0
    if ratio < SLOW:
        return
    slow = f"stage {slowest} takes {ratio:.2f} times the median"
    if layers is None or len(layers) != schedule.stages or layers[slowest] < 2:
        even = np.broadcast_to(costs.seconds.mean(axis=0), costs.seconds.shape)
        yield _change(f"{slow}: with equal stages", schedule, _repriced(costs, even))
        return
    each = costs.seconds[slowest] / layers[slowest]
    for other in (slowest - 1, slowest + 1):
        if 0 <= other < schedule.stages:
            table = costs.seconds.copy()
            table[slowest] -= each
            table[other] += each
            words = f"{slow}: with one of its {layers[slowest]} layers moved to stage {other}"
            yield _change(words, schedule, _repriced(costs, table))


def _repriced(costs: Costs, seconds: Table) -> Costs:
    """The costs with other ones of the ops; a pair is as much shorter than its halves as before."""
    if costs.pair is None:
        return replace(costs, seconds=seconds)
    halves = costs.seconds[:, Kind.F] + costs.seconds[:, [Kind.B, Kind.I]].max(axis=1)
    now = seconds[:, Kind.F] + seconds[:, [Kind.B, Kind.I]].max(axis=1)
    pair = np.maximum(costs.pair * now / np.where(halves > 0, halves, 1), seconds.max())
    return replace(costs, seconds=seconds, pair=pair)


def _work(schedule: Schedule, costs: Costs) -> Table:
    """Seconds of all ops of every stage."""
    work = np.zeros(schedule.stages)
    np.add.at(work, schedule.stage, costs.seconds[schedule.stage, schedule.kind].astype(np.float64))
    return work


def _other_schedules(schedule: Schedule, costs: Costs, memory: float) -> Iterator[Change]:
    """Every family of the catalogue with the same counts that holds no more."""
    if schedule.placement.has_copies or (schedule.kind == Kind.R).any():
        return  # what they hold is not counted in the same unit
    virtual = schedule.stages // schedule.ranks
    for name in _TRIED:
        family = FAMILIES[name]
        for v in sorted({family.virtual_stages, virtual}) if family.chooses_virtual_stages else [None]:
            try:
                other = family.build(schedule.ranks, schedule.microbatches, v)
            except PenstockError:
                continue  # the family does not allow these counts
            if other.name == schedule.name and other.stages == schedule.stages:
                continue
            priced = Costs(recut(costs.seconds, other.stages), communication=costs.communication)
            again = "" if v is None or v == 1 else f" and {v} stages a rank"
            change = _change(f"with {name}{again} at the same memory", other, priced)
            if change.memory <= memory * (1 + 1e-9):
                yield (
                    change
                    if change.memory > memory * 0.95
                    else replace(
                        change,
                        words=f"with {name}{again} and {change.memory / memory:.0%} of the activations",
                    )
                )


def recut(seconds: Table, stages: int) -> Table:
    """The costs of another number of stages of the same model, shape (stages, kinds).

    Every new stage is the same share of the model, counted in old stages, and costs the sum of its parts of these.
    """
    edges = np.linspace(0, len(seconds), stages + 1)
    whole = np.vstack([np.zeros(seconds.shape[1]), np.cumsum(seconds, axis=0)])
    at = np.stack([np.interp(edges, np.arange(len(whole)), column) for column in whole.T], axis=1)
    return np.maximum(np.diff(at, axis=0), 0)
