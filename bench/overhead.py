"""Stages of almost no work: the overhead of running an op, ours and the peers'.

Stages are one linear layer of width 64 on a sequence of 16; 2 ranks, 32 microbatches. In processes the peer is
torch.distributed.pipelining; in threads, for GPipe, torchgpipe. On CUDA with one device, one process has all stages.

    python -m bench.overhead [--device cuda] [--rounds N] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import nn

from bench.compare import Figures, alternate, main, ratio
from bench.peer import Job, add_device, race, ranks_on, single_step, timed, torchgpipe_step
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses

MICROBATCHES, RANKS = 32, 2
CASES = (("interleaved-1f1b", 4), ("1f1b", 1))


def job(schedule: str, virtual: int, device: str) -> Job:
    """Return a job with one linear layer per stage."""
    return Job(
        blocks=RANKS * virtual,
        width=64,
        sequence=16,
        microbatches=MICROBATCHES,
        rows=1,
        schedule=schedule,
        virtual=virtual,
        tiny=True,
        device=device,
    )


def threads(one: Job, rounds: int) -> dict[str, list[float]]:
    """Return seconds of a step in threads, of the unsplit model and, for GPipe, of torchgpipe, round by round."""
    x, y = one.batch()
    with Pipeline(
        one.model(), nn.functional.mse_loss, microbatches=MICROBATCHES, schedule=one.schedule, ranks=RANKS,
        virtual_stages=one.virtual, device=one.device,
    ) as pipe:  # fmt: skip
        runs: dict[str, Callable[[], object]] = {
            "ours": lambda: pipe.step(x, y),
            "unsplit": single_step(one, MICROBATCHES),
        }
        if one.schedule == "gpipe":
            runs["torchgpipe"] = torchgpipe_step(one, RANKS)
        return alternate({name: lambda run=run: timed(one, run) for name, run in runs.items()}, rounds)


def measure(options: argparse.Namespace) -> Figures:
    """Measure every case in processes, then in threads."""
    rows: dict[str, dict[str, float]] = {}
    yield f"{'processes':22} {'ours ms':>9} {'peer ms':>9} {'ours/peer':>10} {'our us/op':>10}"
    ranks = ranks_on(options.device, RANKS)
    with LocalProcesses(ranks) as pool:
        for schedule, virtual in CASES:
            one = job(schedule, virtual, options.device)
            contest = {"ours": ("ours", one), "peer": ("peer", one), "half": ("half", one)}
            times = pool.run(ranks, race, ranks, contest, options.rounds, timeout=600)[0]
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
            yield f"{key:22} {ours * 1e3:9.1f} {peer * 1e3:9.1f} {rows[key]['ratio']:10.3f} {extra:10.0f}"
    torch.set_num_threads(1)
    for schedule, virtual in (*CASES, ("gpipe", 1)):
        times = threads(job(schedule, virtual, options.device), options.rounds)
        middle = {name: statistics.median(seconds) for name, seconds in times.items()}
        row = rows.setdefault(f"{schedule} v={virtual}", {})
        row |= {"threads": middle["ours"], "unsplit": middle["unsplit"]}
        line = f"threads {schedule} v={virtual}: {middle['ours'] * 1e3:.1f} ms; unsplit {middle['unsplit'] * 1e3:.1f} ms"
        if "torchgpipe" in times:
            row |= {"torchgpipe": middle["torchgpipe"], "ratio": ratio(times["ours"], times["torchgpipe"])}
            line += f"; torchgpipe {middle['torchgpipe'] * 1e3:.1f} ms; ours/torchgpipe {row['ratio']:.3f}"
        yield line
    yield "us/op: (our step - each process alone on its half of the work) / ops of a rank"
    first = rows["interleaved-1f1b v=4"]
    return {"ours": first["ours"], "peer": first["peer"], "ratio": first["ratio"], "schedules": rows}


if __name__ == "__main__":
    main(measure, __doc__, rounds=15, add=add_device)
