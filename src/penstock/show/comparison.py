"""Two runs side by side: differences of their configs, of one step of each, and the page that shows them.

The page has timelines on one scale, time by cause, differences of the configs, and curves over each other.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from penstock.base.errors import ConfigError
from penstock.show.analysis import StepAnalysis
from penstock.show.figures import LINES, curves, figures, rank_colours
from penstock.show.page import fill_template, write_page
from penstock.show.page_data import MAX_CURVES, step_data
from penstock.show.palette import BUSY, CAUSES, KINDS
from penstock.show.report_page import mean_times, overview_figure
from penstock.show.run import RunView
from penstock.show.units import Unit, amount, finite, unit_of

NAMES = ("A", "B")
_SAME = 0.005
"""Share of a step below which two steps count as equally long."""


class TimePart(NamedTuple):
    """A part of the steps' time, the mean of the ranks: computing, or a cause of idle time, in the traces' unit."""

    name: str
    first: float
    second: float

    @property
    def difference(self) -> float:
        return self.second - self.first


@dataclass(frozen=True)
class RunPair:
    """Two runs, called A and B, and the step of each that is compared."""

    runs: tuple[RunView, RunView]
    numbers: tuple[int, int]

    @cached_property
    def steps(self) -> tuple[StepAnalysis, StepAnalysis]:
        """The steps that are compared."""
        first, second = (run.steps[number] for run, number in zip(self.runs, self.numbers, strict=True))
        return first, second

    @property
    def unit(self) -> Unit:
        """Unit of time that suits both steps."""
        return unit_of(step.trace for step in self.steps)

    @property
    def titles(self) -> list[str]:
        """Name and step of each run."""
        return [
            f"{run.title}, step {number}" if number else run.title
            for run, number in zip(self.runs, self.numbers, strict=True)
        ]

    @cached_property
    def parts(self) -> list[TimePart]:
        """The parts of both steps' time that one of them has; they add up to the steps, and so do their differences."""
        names = ("computing", *(cause.meaning for cause in CAUSES.values()))
        columns = [mean_times(step) for step in self.steps]
        longest = max(float(step.bubbles.makespan) for step in self.steps)
        parts = [TimePart(name, *times) for name, *times in zip(names, *columns, strict=True)]
        return [part for part in parts if max(part.first, part.second) > 1e-9 * longest]

    @property
    def sentence(self) -> str:
        """The difference of the steps' time, and the largest part of it."""
        first, second = (float(step.bubbles.makespan) for step in self.steps)
        share = second / first - 1 if first else 0.0
        if abs(share) < _SAME:
            return f"The steps of A and B take the same time, {self.unit.text(second)}."
        longer = share > 0
        largest = max(self.parts, key=lambda part: part.difference if longer else -part.difference)
        word, amount_of = "more" if longer else "less", self.unit.text(abs(largest.difference))
        return (
            f"The step of B takes {abs(share):.1%} {word} time than A's: {self.unit.text(second)} instead of "
            f"{self.unit.text(first)}. The largest part of the difference is {amount_of} {word} "
            f"{largest.name}, on average over the ranks."
        )

    def figures(self) -> list[tuple[str, str, str]]:
        """Return (name, of A, of B) of the figures that either run has, as text."""
        rows = [
            ("schedule", *(str(step.trace.info.get("schedule", "")) for step in self.steps)),
            ("ranks, stages, microbatches", *map(_counts, self.steps)),
            ("step", *(self.unit.text(step.bubbles.makespan) for step in self.steps)),
            ("idle", *map(_idle, self.steps)),
            ("most held by a rank", *map(_held, self.steps)),
            ("tokens a second", *(_number(run.facts.tokens_per_second, ",.0f") for run in self.runs)),
            ("MFU", *(_number(run.facts.mfu, ".1%") for run in self.runs)),
            ("last loss", *(_number(_last(run.metrics, "train", "loss"), ".4f") for run in self.runs)),
            (
                "last held-out bits",
                *(_number(_last(run.metrics, "held_out", "held_out_bits"), ".3f") for run in self.runs),
            ),
        ]
        rows += [
            (fact, *(dict(run.facts.lines).get(fact, "") for run in self.runs))
            for fact in ("host", "device", "versions")
        ]
        return [(name, first, second) for name, first, second in rows if first or second]

    def times(self) -> list[tuple[str, str, str, str]]:
        """Return (name, of A, of B, difference) of every part of the steps' time, as text, and of all of it."""
        total = TimePart(
            "step", *(sum(column) for column in zip(*(part[1:] for part in self.parts), strict=True))
        )
        unit = self.unit
        return [
            (part.name, unit.text(part.first), unit.text(part.second), unit.text(part.difference, "+.4g"))
            for part in (*self.parts, total)
        ]

    def config_differences(self) -> list[tuple[str, str, str]]:
        """Return (key, value in A, value in B) of every key of the configs that differs, as TOML writes values."""
        first, second = (dict(_flat(_table(run.settings))) for run in self.runs)
        keys = sorted({*first, *second})
        return [
            (key, _shown(first, key), _shown(second, key))
            for key in keys
            if first.get(key) != second.get(key)
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as values that JSON can represent; times in the traces' unit."""
        return {
            "runs": [
                {
                    "title": run.title,
                    "step": number,
                    "makespan": float(step.bubbles.makespan),
                    "tokens_per_second": run.facts.tokens_per_second,
                    "peak_held": None if step.peaks is None else int(step.peaks.max()),
                }
                for run, number, step in zip(self.runs, self.numbers, self.steps, strict=True)
            ],
            "mean_times": {part.name: [part.first, part.second] for part in self.parts},
            "config": {key: [first, second] for key, first, second in self.config_differences()},
            "sentence": self.sentence,
        }


def pair_of(first: RunView, second: RunView, step: int | None) -> RunPair:
    """Return two runs with the steps to compare: `step` of both, or the last traced one of each."""
    pair = RunPair((first, second), (first.choose(step), second.choose(step)))
    a, b = pair.steps
    if a.measured != b.measured:
        measured, simulated = (first, second) if a.measured else (second, first)
        raise ConfigError(
            f"{measured.title} was measured in seconds and {simulated.title} simulated in ticks; compare two runs, or two "
            "simulations"
        )
    return pair


def _counts(step: StepAnalysis) -> str:
    trace = step.trace
    stages, microbatches = (int(column.max(initial=-1)) + 1 for column in (trace.stage, trace.microbatch))
    return f"{trace.ranks}, {stages}, {microbatches}"


def _idle(step: StepAnalysis) -> str:
    times = mean_times(step)
    return f"{sum(times[1:]) / sum(times):.1%}" if sum(times) else ""


def _held(step: StepAnalysis) -> str:
    return "" if step.peaks is None else amount(step.trace, int(step.peaks.max()))


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _last(metrics: Sequence[Mapping[str, Any]], kind: str, key: str) -> float | None:
    values = (finite(row.get(key)) for row in reversed(metrics) if row.get("kind") == kind)
    return next((value for value in values if value is not None), None)


def _table(settings: str) -> dict[str, Any]:
    try:
        return tomllib.loads(settings)
    except (ValueError, RecursionError):
        return {}


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value).lower() if isinstance(value, bool) else repr(value)


def _shown(table: Mapping[str, str], key: str) -> str:
    return table.get(key, "not set")


def write_comparison(path: str | Path, pair: RunPair) -> Path:
    """Write the page of two runs."""
    unit, traces = pair.unit, [step.trace for step in pair.steps]
    ranks = max(trace.ranks for trace in traces)
    packed = _packed(pair)
    held = packed["memory"]["unit"] if packed["memory"] else ""
    counted = "bytes" if held == "bytes" else "activations"
    labels = tuple(f"rank, {name}" for name in NAMES)
    places = figures(ranks, unit, planned=True, memory=f"held ({counted})" if held else "", labels=labels)
    del places["bars"]
    places["overview"] = overview_figure(pair.steps, unit, NAMES)
    places |= curves(*(run.metrics for run in pair.runs))
    data = {
        "unit": unit.name,
        "held": counted,
        "ranks": rank_colours(ranks),
        "figures": [f"{name}-figure" for name in ("overview", "measured", "planned", "memory")]
        + [name for name in places if name.startswith("curve-")],
        "steps": [packed],
    }
    present = {cause for step in pair.steps for cause in step.bubbles.causes}
    causes = [(style.colour, style.meaning) for cause, style in CAUSES.items() if cause in present]
    text = fill_template(
        "compare.html",
        data,
        places,
        title=" and ".join(run.title for run in pair.runs),
        titles=list(zip(NAMES, pair.titles, LINES, strict=True)),
        sentence=pair.sentence,
        figures_of_runs=pair.figures(),
        times=pair.times(),
        config=pair.config_differences(),
        has_configs=all(run.settings for run in pair.runs),
        problems=[problem for run in pair.runs for problem in run.problems],
        step={
            "kinds": [s for kind, s in KINDS.items() if any((t.kind == kind).any() for t in traces)],
            "several_stages": any(
                step["blocks"]["several"] for step in (packed, {"blocks": packed["planned"]})
            ),
            "causes": causes,
            "above_plan": False,
            "merged": False,
        },
        causes=[(BUSY, "computing"), *causes],
        memory_ranks=packed["memory"]["ranks"] if packed["memory"] else [],
    )
    return write_page(path, text)


def _packed(pair: RunPair) -> dict[str, Any]:
    """Return one step for the page's script, in which B is where a report has the plan of A."""
    first, second = (step_data(step, pair.unit) for step in pair.steps)
    memory, other = first["memory"], second["memory"]
    if memory and other and memory["unit"] == other["unit"]:
        drawn = max(memory["ranks"], other["ranks"], key=len)[:MAX_CURVES]
        memory = memory | {"ranks": drawn, "planned": other["measured"]}
    else:
        memory = None
    return first | {
        "ranks": max(first["ranks"], second["ranks"]),
        "planned": second["blocks"],
        "planned_gaps": second["gaps"],
        "memory": memory,
    }
