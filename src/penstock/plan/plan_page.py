"""The page of a plan: one HTML file with a step's timeline, the memory of every rank, and the other layouts of a search.

Timeline and idle time are drawn as on the report page; memory by rank, and time over memory, are figures of their own.
Like the report page, it works from ``file://`` and asks the network for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.plan.cluster import Cluster
from penstock.plan.explore.outlook import change_text, changes, grouped_reasons, headline, left_out_text
from penstock.plan.explore.search_result import SearchResult, SimulatedLayout
from penstock.plan.prediction import Prediction
from penstock.plan.rank_devices import devices_text
from penstock.plan.rank_memory import RankMemory
from penstock.profile.model_profile import Profile
from penstock.show.analysis import StepAnalysis
from penstock.show.blocks import several_stages
from penstock.show.figures import figures, height_of_ranks, plain_figure
from penstock.show.page import MAX_ROWS, fill_template, write_page
from penstock.show.page_data import step_data
from penstock.show.palette import BUSY, CAUSES, KINDS, MEMORY_PARTS
from penstock.show.units import (
    Unit,
    batch_text,
    interval_text,
    parameters_text,
    reserve_text,
    size_text,
    time_text,
    unit_of_seconds,
)
from penstock.trace.bubbles import makespan
from penstock.trace.events import Trace

GIGABYTE = 1e9
_LIMIT = "#d03030"
_DOTS, _BEST = "#3f7fc4", "#e07b00"


def plan_figures(
    plan: Prediction, outcomes: Sequence[SimulatedLayout], unit: Unit
) -> dict[str, dict[str, Any]]:
    """Return the figures as JSON for ``Bokeh.embed.embed_item``, by the id of their element."""
    places = figures(len(plan.memory), unit, planned=False, memory="")
    from bokeh.embed import json_item

    places["memory"] = dict(json_item(_memory_figure(plan)))
    if outcomes:
        places["frontier"] = dict(json_item(_frontier(plan, outcomes)))
    return places


def _memory_figure(plan: Prediction) -> Any:
    from bokeh.models import HoverTool, Range1d

    ranks = len(plan.memory)
    most = max(*plan.capacities, *(rank.total for rank in plan.memory)) / GIGABYTE
    plot = plain_figure(
        "memory-parts",
        Range1d(start=0, end=1.04 * most),
        Range1d(start=ranks - 0.5, end=-0.5),
        height=height_of_ranks(ranks),
    )
    plot.grid.visible = False
    plot.xaxis.axis_label, plot.yaxis.axis_label = "GB", "rank"
    plot.yaxis.ticker.mantissas = [1, 2, 5]
    plot.yaxis.ticker.min_interval = 1
    plot.yaxis.ticker.num_minor_ticks = 0
    columns: dict[str, list[Any]] = {
        name: [] for name in ("rank", "left", "right", "part", "size", "total", "op", "colour")
    }
    for number, rank in enumerate(plan.memory):
        left = 0.0
        for name, (colour, meaning) in MEMORY_PARTS.items():
            size = float(getattr(rank, name)) / GIGABYTE
            if size > 0:
                text, total = size_text(size * GIGABYTE), size_text(rank.total)
                values = (number, left, left + size, meaning, text, total, rank.peak_op, colour)
                for key, value in zip(columns, values, strict=True):
                    columns[key].append(value)
                left += size
    bars = plot.hbar(
        y="rank", left="left", right="right", height=0.8, line_color=None, fill_color="colour", source=columns
    )
    tip = '<div class="tip"><b>@part</b>: @size<br>rank @rank, @total in all, most at @op</div>'
    plot.add_tools(HoverTool(renderers=[bars], tooltips=tip, point_policy="follow_mouse"))
    limits = sorted(set(plan.capacities))
    plot.vspan(x=[limit / GIGABYTE for limit in limits], line_color=_LIMIT, line_width=2, line_dash="8 4")
    return plot


def _frontier(plan: Prediction, outcomes: Sequence[SimulatedLayout]) -> Any:
    from bokeh.models import DataRange1d, HoverTool

    x, y = DataRange1d(range_padding=0.06), DataRange1d(range_padding=0.08)
    plot = plain_figure("frontier", x, y, height=320)
    plot.xaxis.axis_label, plot.yaxis.axis_label = "memory of the fullest device (GB)", "step (s)"
    line = frontier(outcomes)
    plot.step(
        [outcome.peak_bytes / GIGABYTE for outcome in line],
        [outcome.step_seconds for outcome in line],
        mode="after",
        line_color=_DOTS,
        line_alpha=0.6,
        line_width=1.5,
    )
    columns: dict[str, list[Any]] = {
        "memory": [outcome.peak_bytes / GIGABYTE for outcome in outcomes],
        "seconds": [outcome.step_seconds for outcome in outcomes],
        "size": [size_text(outcome.peak_bytes) for outcome in outcomes],
        "step": [time_text(outcome.step_seconds) for outcome in outcomes],
        "layout": [str(outcome.layout).replace(",", ", ") for outcome in outcomes],
        "colour": [_BEST if outcome.layout == plan.layout else _DOTS for outcome in outcomes],
        "dot": [13 if outcome.layout == plan.layout else 8 for outcome in outcomes],
    }
    dots = plot.scatter(
        "memory", "seconds", size="dot", fill_color="colour", fill_alpha=0.75, line_color=None, source=columns
    )
    tip = '<div class="tip"><b>@step</b> a step, @size<br>@layout</div>'
    plot.add_tools(HoverTool(renderers=[dots], tooltips=tip, point_policy="follow_mouse"))
    return plot


def frontier(outcomes: Sequence[SimulatedLayout]) -> list[SimulatedLayout]:
    """Return the layouts that no other beats in both time and memory, by growing memory."""
    line: list[SimulatedLayout] = []
    for outcome in sorted(outcomes, key=lambda outcome: (outcome.peak_bytes, outcome.step_seconds)):
        if not line or outcome.step_seconds < line[-1].step_seconds:
            line.append(outcome)
    return line


MAX_EVENTS = 100_000
"""Events of the timeline."""


def write_plan(
    path: str | Path,
    profile: Profile,
    cluster: Cluster,
    result: Prediction | SearchResult,
    *,
    sequence: int,
    batch: int,
) -> Path:
    """Write the page of a predicted layout, or of a search."""
    return write_page(path, _page(profile, cluster, result, sequence, batch))


def _page(
    profile: Profile, cluster: Cluster, result: Prediction | SearchResult, sequence: int, batch: int
) -> str:
    search = result if isinstance(result, SearchResult) else None
    plan = result if isinstance(result, Prediction) else result.best
    assert plan.trace is not None, "predictions have their trace"
    unit = unit_of_seconds(float(makespan(plan.trace)))
    step = StepAnalysis("plan", plan.trace)
    packed = step_data(step, unit)
    shown = _first_events(plan.trace)
    if shown is not plan.trace:
        packed |= {name: step_data(StepAnalysis("plan", shown), unit)[name] for name in ("blocks", "gaps")}
    outcomes = () if search is None else search.outcomes
    causes = [(style.colour, style.meaning) for cause, style in CAUSES.items() if plan.causes.get(cause)]
    names = [f"{name}-figure" for name in ("measured", "bars", "memory-parts", "frontier")]
    data = {"unit": unit.name, "held": "", "ranks": [], "steps": [packed], "figures": names}
    return fill_template(
        "plan.html",
        data,
        plan_figures(plan, outcomes, unit),
        title=f"{profile.name} on {cluster.name}",
        counts=f"{parameters_text(profile.parameters)} in {profile.blocks} blocks; "
        f"{devices_text(plan.cluster)}; "
        f"{batch_text(batch, sequence, plan.unit)} a step",
        cards=_cards(plan),
        headline=headline(profile, plan if search is None else search, sequence),
        sentences=_sentences(plan, search),
        layout=_layout(plan),
        plans=None if search is None else _plans(search),
        step={
            "kinds": [style for kind, style in KINDS.items() if (plan.trace.kind == kind).any()],
            "several_stages": several_stages(plan.trace),
            "above_plan": False,
            "merged": False,
            "causes": causes,
        },
        cut=f"{len(plan.trace):,}" if shown is not plan.trace else "",
        causes=[(BUSY, "computing"), *causes],
        parts=[MEMORY_PARTS[name] for name in _parts(plan.memory)],
        memory=_memory(plan),
        reasons=[] if search is None else grouped_reasons(search),
        left_out="" if search is None else left_out_text(search),
        changes=[] if search is None else _changes(profile, cluster, search, sequence, batch),
        assumptions=plan.assumptions,
    )


def _first_events(trace: Trace) -> Trace:
    """Return a trace, or the first `MAX_EVENTS` events of a longer one."""
    if len(trace) <= MAX_EVENTS:
        return trace
    # By time and not by row, so that the page shows the beginning of the step on all ranks.
    last = np.partition(trace.start, MAX_EVENTS)[MAX_EVENTS]
    return trace.select(np.flatnonzero(trace.start < last))


def _cards(plan: Prediction) -> list[tuple[str, str]]:
    return [
        (time_text(plan.step_seconds), f"a step ({interval_text(plan.low, plan.high)})"),
        (f"{plan.tokens_per_second:,.0f}", f"{plan.unit} a second"),
        (f"{plan.mfu:.1%}", f"MFU; {plan.tflops_per_device:.4g} TFLOP/s a device"),
        (size_text(plan.peak_bytes), f"on the fullest device, of {size_text(plan.capacity)}"),
        (f"{plan.bubble:.1%}", "of the ranks' time idle"),
    ]


def _sentences(plan: Prediction, search: SearchResult | None) -> list[str]:
    sentences = []
    if not plan.fits:
        sentences.append(
            f"This layout does not fit: the fullest device needs {size_text(plan.peak_bytes - plan.capacity)} more."
        )
    parts = ", ".join(f"{name} {time_text(seconds)}" for name, seconds in plan.parts.items() if seconds)
    sentences.append(f"The step's time: {parts}.")
    if plan.reserved:
        sentences.append(
            f"A layout may use {size_text(plan.capacity)} of a device{reserve_text(plan.reserved)}."
        )
    if search is not None:
        sentences.append(
            f"{search.evaluated:,} layouts were compared and {search.simulated:,} simulated in {search.seconds:.1f} s. "
            + (
                "No layout of the space is quicker."
                if search.complete
                else "The search ended early, so a better one may exist."
            )
        )
    return sentences


_MEANINGS = {
    "pp": "pipeline ranks",
    "dp": "replicas of the pipeline (data parallel)",
    "tp": "devices a stage (tensor parallel)",
    "ep": "devices that divide experts",
    "cp": "devices that divide the tokens of a sample",
    "v": "stages per rank",
    "microbatch": "samples of a microbatch",
    "schedule": "order of the ops",
    "recompute": "activations computed again",
    "shard": "what is divided over replicas",
    "sequence_parallel": "activations divided along the sequence",
    "split": "blocks of every stage",
}


def _layout(plan: Prediction) -> list[tuple[str, str, str]]:
    values = {name: str(value) for name, value in plan.layout.as_dict().items()}
    values |= {"shard": plan.layout.shard_text or "nothing"}
    values |= {"sequence_parallel": "yes" if plan.layout.sequence_parallel else "no"}
    if plan.costs is not None:
        values["split"] = _runs(plan.costs.counts)
    return [(name, values[name], meaning) for name, meaning in _MEANINGS.items()]


def _runs(counts: Sequence[int]) -> str:
    """Return numbers with equal neighbours joined, as in ``3, 14 x 4, 3``."""
    runs: list[list[int]] = []
    for count in counts:
        if runs and runs[-1][1] == count:
            runs[-1][0] += 1
        else:
            runs.append([1, count])
    return ", ".join(f"{times} x {count}" if times > 1 else str(count) for times, count in runs)


def _plans(search: SearchResult) -> dict[str, Any]:
    columns = search.table()
    hint = (
        "One row for each choice of degrees, microbatch and schedule, with its best recompute and sharding."
    )
    return {"heads": tuple(columns), "rows": list(zip(*columns.values(), strict=True)), "hint": hint}


def _parts(memory: Sequence[RankMemory]) -> list[str]:
    """Return the parts of the memory that some rank has."""
    return [name for name in MEMORY_PARTS if any(getattr(rank, name) > 0 for rank in memory)]


def _memory(plan: Prediction) -> dict[str, Any]:
    memory = plan.memory
    parts = _parts(memory)
    rows = [
        (
            number,
            *plan.devices[number : number + 1],
            size_text(rank.total),
            *(size_text(getattr(rank, name)) for name in parts),
            rank.peak_op,
        )
        for number, rank in enumerate(memory[:MAX_ROWS])
    ]
    heads = (
        "rank",
        *(["device"] if plan.devices else []),
        "total",
        *(MEMORY_PARTS[name][1] for name in parts),
        "peak at",
    )
    return {"heads": heads, "rows": rows, "omitted": max(0, len(memory) - MAX_ROWS)}


def _changes(
    profile: Profile, cluster: Cluster, search: SearchResult, sequence: int, batch: int
) -> list[tuple[str, str, str]]:
    rows = []
    for text, best in changes(profile, cluster, search, sequence, batch):
        seconds = "" if best is None else time_text(best.step_seconds)
        rows.append((text, seconds, change_text(search, best)))
    return rows
