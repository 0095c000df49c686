"""Two ranks on two cores: a step of a mid-size model, ours and torch.distributed.pipelining's, over the ideal.

The model has 8 blocks of width 256; sequences of 128, 8 microbatches of 4. The ideal is half of a single process's step
with one thread. Ours and the peer run in turn in the same two processes.

    python -m bench.step [--rounds N] [--json]
"""

from __future__ import annotations

import argparse
import statistics
from time import perf_counter

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from bench.compare import alternate, emit, machine, ratio
from penstock.runtime.local import LocalProcesses
from penstock.runtime.pipeline import Pipeline

WIDTH, SEQUENCE, MICROBATCHES, ROWS, BLOCKS = 256, 128, 8, 4, 8
SCHEDULES = {
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved-1f1b": (ScheduleInterleaved1F1B, 2),
}


def model() -> nn.Sequential:
    """The blocks; the same on every call."""
    torch.manual_seed(0)
    return nn.Sequential(
        *[
            nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(BLOCKS)
        ]
    )


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Input and target of one step."""
    generator = torch.Generator().manual_seed(1)
    shape = (MICROBATCHES * ROWS, SEQUENCE, WIDTH)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def single() -> float:
    """Seconds of one step of the unsplit model, one thread, gradients accumulated over the microbatches."""
    net, (x, y) = model(), batch()

    def step() -> None:
        for a, b in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            (nn.functional.mse_loss(net(a), b) / MICROBATCHES).backward()

    step()
    begin = perf_counter()
    step()
    return perf_counter() - begin


def alone(rank: int, rounds: int) -> list[float]:
    """The single-process step, one rank computing and the other idle."""
    return [single() for _ in range(rounds)] if rank == 0 else []


def both(rank: int, name: str, rounds: int) -> dict[str, list[float]]:
    """Step times of ours and the peer's, in turn; the slower rank counts."""
    peer_schedule, virtual = SCHEDULES[name]
    x, y = batch()
    pipe = Pipeline(
        model(),
        nn.functional.mse_loss,
        microbatches=MICROBATCHES,
        schedule=name,
        ranks=2,
        virtual_stages=virtual,
    )
    net, stages = model(), 2 * virtual
    each = BLOCKS // stages
    parts = [
        PipelineStage(nn.Sequential(*net[s * each : (s + 1) * each]), s, stages, torch.device("cpu"))
        for s in range(rank, stages, 2)
    ]
    peer = peer_schedule(parts if virtual > 1 else parts[0], MICROBATCHES, loss_fn=nn.functional.mse_loss)

    def ours() -> None:
        pipe.step(x, y)

    def theirs() -> None:
        if rank == 0:
            peer.step(x)
        else:
            peer.step(target=y, losses=[])

    def timed(step) -> float:
        dist.barrier()
        begin = perf_counter()
        step()
        seconds = torch.tensor([perf_counter() - begin], dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.item()

    times = alternate({"ours": lambda: timed(ours), "peer": lambda: timed(theirs)}, rounds)
    pipe.close()
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found, lines = {}, [f"{'schedule':18} {'ours/ideal':>10} {'peer/ideal':>10} {'ours/peer':>10}"]
    with LocalProcesses(2) as pool:
        for name in SCHEDULES:
            ideal = statistics.median(pool.run(2, alone, 3, timeout=300)[0]) / 2
            times = pool.run(2, both, name, options.rounds, timeout=600)[0]
            found[name] = {
                "ours": statistics.median(times["ours"]) / ideal,
                "peer": statistics.median(times["peer"]) / ideal,
                "ratio": ratio(times["ours"], times["peer"]),
                "ideal_seconds": ideal,
            }
            row = found[name]
            lines.append(f"{name:18} {row['ours']:10.3f} {row['peer']:10.3f} {row['ratio']:10.3f}")
    medians = {
        key: statistics.median(row[key] for row in found.values()) for key in ("ours", "peer", "ratio")
    }
    lines.append(f"{'median':18} {medians['ours']:10.3f} {medians['peer']:10.3f} {medians['ratio']:10.3f}")
    lines.append(f"ideal: half a single-process step, one thread; {options.rounds} rounds; {machine()}")
    emit({**medians, "schedules": found, "machine": machine(), "rounds": options.rounds}, lines, options.json)


if __name__ == "__main__":
    main()
