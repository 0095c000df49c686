"""Searched schedules beside proved optima, beside the published orders with costs of real models, and at scale.

The first table has every pipeline of `bench.proved_orders`: makespan and bubble of the best order, ours within ten seconds,
and its lower bound. The second compares with the best order of the catalogue. 200 vectors of costs come from closed forms of
real models with their embeddings and heads, on presets of clusters, over 2 to 16 ranks and p to 4p microbatches; a rank may
hold a half, three quarters, or all of 1F1B's activations, p stages of the model's 1/p. Every schedule with one copy of the
weights competes; the search then gets the winner's placement and kind of backward. The last line is 64 ranks with 512
microbatches. With --sleep, five found schedules and the published ones run on sleeping stages, in turn.

    python -m bench.search [--seconds T] [--sleep] [--rounds N] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from itertools import product
from typing import Any, NamedTuple

from bench.compare import Figures, main
from bench.proved_orders import PROVED
from bench.searched_sleep import sleeping
from penstock.base.errors import ConfigError, ScheduleError
from penstock.plan.cluster import read_cluster
from penstock.plan.op_costs import op_costs
from penstock.plan.run_layout import Layout
from penstock.plan.stage_costs import layer_times, stage_costs
from penstock.profile.model_profile import Profile, of_shape
from penstock.profile.model_shape import ModelShape
from penstock.schedule.check import check
from penstock.schedule.families import FAMILIES, Family
from penstock.schedule.memory import Budget
from penstock.schedule.placement import Placement
from penstock.simulate.certified_search import search_schedule
from penstock.simulate.costs import Costs
from penstock.simulate.simulator import simulate
from penstock.trace.bubbles import makespan

CAPS = (Fraction(1, 2), Fraction(3, 4), Fraction(1))
CLUSTERS = ("a100-80gb*8x16", "h100*8x16", "h200*8x16", "b200*8x16", "mi300x*8x16")
VECTORS = 200


class Vector(NamedTuple):
    """A model on a cluster, with the counts of a pipeline."""

    model: str
    cluster: str
    p: int
    m: int
    tp: int
    recompute: str


def measure(options: argparse.Namespace) -> Figures:
    """Compare with optima, with the catalogue and at scale, or run found schedules."""
    if options.sleep:
        return (yield from sleeping(options.rounds, options.quick))
    optima = yield from _optima(PROVED[:3] if options.quick else PROVED, 60.0 if options.quick else 10.0)
    gains = yield from _gains(4 if options.quick else VECTORS, 0.3 if options.quick else options.seconds)
    large = yield from _large(3.0 if options.quick else 10.0)
    return {"optima": optima, "gains": gains, "large": large}


def _optima(cases: Any, seconds: float) -> Iterator[Any]:
    yield f"{'proved':62}{'best':>6}{'ours':>6}{'above':>8}{'bubble':>8}{'bound':>7}{'s':>6}"
    rows = []
    for case in cases:
        found = search_schedule(case.placed, case.m, case.table, case.backward, case.budget, seconds=seconds)
        above = int(found.makespan) / case.makespan - 1
        rows.append({"case": case.name, "best": case.makespan, "above": above, **found.as_dict()})
        yield (
            f"{case.name:62}{case.makespan:6}{found.makespan:6}{above:8.2%}{found.bubble:8}{found.lower_bound:7}"
            f"{found.seconds:6.1f}"
        )
    most = max(row["above"] for row in rows)
    yield f"reached {sum(row['above'] == 0 for row in rows)} of {len(rows)}; {most:.2%} above the optimum at most"
    return rows


def vectors(count: int) -> list[Vector]:
    """Return models, clusters and counts, in a fixed order that mixes all."""
    grid = product((2, 4, 8, 12, 16), (1, 2, 4), ("none", "full"))
    every = [
        (model, cluster, p, rounds, recompute)
        for (p, rounds, recompute), model in product(grid, MODELS)
        for cluster in CLUSTERS
        if MODELS[model].layers % (2 * p) == 0
    ]
    chosen = [every[n * len(every) // count] for n in range(count)]
    return [
        Vector(model, cluster, p, rounds * p, max(1, MODELS[model].hidden // 2048), again)
        for model, cluster, p, rounds, again in chosen
    ]


def priced(vector: Vector, placement: Placement) -> Costs:
    """Return the costs of a vector's stages."""
    cluster = read_cluster(vector.cluster)
    layout = Layout(
        pp=vector.p, tp=min(8, vector.tp), microbatch=1, v=placement.stages // vector.p, recompute=vector.recompute,
        split="cost",
    )  # fmt: skip
    times = layer_times(_profile(vector.model), cluster, layout, 2048)
    return op_costs(stage_costs(times, layout, placement), cluster, layout)


def published(vector: Vector, cap: Fraction) -> tuple[str, Family, float] | None:
    """Return the quickest family that fits in a part of 1F1B's activations, with its makespan."""
    best = None
    for name, family in FAMILIES.items():
        if family.searches or family.has_copies or family.virtual_stages > 2:
            continue
        try:
            schedule = family.build(vector.p, vector.m)
            if (Budget(0).peak(schedule) > cap * schedule.stages).any():
                continue
            took = float(makespan(simulate(check(schedule).program, priced(vector, schedule.placement))))
        except (ScheduleError, ConfigError):
            continue
        if best is None or took < best[2]:
            best = name, family, took
    return best


def _gains(count: int, seconds: float) -> Iterator[Any]:
    yield "\nof 1F1B's memory  vectors   median     best    worst   median gap   published best"
    rows = []
    for vector, cap in product(vectors(count), CAPS):
        best = published(vector, cap)
        if best is None:
            continue
        name, family, took = best
        placement = family.place(vector.p, family.virtual_stages)
        found = search_schedule(
            placement, vector.m, priced(vector, placement), "split" if family.splits_backward else "full",
            Budget(int(cap * placement.stages)), seconds=seconds,
        )  # fmt: skip
        # Sums of seconds in another order may differ by rounding.
        gain = round(1 - float(found.makespan) / took, 12) + 0.0
        rows.append({**vector._asdict(), "cap": str(cap), "published": name, "gain": gain, "gap": found.gap})
    for cap in CAPS:
        own = [row for row in rows if row["cap"] == str(cap)]
        if not own:
            continue
        gains, names = [row["gain"] for row in own], [row["published"] for row in own]
        yield (
            f"{cap!s:17}{len(own):9}{statistics.median(gains):9.2%}{max(gains):9.2%}{min(gains):9.2%}"
            f"{statistics.median(row['gap'] for row in own):13.2%}   {statistics.mode(names)}"
        )
    return rows


def _large(seconds: float) -> Iterator[Any]:
    placement = Placement.waves(64)
    costs = Costs.of(placement, 6, 8, 4)
    theirs = float(makespan(simulate(check(FAMILIES["v-half"].build(64, 512)).program, costs)))
    found = search_schedule(placement, 512, costs, "split", Budget(66), seconds=seconds)
    yield (
        f"\n64 ranks, 512 microbatches, V, 6,8,4, half of the memory: {float(found.makespan):.0f} in {found.seconds:.1f} s; "
        f"V-Half {theirs:.0f}; gap {found.gap:.2%}"
    )
    return {"v_half": theirs, **found.as_dict()}


def _gpt2(name: str, layers: int, hidden: int, heads: int) -> ModelShape:
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_size=hidden // heads,
        ffn=4 * hidden,
        vocabulary=50257,
        gated=False,
        positions=2048,
        tied=True,
        norm_weights=4,
        final_norm_weights=2,
        qkv_bias=True,
        output_bias=True,
        ffn_bias=True,
    )


def _llama(
    name: str, *, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocabulary: int
) -> ModelShape:
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_size=hidden // heads,
        ffn=ffn,
        vocabulary=vocabulary,
    )


MODELS = {
    shape.name: shape
    for shape in (
        _gpt2("GPT-2", 12, 768, 12),
        _gpt2("GPT-2 medium", 24, 1024, 16),
        _gpt2("GPT-2 XL", 48, 1600, 25),
        _llama("Llama-3.2 1B", layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocabulary=128256),
        _llama("Llama-2 7B", layers=32, hidden=4096, heads=32, kv_heads=32, ffn=11008, vocabulary=32000),
        _llama("Llama-3 8B", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256),
        _llama("Llama-2 13B", layers=40, hidden=5120, heads=40, kv_heads=40, ffn=13824, vocabulary=32000),
        _llama("Llama-3 70B", layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocabulary=128256),
    )
}


@cache
def _profile(model: str) -> Profile:
    return of_shape(MODELS[model])


def _add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of a search (default 1)")
    parser.add_argument(
        "--sleep", action="store_true", help="run found and published schedules on sleeping stages"
    )


if __name__ == "__main__":
    main(measure, __doc__, rounds=7, add=_add)
