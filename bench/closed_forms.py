"""The closed forms of the literature beside the simulator, over a grid of ranks, microbatches, stages and costs.

A form gives the makespan, the longest rank or the activations of a rank. Every case of its grid is built, proved and
simulated with whole-number costs, and compared exactly. `penstock.schedule.families` names the sources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from penstock.schedule.check import check
from penstock.schedule.families import build_schedule
from penstock.simulate.costs import Communication, Costs, Link
from penstock.simulate.metrics import Metrics, measure
from penstock.simulate.simulator import simulate

EQUAL = (10, 10, 10)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One schedule and its costs; f, b, w and the pair are those of a stage."""

    family: str
    p: int
    m: int
    v: int = 1
    costs: tuple[int, int, int] = EQUAL
    c: int = 0
    pair: int | None = None
    early: bool = False
    group: int | None = None

    @property
    def f(self) -> int:
        return self.costs[0]

    @property
    def b(self) -> int:
        return self.costs[1]

    @property
    def w(self) -> int:
        return self.costs[2]

    @property
    def bw(self) -> int:
        return self.b + self.w

    @property
    def work(self) -> int:
        """Seconds that a rank computes in a step."""
        return self.m * self.v * sum(self.costs)


METRICS: dict[str, Callable[[Metrics], Any]] = {
    "makespan": lambda found: int(found.makespan),
    "longest": lambda found: int(found.longest),
    "peak": lambda found: found.peak_activations.tolist(),
    "largest peak": lambda found: int(found.peak_activations.max()),
    "bubble of rank p-1": lambda found: int(found.bubble[-1]),
    "bubble of rank p/2-1": lambda found: int(found.bubble[found.ranks // 2 - 1]),
}


@dataclass(frozen=True)
class Form:
    """One formula.

    Attributes:
        family: schedule family of the formula.
        says: the formula, as text.
        metric: figure that it gives, a key of `METRICS`.
        cases: cases in which it must be exact.
        value: function that returns a number, or a list with one number per rank.
    """

    family: str
    says: str
    metric: str
    cases: Iterable[Case]
    value: Callable[[Case], Any]


@dataclass
class Outcome:
    """The result of a form: number of cases, and the cases that differ, as text."""

    family: str
    metric: str
    says: str
    cases: int = 0
    failed: list[str] = field(default_factory=list)


@cache
def figures(case: Case) -> Metrics:
    """Build, prove and simulate one case."""
    options = {} if case.group is None else {"group_size": case.group}
    schedule = build_schedule(case.family, case.p, case.m, case.v, **options)
    stages = schedule.stages
    costs = Costs.of(
        schedule.placement,
        *([cost] * stages for cost in case.costs),
        pair=None if case.pair is None else [case.pair] * stages,
        pair_output="early" if case.early else "end",
        communication=Communication(same_node=Link(case.c)),
    )
    return measure(schedule, costs, simulate(check(schedule).program, costs))


def outcomes(forms: Iterable[Form]) -> Iterator[Outcome]:
    """Compare forms with the simulator."""
    for form in forms:
        outcome = Outcome(form.family, form.metric, form.says)
        for case in form.cases:
            found = METRICS[form.metric](figures(case))
            outcome.cases += 1
            if found != (wanted := form.value(case)):
                outcome.failed.append(f"{_describe(case)}: {found}, not {wanted}")
        yield outcome
        figures.cache_clear()


def _describe(case: Case) -> str:
    parts = [f"p={case.p} m={case.m}", f"v={case.v}", f"f,b,w={','.join(map(str, case.costs))}"]
    parts += [f"c={case.c}"] if case.c else []
    parts += [f"pair={case.pair}"] if case.pair is not None else []
    parts += ["outputs early"] if case.early else []
    parts += [f"N={case.group}"] if case.group is not None else []
    return " ".join(parts)
