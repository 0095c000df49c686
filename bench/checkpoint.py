"""Cost of a checkpoint for the training: the delay by ``save``, beside a save that waits for the disk.

The pipeline has two ranks in threads, the optimizer is AdamW, and one step runs before each save. The stall is the time of
``save`` if no earlier one is being written. The blocking save also waits until the checkpoint has its name, fsync included.

    python -m bench.checkpoint [--width N] [--layers N] [--rounds N] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from time import perf_counter

import torch
from torch import nn

from bench.compare import Figures, main
from penstock.checkpoint.checkpoints import Checkpoints
from penstock.checkpoint.find import read_manifest
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.pipeline import Pipeline


def saved(folder: Path, width: int, layers: int, rounds: int) -> dict[str, float]:
    """Return the median seconds of a save's stall and of a blocking save, and the bytes of a checkpoint."""
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    x = torch.randn(2, width)
    stalls, whole = [], []
    with Pipeline(model, nn.functional.mse_loss, microbatches=2, ranks=2) as pipe:
        optimizer = PipelineOptimizer(pipe, torch.optim.AdamW, lr=1e-4)
        with Checkpoints(folder, pipe, optimizer, keep_last=2) as checkpoints:
            for n in range(rounds + 1):
                pipe.step(x, x)
                optimizer.step()
                begin = perf_counter()
                checkpoints.save()
                stall = perf_counter() - begin
                path = checkpoints.wait()
                blocking = perf_counter() - begin
                assert path is not None, "it was saved"
                if n:  # the first one makes the memory for the copies
                    stalls.append(stall)
                    whole.append(blocking)
            size = read_manifest(path).bytes
    stall, blocking = statistics.median(stalls), statistics.median(whole)
    return {
        "bytes": size,
        "stall_seconds": stall,
        "blocking_seconds": blocking,
        "stall_share": stall / blocking,
    }


def measure(options: argparse.Namespace) -> Figures:
    """Measure the stall and the blocking save."""
    with tempfile.TemporaryDirectory() as place:
        result = saved(Path(place), options.width, options.layers, options.rounds)
    yield f"checkpoint     {result['bytes'] / 1e6:.1f} MB"
    yield f"blocking save  {result['blocking_seconds'] * 1e3:.1f} ms"
    yield f"stall          {result['stall_seconds'] * 1e3:.1f} ms: {result['stall_share']:.1%} of it"
    yield f"{options.rounds} rounds, medians"
    return {**result, "rounds": options.rounds}


def add(parser: argparse.ArgumentParser) -> None:
    """Add this bench's arguments."""
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)


if __name__ == "__main__":
    main(measure, __doc__, rounds=5, add=add)
