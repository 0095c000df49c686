"""Cost of observation: recording a step, building the report page, and opening it.

- Recording: the time of recording an op (two readings of the clock, and the stage's held bytes), times the ops of a rank,
  over a step's forwards and backwards of the demo's model (`penstock train` without a config: two ranks, 8 microbatches).
- The page of 8 ranks x 64 microbatches x 2 stages per rank, a measured step with its plan: seconds and bytes.
- A page of 50,000 blocks: seconds until a headless Chromium has opened and drawn it, and milliseconds between two frames
  while all of it is dragged. Skipped if Chromium or selenium is missing.

    python -m bench.trace [--rounds N] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import torch

from bench.compare import Figures, main
from penstock.runtime.pipeline import Pipeline
from penstock.schedule.check import check
from penstock.schedule.families import build_schedule
from penstock.show.analysis import StepAnalysis
from penstock.show.report import write
from penstock.simulate.costs import Costs
from penstock.simulate.simulator import simulate
from penstock.trace.events import Trace
from penstock.trace.folder import save_step
from penstock.train.config.config import Config
from penstock.train.model.llama import layers, next_token_loss

RANKS = 2
REPEATS = 20_000


def recording(rounds: int) -> dict[str, float]:
    """Return seconds of recording an op, its share of the demo's step, and seconds of keeping one step's trace."""
    torch.set_num_threads(1)
    config = Config()
    tokens = torch.randint(0, 256, (config.train.batch, config.data.sequence + 1))
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    model = layers(config.model, config.train.seed)
    microbatches = config.schedule.microbatches
    with Pipeline(model, next_token_loss, microbatches=microbatches, ranks=RANKS) as pipe:
        times = []
        for _ in range(rounds + 1):
            begin = perf_counter()
            pipe.step(x, y)
            times.append(perf_counter() - begin)
        step = statistics.median(times[1:])
        stage, start, end, held = pipe.stages[0], [0.0], [0.0], [0]
        each = []
        for _ in range(rounds):
            now, slot = perf_counter, 0
            begin = perf_counter()
            for _ in range(REPEATS):
                start[slot] = now()
                end[slot] = now()
                held[slot] = stage.held_bytes
            each.append((perf_counter() - begin) / REPEATS)
        with tempfile.TemporaryDirectory() as folder:
            begin = perf_counter()
            trace = pipe.trace()
            assert trace is not None
            save_step(folder, 1, trace)
            kept = perf_counter() - begin
    op = statistics.median(each)
    ops = len(trace) / RANKS
    return {
        "record_op_seconds": op,
        "record_share": op * ops / step,
        "step_seconds": step,
        "keep_seconds": kept,
    }


def simulated(family: str, ranks: int, microbatches: int, virtual: int | None = None) -> Trace:
    """Return a simulated step."""
    schedule = build_schedule(family, ranks, microbatches, virtual)
    return simulate(check(schedule).program, Costs.of(schedule.placement, 4.0, 5.0, 4.0))


def building(folder: Path, rounds: int) -> dict[str, float]:
    """Return seconds and bytes of the page of a step that is marked as measured, so that it has its plan beside it."""
    trace = simulated("interleaved-1f1b", 8, 64, 2)
    trace = replace(trace, info={**trace.info, "source": "measured"})
    path, times = folder / "page.html", []
    for _ in range(rounds):
        begin = perf_counter()
        write(path, [StepAnalysis("step 1", trace)], title="bench")
        times.append(perf_counter() - begin)
    # The first includes what importing Bokeh takes.
    return {
        "build_first_seconds": times[0],
        "build_seconds": statistics.median(times),
        "page_bytes": path.stat().st_size,
    }


def opening(folder: Path, rounds: int) -> dict[str, float]:
    """Return seconds until the page of 50,000 blocks is drawn, and milliseconds per frame while it is moved."""
    try:
        from tests.support.browser import browser, missing
    except ImportError:
        return {}
    if missing():
        return {}
    trace = simulated("zb-v", 32, 261)
    path = write(folder / "many.html", [StepAnalysis("a", trace)], title="bench")
    times, frames = [], []
    with browser() as chromium:
        for _ in range(rounds):
            begin = perf_counter()
            chromium.driver.get(path.as_uri())
            chromium.wait("return document.body.dataset.ready === 'yes'")
            chromium.driver.execute_async_script(
                "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()))"
            )
            times.append(perf_counter() - begin)
            frames.append(chromium.frame_milliseconds())
    return {
        "blocks": len(trace), "open_seconds": statistics.median(times), "open_bytes": path.stat().st_size,
        "frame_milliseconds": statistics.median(frames),
    }  # fmt: skip


def measure(options: argparse.Namespace) -> Figures:
    """Measure recording, building and opening."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        result = {**building(folder, options.rounds), **recording(options.rounds)}
        result |= opening(folder, options.rounds)
    yield (
        f"recording an op     {result['record_op_seconds'] * 1e6:.2f} µs: {result['record_share']:.5%} of the demo's step "
        f"of {result['step_seconds']:.3f} s"
    )
    yield f"keeping a trace     {result['keep_seconds'] * 1e3:.1f} ms, of a sampled step only"
    yield (
        f"page 8 x 64 x 2     {result['build_first_seconds']:.2f} s the first time, then {result['build_seconds']:.2f} s; "
        f"{result['page_bytes'] / 1e6:.2f} MB"
    )
    if "open_seconds" in result:
        yield (
            f"{result['blocks']:,} blocks       open in {result['open_seconds']:.2f} s "
            f"({result['open_bytes'] / 1e6:.2f} MB); {result['frame_milliseconds']:.0f} ms a picture while dragged"
        )
    else:
        yield "50,000 blocks       not opened: no Chromium here, or no selenium"
    yield f"{options.rounds} rounds, medians"
    return {**result, "rounds": options.rounds}


if __name__ == "__main__":
    main(measure, __doc__, rounds=5)
