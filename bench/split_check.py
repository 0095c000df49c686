"""Cost of checking what is split: a stage's backward, and a model with a forward of its own.

The blocks are those of `bench.split`. The share is of a run of 1,000 steps of 8 microbatches. The bytes are the most that a
stage holds in a step, in the first one and in the second. The model has four of the blocks, on two ranks; its first step is
taken with `ExecutionOptions.check_split` and without.

    python -m bench.split_check [--rounds N] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import statistics
from time import perf_counter

import torch
from torch import Tensor, nn

import penstock
from bench.compare import Figures, alternate, main
from bench.split import MICROBATCHES, mid_size, tiny
from penstock.runtime.workers.pool import LocalProcesses
from penstock.stage.compute.stage import Stage
from penstock.stage.layers import Layer
from penstock.stage.module import StageModule
from penstock.stage.values import Message

STEPS = 1000
RANKS = 2
BLOCKS = {"mid-size": mid_size, "tiny": tiny}


class Model(nn.Module):
    """Four blocks in a loop."""

    def __init__(self, block: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([BLOCKS[block]()[0] for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def first_steps(rank: int, block: str, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of first steps with the check and without, and of later steps."""
    torch.set_num_threads(1)
    x = torch.cat([BLOCKS[block]()[1]] * MICROBATCHES)

    def seconds(pipe: penstock.Pipeline) -> float:
        start = perf_counter()
        pipe.step(x, x)
        return perf_counter() - start

    found: dict[str, list[float]] = {"checked": [], "unchecked": [], "usual": []}
    for number in range(2 * rounds):
        execution = penstock.ExecutionOptions(check_split=number % 2 == 0)
        with penstock.Pipeline(
            Model(block), nn.functional.mse_loss, ranks=RANKS, microbatches=MICROBATCHES, execution=execution
        ) as pipe:
            found["unchecked" if number % 2 else "checked"].append(seconds(pipe))
            found["usual"].append(seconds(pipe))
    return found


def microbatch(stage: Stage, x: torch.Tensor) -> float:
    """Return the seconds of a forward and both halves of a backward."""
    message = (Message((x.clone(),), None, (True,)),)
    start = perf_counter()
    (out,) = stage.forward(0, message, split=True)
    grad = (Message((torch.ones_like(out.leaves[0]),)),)
    stage.backward_input(0, grad)
    stage.backward_weight(0)
    return perf_counter() - start


def peaks(stage: Stage, x: torch.Tensor) -> list[int]:
    """Return the peak bytes in each of two steps."""
    found = []
    for step in range(2):
        stage.begin(step)
        held = []
        outs = []
        for n in range(MICROBATCHES):
            outs.append(stage.forward(n, (Message((x.clone(),), None, (True,)),), split=True)[0])
            held.append(stage.held_bytes)
        for n, out in enumerate(outs):
            stage.backward_input(n, (Message((torch.ones_like(out.leaves[0]),)),))
            held.append(stage.held_bytes)
            stage.backward_weight(n)
        found.append(max(held))
    return found


def measure(options: argparse.Namespace) -> Figures:
    """Measure both blocks of `bench.split`."""
    torch.set_num_threads(1)
    result: dict[str, object] = {"steps": STEPS, "microbatches": MICROBATCHES}
    yield "| block | checked / usual microbatch | looking, µs per step | share of the run | bytes held, step 1 | 2 |"
    yield "|---|---|---|---|---|---|"
    for name, make in BLOCKS.items():
        block, x = make()
        stage = Stage(0, StageModule([Layer("0", lambda block=block: block)]))
        microbatch(stage, x)

        def checked(block: torch.nn.Module = block, x: torch.Tensor = x) -> float:
            return microbatch(Stage(0, StageModule([Layer("0", lambda: block)])), x)

        def usual(stage: Stage = stage, x: torch.Tensor = x) -> float:
            return microbatch(stage, x)

        def looking(stage: Stage = stage, x: torch.Tensor = x) -> float:
            start = perf_counter()
            for step in range(100):
                stage.split_checks.queue(-step, [x])
            return (perf_counter() - start) / 100

        times = alternate({"checked": checked, "usual": usual, "looking": looking}, options.rounds)
        one, other, look = (statistics.median(times[key]) for key in ("checked", "usual", "looking"))
        share = (one - other + STEPS * look) / (STEPS * MICROBATCHES * other)
        first, second = peaks(Stage(0, StageModule([Layer("0", lambda block=block: block)])), x)
        result[name] = {
            "checked_over_usual": one / other, "looking_us": 1e6 * look, "share": share, "bytes_held": [first, second],
        }  # fmt: skip
        yield f"| {name} | {one / other:.2f} | {1e6 * look:.0f} | {share:.3%} | {first:,} | {second:,} |"
    yield ""
    yield "| model | ranks | first step, ms | without the check, ms | usual step, ms | share of the run |"
    yield "|---|---|---|---|---|---|"
    with LocalProcesses(RANKS) as pool:
        for name in BLOCKS:
            for ranks in ("threads", "processes"):
                job = (name, options.rounds)
                times = first_steps(0, *job) if ranks == "threads" else pool.run(RANKS, first_steps, *job)[0]
                checked, without, usual = (1e3 * statistics.median(seconds) for seconds in times.values())
                share = (checked - without) / (STEPS * usual)
                result[f"{name} in {ranks}"] = {
                    "checked_ms": checked, "without_ms": without, "usual_ms": usual, "share": share,
                }  # fmt: skip
                yield f"| {name} | {ranks} | {checked:.1f} | {without:.1f} | {usual:.1f} | {share:.3%} |"
    return result


if __name__ == "__main__":
    main(measure, __doc__, rounds=15)
