"""Traces that look measured, and runs of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from penstock.trace.events import Trace
from penstock.trace.folder import save_step
from tests.support.simulated import built, timed


def measured(
    family: str = "1f1b", ranks: int = 2, microbatches: int = 3, scale: float = 0.01, **info: object
) -> Trace:
    """Return a simulated step as if measured in seconds, without any irregularity."""
    trace = timed(built(family, ranks, microbatches), 1, 1, 1)
    told = {"source": "measured", "schedule": family, "held": "bytes", **info}
    return replace(
        trace, start=trace.start * scale, end=trace.end * scale, held=trace.held * 2**20, info=told
    )


def kept_run(folder: Path, name: str = "my-run") -> Path:
    """Write a run's folder with traces of steps 1 and 10, metrics and a config, and return it."""
    run = folder / name
    save_step(run, 1, measured(scale=0.05))
    save_step(run, 10, measured())
    rows = [
        {"kind": "train", "step": s, "loss": 5.0 / s, "lr": 0.1, "tokens_per_second": 9.0} for s in (1, 2, 3)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "config.toml").write_text('[train]\nname = "<b>markup</b>"\n')
    return run
