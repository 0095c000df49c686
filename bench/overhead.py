"""Stages of almost no work: what running an op costs beside its work, ours and torch.distributed.pipelining's.

Stages are one linear layer of width 64 on a sequence of 16; 2 ranks, 32 microbatches.

    python -m bench.overhead [--rounds N] [--json]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from time import perf_counter

import torch
from torch import nn

from bench.compare import alternate, emit, machine, ratio
from bench.peer import Job, race, single_step
from penstock.runtime.local import LocalProcesses
from penstock.runtime.pipeline import Pipeline

MICROBATCHES, RANKS = 32, 2
CASES = (("interleaved-1f1b", 4), ("1f1b", 1))


def job(schedule: str, virtual: int) -> Job:
    """One linear layer a stage."""
    return Job(RANKS * virtual, 64, 16, MICROBATCHES, 1, schedule, virtual, tiny=True)


def timed(step: Callable[[], object]) -> float:
    """Seconds of one call."""
    begin = perf_counter()
    step()
    return perf_counter() - begin


def threads(schedule: str, virtual: int, rounds: int) -> tuple[float, float]:
    """Median seconds of a step in threads, and of the unsplit model's."""
    one = job(schedule, virtual)
    x, y = one.batch()
    with Pipeline(
        one.model(), nn.functional.mse_loss, microbatches=MICROBATCHES, schedule=schedule, ranks=RANKS,
        virtual_stages=virtual,
    ) as pipe:  # fmt: skip
        plain = single_step(one, MICROBATCHES)
        times = alternate(
            {"ours": lambda: timed(lambda: pipe.step(x, y)), "single": lambda: timed(plain)}, rounds
        )
    return statistics.median(times["ours"]), statistics.median(times["single"])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows, lines = {}, [f"{'processes':22} {'ours ms':>9} {'peer ms':>9} {'ours/peer':>10} {'our us/op':>10}"]
    with LocalProcesses(RANKS) as pool:
        for schedule, virtual in CASES:
            one = job(schedule, virtual)
            contest = {"ours": ("ours", one), "peer": ("peer", one), "half": ("half", one)}
            times = pool.run(RANKS, race, RANKS, contest, options.rounds, timeout=600)[0]
            ours, peer, half = (statistics.median(times[k]) for k in ("ours", "peer", "half"))
            ops = 2 * MICROBATCHES * virtual
            key = f"{schedule} v={virtual}"
            rows[key] = {
                "ours": ours,
                "peer": peer,
                "ratio": ratio(times["ours"], times["peer"]),
                "microseconds_per_op": (ours - half) / ops * 1e6,
            }
            extra = rows[key]["microseconds_per_op"]
            lines.append(
                f"{key:22} {ours * 1e3:9.1f} {peer * 1e3:9.1f} {rows[key]['ratio']:10.3f} {extra:10.0f}"
            )
    torch.set_num_threads(1)
    for schedule, virtual in CASES:
        ours, single = threads(schedule, virtual, options.rounds)
        rows[f"{schedule} v={virtual}"] |= {"threads": ours, "unsplit": single}
        lines.append(f"threads {schedule} v={virtual}: {ours * 1e3:.1f} ms; unsplit {single * 1e3:.1f} ms")
    lines.append(
        f"us/op: (our step - each process alone on its half of the work) / ops of a rank; {machine()}"
    )
    main_row = rows["interleaved-1f1b v=4"]
    result = {
        "ours": main_row["ours"],
        "peer": main_row["peer"],
        "ratio": main_row["ratio"],
        "schedules": rows,
    }
    emit({**result, "machine": machine()}, lines, options.json)


if __name__ == "__main__":
    main()
