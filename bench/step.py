"""Two ranks on two cores: a step of a mid-size model, ours and torch.distributed.pipelining's.

The model has 8 blocks of width 256; sequences of 128, 8 microbatches of 4. The times are compared with three figures, all
from alternating runs in the same two processes:

- the ideal: a single process's step of the full model, in one thread, divided by two, with the other core idle;
- the bound: both processes at once, each alone with half of the microbatches on the unsplit model;
- plain: one process's step of the full model over the whole batch, by plain PyTorch with two threads per operation.

The column threads/plain has our ranks as two threads of one process over plain, in turn in that process.

Interleaved 1F1B runs with two stages per rank, as the other schedules of several stages do, and with four, where its bubble
is half as long.

On CUDA the model has blocks of width 2048 in bf16 and sequences of 1024. With one device, one process has all stages: there
is nothing to wait for, and what is measured is what a schedule costs the host and the device.

    python -m bench.step [--device cuda] [--rounds N] [--schedule NAME ...] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from bench.compare import Figures, alternate, main, ratio
from bench.peer import SCHEDULES, Job, add_device, plain_step, race, ranks_on, single_step, timed
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses

RANKS = 2
QUICK = ("1f1b", "zb-v")


def cases(schedules: Sequence[str], device: str, quick: bool) -> dict[str, Job]:
    """Return the mid-size model, or if quick a small one, under each schedule, by the name of its row."""
    width, sequence = (32, 32) if quick else (256, 128) if device == "cpu" else (2048, 1024)
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
            device=device,
            dtype=torch.float32 if device == "cpu" else torch.bfloat16,
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
        times.append(timed(one, step))
    return times


def beside_plain(one: Job, rounds: int) -> float:
    """Return the step of ranks that are threads over plain PyTorch's, with as many threads per operation as ranks."""

    x, y = one.batch()
    with Pipeline(
        one.model(), nn.functional.mse_loss, microbatches=one.microbatches, schedule=one.schedule,
        ranks=RANKS, virtual_stages=one.virtual if one.schedule != "zb-v" else 1, device=one.device,
    ) as pipe:  # fmt: skip
        runs = {
            "threads": partial(timed, one, partial(pipe.step, x, y)),
            "plain": partial(timed, one, plain_step(one, RANKS)),
        }
        times = alternate(runs, rounds)
    return ratio(times["threads"], times["plain"])


def measure(options: argparse.Namespace) -> Figures:
    """Measure every schedule's step over the ideal, the peer's, the bound and plain PyTorch's."""
    columns = (
        "ours/ideal",
        "peer/ideal",
        "ours/peer",
        "ours/bound",
        "peer/bound",
        "ours/plain",
        "threads/plain",
    )
    rows: dict[str, dict[str, float]] = {}
    schedules = options.schedule or (QUICK if options.quick else list(SCHEDULES))

    def line(name: str, row: dict[str, float]) -> str:
        return f"{name:22}" + "".join(f"{row[c]:14.3f}" for c in columns)

    yield f"{'schedule':22}" + "".join(f"{c:>14}" for c in columns)
    ranks = ranks_on(options.device, RANKS)
    with LocalProcesses(ranks) as pool:
        for name, one in cases(schedules, options.device, options.quick).items():
            ideal = statistics.median(pool.run(ranks, alone, one, 3, timeout=300)[0]) / ranks
            contest = {who: (who, one) for who in ("ours", "peer", "half", "plain")}
            times = pool.run(ranks, race, ranks, contest, options.rounds, timeout=600)[0]
            rows[name] = {
                "ours/ideal": statistics.median(times["ours"]) / ideal,
                "peer/ideal": statistics.median(times["peer"]) / ideal,
                "ours/peer": ratio(times["ours"], times["peer"]),
                "ours/bound": ratio(times["ours"], times["half"]),
                "peer/bound": ratio(times["peer"], times["half"]),
                "ours/plain": ratio(times["ours"], times["plain"]),
                "threads/plain": beside_plain(one, options.rounds),
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
    add_device(parser)
    parser.add_argument("--schedule", nargs="+", choices=list(SCHEDULES), help="schedules (default all)")


if __name__ == "__main__":
    main(measure, __doc__, rounds=7, add=add)
