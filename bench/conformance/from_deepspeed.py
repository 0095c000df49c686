"""Orders of DeepSpeed's TrainSchedule and DualPipeVSchedule (deepspeed/runtime/pipe/schedule.py, DeepSpeed 0.19)."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from collections.abc import Iterator

from bench.conformance.orders import Cells, Project, counts, order_of

RANKS, MICROBATCHES = (1, 2, 3, 4, 5), (1, 3, 4, 8)
FOLDED = ((1, 2, 3, 4), (8, 9, 11), (2,))
"""Ranks, microbatches and stages a rank of DualPipeVSchedule."""


def projects(quick: bool) -> Iterator[Project]:
    """Yield TrainSchedule and DualPipeVSchedule."""
    source, made, folded = "rules", by_clock, by_phase
    if importlib.util.find_spec("deepspeed") is not None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        source, made, folded = f"deepspeed {deepspeed.__version__}", instructions, folded_instructions
    cases = counts(RANKS, MICROBATCHES, quick=quick)
    orders = [order_of(p, m, v, made(p, m), rules=by_clock(p, m)) for p, m, v in cases]
    yield Project("DeepSpeed TrainSchedule", source, orders)
    orders = [
        order_of(p, m, v, folded(p, m), rules=by_phase(p, m)) for p, m, v in counts(*FOLDED, quick=quick)
    ]
    yield Project("DeepSpeed DualPipeVSchedule", source, orders)


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


def by_phase(p: int, m: int) -> Cells:
    """Return the ops of every rank of DualPipeV with whole backwards.

    These are the phases of DualPipe (github.com/deepseek-ai/DualPipe). A rank's stage on the way down is a, the one on the
    way up z.
    """
    ranks: Cells = []
    for rank in range(p):
        after = p - 1 - rank
        phases = (
            (2 * after, "Fa"), (rank + 1, "Fa Fz"), (after, "Bz Fz"), (m - 2 * p + rank + 1, "Fa Bz Fz Ba"),
            (after, "Bz Fz Ba"), (rank + 1, "Bz Ba"), (after, "Ba"),
        )  # fmt: skip
        stage = {"a": rank, "z": 2 * p - 1 - rank}
        done: Counter[str] = Counter()
        line = []
        for times, ops in phases:
            for op in ops.split() * times:
                line.append(f"{stage[op[1]]}{op[0]}{done[op]}")
                done[op] += 1
        ranks.append(line)
    return ranks


def folded_instructions(p: int, m: int) -> Cells:
    """Return the passes of DualPipeVSchedule, whose buffers count the microbatches of one stage and then of the other."""
    from deepspeed.runtime.pipe.schedule import DualPipeVSchedule

    kinds = {"ForwardPass": "F", "BackwardPass": "B"}
    ranks: Cells = []
    for rank in range(p):
        line: list[str] = []
        for step in DualPipeVSchedule(micro_batches=m, stages=p, stage_id=rank).steps():
            for instruction in step:
                if instruction.name in kinds:
                    phase, microbatch = divmod(instruction.buffer_id, m)
                    line.append(f"{2 * p - 1 - rank if phase else rank}{kinds[instruction.name]}{microbatch}")
        ranks.append(line)
    return ranks


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
