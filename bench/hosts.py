"""Stages that sleep, on two hosts with two ranks each: steps on links of 1 to 20 ms, and the simulator's prediction.

The hosts are namespaces of this machine (`tests.support.hosts`). Between them messages take the link's latency over TCP, and
within a host they go through shared memory. The simulator is told the times of the stage's ops when nothing else runs, and
the latency: that of the link as it was set, or half of a message's round trip as the doctor measures it, which has the
system's own time for a message, too. A step lasts from the first op's start to the last op's end; the quickest counts, since
other work of the machine only makes sleeping stages later. The offsets of the ranks' clocks are measured as for a trace; the
hosts of this bench have one clock, so each offset is an error.

    python -m bench.hosts [--rounds N] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from typing import Any

import torch
from tests.support.hosts.hosts import Hosts, every, missing

from bench.compare import Figures, main
from bench.sleep import alone, batch, loss, model, oversleep, step_seconds, virtual_of
from penstock.measure.links import Edges, round_trips
from penstock.runtime.gather_trace import align_clocks
from penstock.runtime.options import ExecutionOptions
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.world import World
from penstock.schedule.families import FAMILIES, build_schedule
from penstock.schedule.program import lower
from penstock.simulate.costs import Communication, Costs, Link
from penstock.simulate.simulator import simulate
from penstock.trace.bubbles import makespan

RANKS, PER_HOST, MICROBATCHES, ELEMENTS = 4, 2, 8, 1024
TIMES = 4.0
"""Factor on the sleeps of `bench.sleep`: a forward takes 16 ms, so that latencies shape the step and noise does not."""
SCHEDULE_NAMES = ("gpipe", "1f1b", "zb-h1", "zb-v")
LATENCIES = (0.001, 0.005, 0.02)


def rank(names: list[str], rounds: int) -> None:
    """Run the steps of every schedule as one rank, and print the seconds of each and the errors of the clocks."""
    torch.set_num_threads(1)
    oversleep()
    x, y = batch(MICROBATCHES, ELEMENTS)
    seconds, errors, links = {}, [], []
    for name in names:
        virtual = virtual_of(name) if FAMILIES[name].chooses_virtual_stages else 1
        with Pipeline(
            model(name, RANKS, TIMES), loss, microbatches=MICROBATCHES, schedule=name, virtual_stages=virtual,
            execution=ExecutionOptions(check_finite=False),
        ) as pipe:  # fmt: skip
            seconds[name] = [step_seconds(pipe, x, y) for _ in range(rounds + 1)][1:]
            assert pipe.world is not None, "started as one of several processes"
            alignment = align_clocks(pipe.world)
            errors.append((float(abs(alignment.offset).max()), float(alignment.error.max())))
            links.append(latency_between_hosts(pipe.world))
    os.write(1, json.dumps([seconds, errors, statistics.median(links)]).encode())


def latency_between_hosts(world: World) -> float:
    """Return half of a round trip between neighbours on two hosts, the same on every rank; every rank calls it."""
    ends = (PER_HOST - 1, PER_HOST)
    here = world.rank in ends
    peer = sum(ends) - world.rank
    with Edges(world, {peer: (2, 2)} if here else {}, 60.0) as channel:
        channel.open(1)
        times = round_trips(channel, peer, torch.zeros(ELEMENTS), 3, 9, world.rank == ends[0]) if here else []
        channel.finish()
        found: list[list[float]] = world.gather(times)
    return statistics.median(found[ends[0]]) / 2


def quickest_ops(name: str) -> dict[str, float]:
    """Return seconds of a stage's ops, the quickest of several measurements, as for the steps."""
    found = [alone(name, ELEMENTS, TIMES) for _ in range(4)]
    return {kind: min(each[kind] for each in found) for kind in found[0]}


def predicted(name: str, latency: float, each: dict[str, float]) -> float:
    """Return the simulator's makespan in seconds, from the times of a stage's ops and the latency between the hosts."""
    virtual = virtual_of(name)
    schedule = build_schedule(name, RANKS, MICROBATCHES, virtual)
    f, b, w, full = (each[kind] * virtual for kind in ("F", "I", "W", "B"))
    between = Communication(other_node=Link(latency), ranks_per_node=PER_HOST)
    costs = Costs.of(schedule.placement, f, b, w, full=full, communication=between)
    return float(makespan(simulate(lower(schedule), costs)))


def measure(options: argparse.Namespace) -> Figures:
    """Measure every schedule at every latency."""
    if missing():
        raise SystemExit(missing())
    torch.set_num_threads(1)
    names = ("1f1b",) if options.quick else SCHEDULE_NAMES
    rows: list[dict[str, Any]] = []
    clocks = []
    yield f"{'':30}{'told the link':>22}{'told a round trip':>22}"
    yield (
        f"{'schedule':18}{'latency, ms':>12}"
        + 2 * f"{'simulated':>11}{'differs':>11}"
        + f"{'measured, ms':>14}"
    )
    by_virtual = {virtual_of(name): quickest_ops(name) for name in names}
    ops = {name: by_virtual[virtual_of(name)] for name in names}
    with Hosts(RANKS // PER_HOST, apart=False, imports=("torch._dynamo", "bench.hosts")) as hosts:
        for latency in (0.005,) if options.quick else LATENCIES:
            hosts.link(delay=latency)
            jobs = hosts.spread("bench.hosts:rank", names, options.rounds, per_host=PER_HOST)
            if any(every(jobs, timeout=300)):
                raise SystemExit("".join(job.err for job in jobs)[-4000:])
            seconds, errors, measured_latency = json.loads(jobs[0].out)
            clocks += [(latency, *both) for both in errors]
            for name in names:
                measured = min(seconds[name])
                both = [predicted(name, each, ops[name]) for each in (latency, measured_latency)]
                differs = [measured / simulated - 1 for simulated in both]
                rows.append({"schedule": name, "latency": latency, "round_trip": 2 * measured_latency} | {
                    "measured": measured, "simulated": both, "difference": differs,
                })  # fmt: skip
                yield (
                    f"{name:18}{1e3 * latency:12g}"
                    + "".join(
                        f"{1e3 * simulated:11.1f}{difference:11.1%}"
                        for simulated, difference in zip(both, differs, strict=True)
                    )
                    + f"{1e3 * measured:14.1f}"
                )
    link, trip = (max(abs(row["difference"][n]) for row in rows) for n in (0, 1))
    within = all(error <= bound for _, error, bound in clocks)
    latency, error, bound = max(clocks, key=lambda one: one[1])
    yield f"largest difference {link:.1%} told the link, {trip:.1%} told a round trip; quickest of {options.rounds} steps"
    yield (
        f"clocks: largest error {1e3 * error:.2f} ms, at {1e3 * latency:g} ms, with a bound of {1e3 * bound:.2f} ms; "
        f"{'all' if within else 'not all'} within their bounds"
    )
    return {"rows": rows, "largest": {"link": link, "round_trip": trip}, "clocks": clocks}


if __name__ == "__main__":
    main(measure, __doc__, rounds=5)
