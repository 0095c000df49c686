"""The page of two runs: timelines on one scale, time by cause, differences of the configs, and curves over each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.show.comparison.run_pair import NAMES, RunPair
from penstock.show.page import fill_template, write_page
from penstock.show.page_data import MAX_CURVES, step_data
from penstock.show.palette import BUSY, CAUSES, KINDS


def write_comparison(path: str | Path, pair: RunPair) -> Path:
    """Write the page of two runs."""
    return write_page(path, _page(pair))


def _page(pair: RunPair) -> str:
    from penstock.show.figures import LINES, curves, figures, rank_colours
    from penstock.show.report_page.overview import overview_figure

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
    return fill_template(
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
