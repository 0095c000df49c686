"""The zero-bubble paper's rates, and zb-auto compared with the handcrafted schedules and with the optimum.

The costs and rates are those of tables 9 and 5 of 2401.10241, in microseconds and as shares of the longest rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bench.optimum import optimum
from penstock.schedule.check import check
from penstock.schedule.families import build_schedule
from penstock.schedule.schedule import Schedule
from penstock.simulate.costs import Communication, Costs, Link
from penstock.simulate.simulator import simulate
from penstock.trace.bubbles import longest, makespan
from penstock.trace.events import Trace

COLUMNS = ("1f1b", "1f1b-i", "zb-h1", "zb-h2")
# Model, ranks, microbatches, virtual stages of 1F1B-I, (F, B, W, latency) in µs, and the rates in the order of COLUMNS.
TABLE = (
    ("6.2B", 8, 24, 4, (29718, 29444, 19927, 527), (0.2347, 0.0808, 0.1323, 0.0698)),
    ("6.2B", 8, 32, 4, (29802, 29428, 19530, 577), (0.1898, 0.0628, 0.1045, 0.0559)),
    ("6.2B", 8, 64, 4, (29935, 29621, 19388, 535), (0.1091, 0.0320, 0.0554, 0.0294)),
    ("28.3B", 32, 96, 2, (10419, 10207, 7715, 408), (0.2646, 0.1493, 0.1421, 0.0641)),
    ("28.3B", 32, 128, 2, (10408, 10204, 7703, 408), (0.2168, 0.1164, 0.1106, 0.0490)),
    ("28.3B", 32, 256, 2, (10402, 10248, 7698, 460), (0.1352, 0.0624, 0.0594, 0.0257)),
)
MIXES = (
    (10, 10, 10, 0),
    (10, 10, 10, 1),
    (10, 12, 6, 2),
    (10, 10, 7, 1),
    (20, 20, 13, 3),
    (4, 6, 4, 1),
    (10, 9, 13, 1),
    (7, 12, 12, 2),
    (16, 10, 8, 0),
    (9, 18, 5, 1),
)
"""F, B, W and latency of the ten cost mixes that zb-auto is measured with."""
Mix = tuple[int, int, int, int]


@dataclass(frozen=True)
class Rate:
    """One published rate and ours, for comparison at four digits."""

    model: str
    p: int
    m: int
    column: str
    published: float
    ours: float


def rates() -> Iterator[Rate]:
    """Compute the paper's table. Its 1F1B-I is a closed form, not a timed order: (m+(p-1)/v)(F+B+W) + (2pv-p-2)c."""
    for model, p, m, v, mix, published in TABLE:
        f, b, w, c = mix
        work = m * (f + b + w)
        for column, rate in zip(COLUMNS, published, strict=True):
            if column == "1f1b-i":
                cost = work + (p - 1) * (f + b + w) / v + (2 * p * v - p - 2) * c
            else:
                cost = int(longest(timed(build_schedule(column, p, m), mix)))
            yield Rate(model, p, m, column, rate, 1 - work / cost)


@dataclass(frozen=True)
class Gap:
    """Makespans at p=4, m=8: zb-auto's, the handcrafted schedule's, the best of all orders, and the proved bound."""

    limit: int
    mix: Mix
    ours: int
    handcrafted: int
    best: int
    proved: int


def gaps(seconds: float = 60.0) -> Iterator[Gap]:
    """Compare zb-auto's makespan with the optimum in p and in 2p activations."""
    p, m = 4, 8
    for name, limit in (("zb-h1", p), ("zb-h2", 2 * p)):
        for mix in MIXES:
            f, b, w, c = mix
            schedule = build_schedule("zb-auto", p, m, costs=(f, b, w), latency=c, memory_limit=limit)
            trace = timed(schedule, mix)
            best = optimum(schedule, _costs(schedule, mix), trace, limit, seconds)
            handcrafted = int(makespan(timed(build_schedule(name, p, m), mix)))
            yield Gap(limit, mix, int(makespan(trace)), handcrafted, best.makespan, best.proved)


def timed(schedule: Schedule, mix: Mix) -> Trace:
    """Prove and simulate a schedule."""
    return simulate(check(schedule).program, _costs(schedule, mix))


def _costs(schedule: Schedule, mix: Mix) -> Costs:
    f, b, w, c = mix
    return Costs.of(schedule.placement, f, b, w, communication=Communication(same_node=Link(c)))
