"""Figures of the simulator and the catalogue: closed forms, published rates, optima, and speed.

    python -m bench.simulate [--only SECTION ...] [--quick] [--json]

Sections, in this order:

    forms    the literature's closed forms beside the simulator, exactly; and some that are published without a condition
    table    the zero-bubble paper's rates to four digits
    optimum  zb-auto beside the proved optimum at p=4, m=8 (OR-Tools CP-SAT)
    plan     p=64, v=4, m=512 interleaved: build, check, lower and simulate; and PyTorch's planning alone
    scaling  1F1B from 10^4 to 3.4 x 10^7 ops: time and peak memory
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import islice
from time import perf_counter
from types import SimpleNamespace

from bench.compare import Figures, main

SIZES = ((16, 320), (64, 800), (256, 2000), (1024, 4883), (2048, 8192))
EACH = 12
"""With ``--quick``, about so many cases of every closed form."""


def forms(quick: bool) -> Figures:
    """Compare every closed form, and count the exact cases."""
    from bench.closed_forms import outcomes
    from bench.formulas import conditional, exact

    chosen = list(exact())
    if quick:
        chosen = [
            replace(f, cases=cases[:: 1 + len(cases) // EACH]) for f in chosen if (cases := list(f.cases))
        ]
    held = list(outcomes(chosen))
    cases, failed = sum(o.cases for o in held), sum(len(o.failed) for o in held)
    yield f"closed forms: {cases - failed} of {cases} cases exact, {len(held)} forms"
    for o in held:
        yield f"  {o.family:17} {o.metric:21} {o.cases - len(o.failed):5}/{o.cases:<5} {o.says}"
        for case in o.failed:
            yield f"    does not hold: {case}"
    yield "as printed, beyond what they hold for:"
    loose = []
    for form, comment in conditional():
        (o,) = outcomes([form])
        loose.append({**asdict(o), "found": comment})
        yield f"  {o.family:17} {o.metric:21} {o.cases - len(o.failed):5}/{o.cases:<5} {o.says}: {comment}"
    return {"cases": cases, "failed": failed, "exact": [asdict(o) for o in held], "conditional": loose}


def table(quick: bool) -> Figures:
    """Compare the zero-bubble paper's table 5 with ours."""
    from bench.zero_bubble import COLUMNS, rates

    found = list(islice(rates(), len(COLUMNS) if quick else None))
    exact = [rate for rate in found if round(rate.ours, 4) == rate.published]
    yield (
        f"zero-bubble paper, table 5: {len(exact)} of {len(found)} rates to four digits "
        "(rates of the longest rank; published, then ours)"
    )
    yield "  model   p    m  " + "".join(f"{column:>16}" for column in COLUMNS)
    for n in range(0, len(found), len(COLUMNS)):
        row = found[n : n + len(COLUMNS)]
        cells = "".join(f"   {rate.published:.4f} {rate.ours:.4f}" for rate in row)
        yield f"  {row[0].model:6} {row[0].p:2} {row[0].m:4} {cells}"
    return {"rates": [asdict(rate) for rate in found]}


def optimum(quick: bool) -> Figures:
    """Compare zb-auto and the handcrafted schedules with the best of all orders."""
    from bench.zero_bubble import gaps

    found = []
    yield "makespan at p=4, m=8 beside the optimum (CP-SAT):"
    yield "  limit  F,B,W,c            zb-auto  handcrafted  best  proved  zb-auto above proved"
    for gap in islice(gaps(), 1 if quick else None):
        found.append(gap)
        above = gap.ours / gap.proved - 1
        yield (
            f"  {gap.limit:5}  {','.join(map(str, gap.mix)):16} {gap.ours:9} {gap.handcrafted:12} {gap.best:5} "
            f"{gap.proved:7} {above:21.2%}"
        )
    worst = max(gap.ours / gap.proved - 1 for gap in found)
    yield f"  largest: {worst:.2%}"
    return {"largest": worst, "cases": [asdict(gap) for gap in found]}


def plan(quick: bool) -> Figures:
    """Time a large interleaved schedule from nothing to a simulation, beside PyTorch's construction of its schedule."""
    from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

    from bench.scaling import case

    p, m, v = (8, 64, 4) if quick else (64, 512, 4)
    counts = ("interleaved-1f1b", p, m, v, "--check")
    found = {
        "in a fresh process": case(*counts),
        "in a running one": case(*counts, "--warm"),
        "with nothing compiled yet": case(*counts, compiled=False),
    }
    # What every rank does: the schedule's constructor plans all ranks. Of the stages it reads their counts only.
    stages = [
        SimpleNamespace(group_size=p, group_rank=0, num_stages=p * v, stage_index=c * p) for c in range(v)
    ]
    begin = perf_counter()
    theirs = ScheduleInterleaved1F1B(stages, m)
    seconds = perf_counter() - begin
    assert len(theirs.pipeline_order) == p
    yield f"interleaved, p={p} v={v} m={m}, {found['in a running one']['ops']:,} ops, seconds:"
    for name, times in found.items():
        parts = ", ".join(f"{key} {times[key]:.3f}" for key in ("build", "check_and_lower", "simulate"))
        yield f"  {times['total']:6.3f}  {name}: {parts} (and {times['imports']:.2f} of imports)"
    yield f"  {seconds:6.3f}  PyTorch's ScheduleInterleaved1F1B, planning alone"
    return {"ours": found, "torch": seconds}


def scaling(quick: bool) -> Figures:
    """Time 1F1B from ten thousand to tens of millions of ops."""
    from bench.scaling import case
    from penstock.schedule.jit import COMPILE_FROM

    yield f"1F1B, seconds (kernels loaded before the clock starts; below {COMPILE_FROM:,} ops they run as plain Python):"
    yield "   ranks  microbatches        ops  build  lower  simulate   total     cpu  µs/op  peak GiB"
    found = []
    for p, m in SIZES[:2] if quick else SIZES:
        times = case("1f1b", p, m, 1, "--warm")
        found.append({"ranks": p, "microbatches": m, **times})
        yield (
            f"  {p:6} {m:13} {times['ops']:10,.0f} {times['build']:6.2f} {times['lower']:6.2f} {times['simulate']:9.2f} "
            f"{times['total']:7.2f} {times['cpu']:7.2f} {times['total'] / times['ops'] * 1e6:6.3f} {times['peak_gib']:9.2f}"
        )
    return {"sizes": found}


SECTIONS: dict[str, Callable[[bool], Figures]] = {
    section.__name__: section for section in (forms, table, optimum, plan, scaling)
}


def measure(options: argparse.Namespace) -> Figures:
    """Measure the requested sections."""
    results = {}
    for name, section in SECTIONS.items():
        if name in options.only:
            results[name] = yield from section(options.quick)
            yield ""
    return results


def add(parser: argparse.ArgumentParser) -> None:
    """Add this bench's arguments."""
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION")


if __name__ == "__main__":
    main(measure, __doc__, add=add)
