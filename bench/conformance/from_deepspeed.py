"""Orders of DeepSpeed's TrainSchedule (deepspeed/runtime/pipe/schedule.py, DeepSpeed 0.19)."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

from bench.conformance.orders import Cells, Project, counts, order_of

RANKS, MICROBATCHES = (1, 2, 3, 4, 5), (1, 3, 4, 8)


def projects(quick: bool) -> Iterator[Project]:
    """Yield TrainSchedule."""
    installed = importlib.util.find_spec("deepspeed") is not None
    source = "rules"
    make = by_clock
    if installed:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        source, make = f"deepspeed {deepspeed.__version__}", instructions
    cases = counts(RANKS, MICROBATCHES, quick=quick)
    orders = [order_of(p, m, v, make(p, m), rules=by_clock(p, m)) for p, m, v in cases]
    yield Project("DeepSpeed TrainSchedule", source, orders)


def by_clock(p: int, m: int) -> Cells:
    """Return the ops of every stage by clock, an idle slot where a stage has none.

    A stage runs forwards in the clocks of its own parity and backwards in the others: on stage s, the forward of microbatch
    j is in clock s + 2j and its backward in clock 2 (p + j) - s - 1.
    """
    slots = [[""] * (2 * (m + p - 1)) for _ in range(p)]
    for s in range(p):
        for j in range(m):
            slots[s][s + 2 * j] = f"{s}F{j}"
            slots[s][2 * (p + j) - s - 1] = f"{s}B{j}"
    return slots


def instructions(p: int, m: int) -> Cells:
    """Return the instructions of TrainSchedule in torch's words: ops, messages, and the reduction at the end.

    They name buffers, not microbatches. A buffer holds what the last forward into it was of.
    """
    from deepspeed.runtime.pipe.schedule import TrainSchedule

    words = {
        "ForwardPass": "F", "RecvActivation": "RECV_F", "SendActivation": "SEND_F",
        "BackwardPass": "B", "RecvGrad": "RECV_B", "SendGrad": "SEND_B",
    }  # fmt: skip
    ranks: Cells = []
    for stage in range(p):
        line: list[str] = []
        held: dict[int, int] = {}
        forwards = 0
        for step in TrainSchedule(micro_batches=m, stages=p, stage_id=stage).steps():
            for instruction in step:
                name = instruction.name
                if name == "ReduceGrads":
                    line.append(f"{stage}REDUCE_GRAD")
                if name not in words:
                    continue
                if name == "ForwardPass":
                    held[instruction.buffer_id], forwards = forwards, forwards + 1
                microbatch = forwards if name == "RecvActivation" else held[instruction.buffer_id]
                line.append(f"{stage}{words[name]}{microbatch}")
            if not step:
                line.append("")
        ranks.append(line)
    return ranks
