"""What the tests of this folder run as a rank, on any host."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.base.errors import PenstockError
from penstock.cli import main
from penstock.parallel.mesh import MeshShape
from penstock.runtime.gather_trace import align_clocks
from penstock.runtime.options import ParallelOptions
from penstock.runtime.pipeline import Pipeline
from tests.support import plain

LAYERS, MICROBATCHES = 8, 4


def say(**values: Any) -> None:
    """One line of JSON in one write, so that lines do not mix."""
    os.write(1, (json.dumps(values) + "\n").encode())


def pipeline(timeout: float, mesh: MeshShape | None = None, **more: Any) -> Pipeline:
    torch.set_num_threads(2 if "CORES" in os.environ else 1)
    return Pipeline(
        plain.model(LAYERS), nn.functional.mse_loss, microbatches=MICROBATCHES, mesh=mesh, timeout=timeout,
        parallel=ParallelOptions(bucket_bytes=64), **more,
    )  # fmt: skip


def train(folder: str, cases: list[tuple[str, int, int, list[str]]]) -> None:
    """Three steps by each schedule and mesh; leaves losses, weights and gradients in a file, and how messages travelled."""
    for number, (schedule, pp, dp, order) in enumerate(cases):
        mesh = MeshShape(pp, dp, 1, tuple(order)) if dp > 1 else None
        virtual = 2 if schedule == "interleaved-1f1b" else 1
        with pipeline(60.0, mesh, schedule=schedule, virtual_stages=virtual) as pipe:
            optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
            history = []
            for n in range(3):
                optimizer.zero_grad()
                result = pipe.step(*plain.batch(n, 2 * MICROBATCHES * dp))
                pipe.clip_grad_norm_(0.5)
                optimizer.step()
                history.append(result.losses)
            weights = {n: p.detach() for n, p in pipe.named_parameters()}
            torch.save([history, weights], Path(folder) / f"{number}-{os.environ['RANK']}.pt")
            assert pipe.world is not None
            assert pipe.world.channel is not None
            say(case=number, rank=pipe.rank, replica=pipe.replica, ways=pipe.world.channel.ways)


def steps(count: int, timeout: float, dp: int = 1) -> None:
    """Steps until the last one or a failure; a line for each, and one with the error."""
    mesh = MeshShape(int(os.environ["WORLD_SIZE"]) // dp, dp, 1, ("dp", "pp", "tp")) if dp > 1 else None
    try:
        with pipeline(timeout, mesh) as pipe:
            for n in range(count):
                loss = pipe.step(*plain.batch(n, 2 * MICROBATCHES * dp)).loss.item()
                say(step=n, loss=loss.hex())
                time.sleep(0.05)
    except PenstockError as error:
        say(kind=type(error).__name__, error=str(error))
        sys.exit(1)


def command(*words: str) -> None:
    """The command ``penstock`` with its arguments."""
    sys.argv = ["penstock", *words]
    sys.exit(main())


def threads() -> None:
    """Says how many CPU threads this rank takes of its host's cores."""
    with pipeline(60.0) as pipe:
        say(threads=pipe.threads)


def clocks() -> None:
    """Aligns the clocks, and says by how much each differs and within which error."""
    with pipeline(60.0) as pipe:
        pipe.step(*plain.batch(0, 2 * MICROBATCHES))
        assert pipe.world is not None
        alignment = align_clocks(pipe.world)
        trace = pipe.gather_trace()
        assert trace is not None
        say(
            offset=alignment.offset.tolist(), error=alignment.error.tolist(),
            starts=[float(trace.start[trace.rank == rank].min()) for rank in range(pipe.ranks)],
            bound=float(trace.info["clock_error"]),
        )  # fmt: skip
