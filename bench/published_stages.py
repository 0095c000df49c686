"""Steps simulated from published seconds of every stage."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from bench.comparison import Row
from bench.fit import with_rates
from bench.published_runs import DATA, runs
from penstock.plan.cluster import read_cluster
from penstock.plan.prediction import predict, step_program
from penstock.profile.model_profile import of_shape
from penstock.schedule.ops import Kind
from penstock.simulate.costs import Communication, Costs, Link
from penstock.simulate.simulator import simulate
from penstock.trace.bubbles import makespan

MICROBATCHES, HIDDEN = 128, 3072
_PLAIN = {"base": "1F1B", "redis": "1F1B, layers redistributed"}


def stage_rows(quick: bool) -> Iterator[Row]:
    """Yield the simulated step of every row of ``stage_times.csv`` beside the measured one."""
    cluster = read_cluster("a100-80gb")
    with open(DATA / "stage_times.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows[: 2 if quick else None]:
        forward, backward, s, t = (np.array(row[key].split(), float) * 1e-6 for key in "FBST")
        seconds = np.zeros((len(forward), len(Kind)))
        seconds[:, Kind.F], seconds[:, Kind.B] = forward + s, backward + t
        message = int(row["s"]) * HIDDEN * 2
        link = Link(cluster.node.latency, cluster.node.bandwidth)
        program = step_program("1f1b", len(forward), MICROBATCHES, None)
        trace = simulate(program, Costs(seconds, communication=Communication(message, link)))
        step = float(makespan(trace)) + _optimizer_seconds(int(row["s"]), int(row["v"]))
        plain = _PLAIN.get(row["method"])
        yield Row(
            group="plain 1F1B" if plain else "vocabulary passes",
            model=f"{row['method']}, vocabulary {int(row['v']):,}",
            layout=plain or "F + S and B + T on each rank",
            unit="s",
            predicted=step,
            measured=float(row["iter_s"]),
        )


def _optimizer_seconds(sequence: int, vocabulary: int) -> float:
    """Return the optimizer's seconds of the same model with an even split, by the preset."""
    run = next(run for run in runs() if run.model == "GPT-8GPU" and run.sequence == sequence)
    assert run.profile.shape is not None
    profile = of_shape(replace(run.profile.shape, vocabulary=vocabulary))
    cluster = with_rates(read_cluster("a100-80gb"), {}, run.gpus)
    return predict(profile, cluster, run.layout, sequence=sequence, batch=8).parts["optimizer"]
