"""The picture of README.md: one step of four ranks, stage after stage, by 1F1B and by ZB-V, on one scale of time.

All three compute the same batch: eight microbatches, each of which takes a rank one unit for its forward and one for each
half of its backward. Stage after stage is one microbatch of eight times the work, as a model over several devices without a
pipeline computes it. Times and bubbles are the simulator's.

    python -m bench.readme_picture [--folder docs/_static]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from penstock.schedule.check import check
from penstock.schedule.families import build_schedule
from penstock.show.blocks import lighter
from penstock.show.palette import KINDS
from penstock.simulate.costs import Costs
from penstock.simulate.metrics import measure
from penstock.simulate.simulator import simulate
from penstock.trace.events import Activity, Trace

RANKS, MICROBATCHES = 4, 8
FOLDER = Path(__file__).parents[1] / "docs" / "_static"
DRAWN = (Activity.F, Activity.B, Activity.I, Activity.W)
HEIGHT, GAP = 0.84, 0.04


class Step(NamedTuple):
    """One step of a schedule, simulated."""

    title: str
    trace: Trace
    units: float  # from the first start to the last end
    bubble: float  # share of ranks x units


def steps() -> list[Step]:
    """Return the step stage after stage and by two schedules."""
    drawn = []
    for title, name, microbatches in (
        ("stage after stage", "gpipe", 1),
        ("1F1B", "1f1b", MICROBATCHES),
        ("ZB-V", "zb-v", MICROBATCHES),
    ):
        schedule = build_schedule(name, RANKS, microbatches)
        costs = Costs.of(schedule.placement, *(3 * [MICROBATCHES // microbatches]))
        trace = simulate(check(schedule).program, costs)
        figures = measure(schedule, costs, trace)
        drawn.append(Step(title, trace, float(figures.makespan), float(figures.bubble_of_makespan)))
    return drawn


def draw(axes: Any, step: Step) -> None:
    """Draw the ops of a step, a row for each rank."""
    trace = step.trace
    light = lighter(trace)
    for kind in DRAWN:
        for shade, of_shade in ((KINDS[kind].full, ~light), (KINDS[kind].light, light)):
            for rank in range(trace.ranks):
                rows = np.flatnonzero((trace.kind == kind) & of_shade & (trace.rank == rank))
                times = [(float(trace.start[row]), float(trace.end[row])) for row in rows]
                bars = [(begin + GAP, end - begin - 2 * GAP) for begin, end in times]
                axes.broken_barh(bars, (rank - HEIGHT / 2, HEIGHT), color=shade, linewidth=0)
    axes.set_ylim(trace.ranks - 0.5, -0.5)
    axes.set_yticks([])
    axes.set_title(f"{step.title}: {step.units:g} units, bubble {step.bubble:.0%}", loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)


def main(say: Callable[[str], None] = print) -> None:
    """Write the picture to the folder of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder (default docs/_static)")
    path = write(parser.parse_args().folder)
    say(f"{path}: {path.stat().st_size:,} bytes")


def write(folder: Path) -> Path:
    """Write the picture to a folder, and return its path."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    made = steps()
    # Without random identifiers and dates, the same steps give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "penstock", "font.size": 10}):
        figure = Figure(figsize=(10, 4.6), layout="constrained", facecolor="white")
        for axes, step in zip(figure.subplots(len(made), 1, sharex=True), made, strict=True):
            draw(axes, step)
        axes.set_xlim(0, max(step.units for step in made))
        axes.set_xlabel("time in units: a rank's forward of one microbatch; a row for each of the four ranks")
        keys = [Patch(color=KINDS[kind].full, label=KINDS[kind].meaning) for kind in DRAWN]
        figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), frameon=False)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "timeline.svg"
        figure.savefig(path, metadata={"Date": None})
    return path


if __name__ == "__main__":
    main()
