"""What becomes of one order of another project: read, proved, simulated, and run beside plain PyTorch."""

from __future__ import annotations

from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from tests.support import plain
from tests.support.schedule_oracle import ends, halves, is_valid, lists
from torch import Tensor
from torch.nn.functional import mse_loss

from bench.conformance.orders import Order
from penstock.base.errors import ScheduleError, SplitError
from penstock.runtime.pipeline import Pipeline
from penstock.schedule.check import check
from penstock.schedule.ops import parse_op
from penstock.schedule.schedule import Schedule
from penstock.schedule.text import read_csv
from penstock.simulate.costs import Communication, Costs, Link
from penstock.simulate.simulator import simulate

SECONDS = {"F": 3, "I": 4, "W": 2}
LATENCY = 1
ROUNDING = {"rtol": 1e-5, "atol": 1e-7}


class Outcome(NamedTuple):
    """Result of one order.

    Attributes:
        word: "bits", "rounding", "refused", or "WRONG".
        why: reason of a refusal, or what differs.
    """

    word: str
    why: str = ""


def judge(order: Order, path: Path) -> Outcome:
    """Read, prove, simulate and run one order; its file is written to the path."""
    path.write_text("".join(",".join(cells) + "\n" for cells in order.cells))
    meant = [[parse_op(op) for op in line] for line in order.ops]
    schedule = read_csv(path)
    if lists(schedule) != meant:
        return Outcome("WRONG", "other ops were read than are meant")
    if order.ops != order.rules:
        return Outcome("WRONG", "our own rules make another order than the package")
    valid = is_valid(schedule.placement, order.microbatches, meant)
    try:
        program = check(schedule).program
    except ScheduleError as error:
        return Outcome("WRONG" if valid else "refused", str(error).replace(f"{path} ", ""))
    if not valid:
        return Outcome("WRONG", "proved, but not valid")
    costs = {kind: [seconds + s for s in range(schedule.stages)] for kind, seconds in SECONDS.items()}
    link = Link(LATENCY)
    trace = simulate(
        program, Costs.of(schedule.placement, *costs.values(), communication=Communication(same_node=link))
    )
    costs["B"] = [i + w for i, w in zip(costs["I"], costs["W"], strict=True)]
    timed = [end for rank in ends(schedule, costs, LATENCY) for op, _, end in rank for _ in halves(op)]
    if trace.end.tolist() != timed:
        return Outcome("WRONG", "the simulator has other times")
    return run(order, path, schedule)


def run(order: Order, path: Path, schedule: Schedule) -> Outcome:
    """Take one step in threads, and compare it with plain PyTorch."""
    layers = order.layers or [1] * schedule.stages
    count, m = sum(layers), order.microbatches
    try:
        with Pipeline(
            plain.model(count), mse_loss, schedule=str(path), ranks=schedule.ranks, microbatches=m,
            split={"ranges": list(pairwise(accumulate(layers, initial=0)))},
        ) as pipe:  # fmt: skip
            losses = pipe.step(*plain.batch(0, 2 * m)).losses
            ours = [losses, *(p.grad for _, p in pipe.named_parameters())]
    except SplitError as error:
        return Outcome("refused", str(error))
    theirs = plainly(count, m)
    if all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)):
        return Outcome("bits")
    if not schedule.in_order and all(
        torch.allclose(a, b, **ROUNDING) for a, b in zip(ours, theirs, strict=True)
    ):
        return Outcome("rounding")
    return Outcome("WRONG", "losses or gradients are not those of plain PyTorch")


@cache
def plainly(layers: int, microbatches: int) -> list[Tensor]:
    """Return the losses and gradients of plain PyTorch."""
    net = plain.model(layers)
    losses, _ = plain.step(net, mse_loss, *plain.batch(0, 2 * microbatches), microbatches)
    return [losses, *(p.grad for p in net.parameters())]
