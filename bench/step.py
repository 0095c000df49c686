"""Two ranks on two cores: a step of a mid-size model, ours and torch.distributed.pipelining's.

The model has 8 blocks of width 256; sequences of 128, 8 microbatches of 4. The times are compared with two figures, all
from alternating runs in the same two processes:

- the ideal: a single process's step of the full model, in one thread, divided by two, with the other core idle;
- the bound: both processes at once, each alone with half of the microbatches on the unsplit model.

Interleaved 1F1B runs with two stages per rank, as the other schedules of several stages do, and with four, where its bubble
is half as long.

    python -m bench.step [--rounds N] [--schedule NAME ...] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

from bench.compare import Figures, main, ratio
from bench.peer import SCHEDULES, Job, race, single_step
from penstock.runtime.workers.pool import LocalProcesses

RANKS = 2
QUICK = ("1f1b", "zb-v")


def cases(schedules: Sequence[str], quick: bool) -> dict[str, Job]:
    """Return the mid-size model, or if quick a small one, under each schedule, by the name of its row."""
    width, sequence = (32, 32) if quick else (256, 128)
    found = {}
    for name in schedules:
        found[name] = Job(
            blocks=8,
            width=width,
            sequence=sequence,
            microbatches=8,
            rows=4,
            schedule=name,
            virtual=2 if SCHEDULES[name][1] else 1,
        )
        if name == "interleaved-1f1b":
            found[f"{name} v=4"] = replace(found[name], virtual=4)
    return found


def alone(rank: int, one: Job, rounds: int) -> list[float]:
    """Return the single-process step, with one rank computing and the other idle."""
    if rank:
        return []
    step, times = single_step(one, one.microbatches), []
    step()
    for _ in range(rounds):
        begin = perf_counter()
        step()
        times.append(perf_counter() - begin)
    return times


def measure(options: argparse.Namespace) -> Figures:
    """Measure every schedule's step over the ideal, the peer's and the bound."""
    columns = ("ours/ideal", "peer/ideal", "ours/peer", "ours/bound", "peer/bound")
    rows: dict[str, dict[str, float]] = {}
    schedules = options.schedule or (QUICK if options.quick else list(SCHEDULES))

    def line(name: str, row: dict[str, float]) -> str:
        return f"{name:22}" + "".join(f"{row[c]:12.3f}" for c in columns)

    yield f"{'schedule':22}" + "".join(f"{c:>12}" for c in columns)
    with LocalProcesses(RANKS) as pool:
        for name, one in cases(schedules, options.quick).items():
            ideal = statistics.median(pool.run(RANKS, alone, one, 3, timeout=300)[0]) / RANKS
            contest = {who: (who, one) for who in ("ours", "peer", "half")}
            times = pool.run(RANKS, race, RANKS, contest, options.rounds, timeout=600)[0]
            rows[name] = {
                "ours/ideal": statistics.median(times["ours"]) / ideal,
                "peer/ideal": statistics.median(times["peer"]) / ideal,
                "ours/peer": ratio(times["ours"], times["peer"]),
                "ours/bound": ratio(times["ours"], times["half"]),
                "peer/bound": ratio(times["peer"], times["half"]),
            }
            yield line(name, rows[name])
    middle = {c: statistics.median(row[c] for row in rows.values()) for c in columns}
    yield line("median", middle)
    best = {who: min(rows, key=lambda name: rows[name][f"{who}/bound"]) for who in ("ours", "peer")}
    for who, name in best.items():
        yield f"best of {who} over the bound: {rows[name][f'{who}/bound']:.3f} ({name})"
    yield f"{options.rounds} rounds, median of the ratios round by round"
    result = {"ours": middle["ours/ideal"], "peer": middle["peer/ideal"], "ratio": middle["ours/peer"]}
    return {**result, "schedules": rows, "best": best, "rounds": options.rounds}


def add(parser: argparse.ArgumentParser) -> None:
    """Add this bench's arguments."""
    parser.add_argument("--schedule", nargs="+", choices=list(SCHEDULES), help="schedules (default all)")


if __name__ == "__main__":
    main(measure, __doc__, rounds=7, add=add)
