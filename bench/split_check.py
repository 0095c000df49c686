"""Cost of checking the split backward: one checked microbatch per stage, and a comparison of settings in every step.

The blocks are those of `bench.split`. The share is of a run of 1,000 steps of 8 microbatches. The bytes are the most that a
stage holds in a step, in the first one and in the second.

    python -m bench.split_check [--rounds N] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import statistics
from time import perf_counter

import torch

from bench.compare import Figures, alternate, main
from bench.split import MICROBATCHES, mid_size, tiny
from penstock.stage.compute.stage import Stage
from penstock.stage.layers import Layer
from penstock.stage.module import StageModule
from penstock.stage.values import Message

STEPS = 1000


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
    for name, (block, x) in {"mid-size": mid_size(), "tiny": tiny()}.items():
        stage = Stage(0, StageModule([Layer("0", lambda block=block: block)]))
        microbatch(stage, x)

        def checked(block: torch.nn.Module = block, x: torch.Tensor = x) -> float:
            return microbatch(Stage(0, StageModule([Layer("0", lambda: block)])), x)

        def usual(stage: Stage = stage, x: torch.Tensor = x) -> float:
            return microbatch(stage, x)

        def looking(stage: Stage = stage, x: torch.Tensor = x) -> float:
            start = perf_counter()
            for _ in range(100):
                stage.split_checks.begin()
                stage.split_checks.queue([x])
            return (perf_counter() - start) / 100

        times = alternate({"checked": checked, "usual": usual, "looking": looking}, options.rounds)
        one, other, look = (statistics.median(times[key]) for key in ("checked", "usual", "looking"))
        share = (one - other + STEPS * look) / (STEPS * MICROBATCHES * other)
        first, second = peaks(Stage(0, StageModule([Layer("0", lambda block=block: block)])), x)
        result[name] = {
            "checked_over_usual": one / other, "looking_us": 1e6 * look, "share": share, "bytes_held": [first, second],
        }  # fmt: skip
        yield f"| {name} | {one / other:.2f} | {1e6 * look:.0f} | {share:.3%} | {first:,} | {second:,} |"
    return result


if __name__ == "__main__":
    main(measure, __doc__, rounds=15)
