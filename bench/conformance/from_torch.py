"""Orders of torch.distributed.pipelining, by its own classes, and the files of CSV that these write."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from tests.support.torch_schedules import Stage, torch_schedules, torchs

from bench.conformance.orders import Cells, Order, Project, computing, counts, order_of

SINGLE = ((2, 3, 4, 5), (5, 8, 9))
SEVERAL = ((2, 3, 4), (4, 6, 8), (1, 2, 3))
FOLDED = ((1, 2, 3, 4), (8, 9, 11), (2,))
"""Ranks, microbatches and stages a rank of each kind of schedule: one stage a rank, several, or two on a V."""
CLASSES = {
    "ScheduleInterleaved1F1B": SEVERAL,
    "ScheduleLoopedBFS": SEVERAL,
    "ScheduleInterleavedZeroBubble": SEVERAL,
    "ScheduleZBVZeroBubble": FOLDED,
    "ScheduleDualPipeV": FOLDED,
}


class Recorded(Stage):
    """A stage that computes nothing and notes what it is asked to compute."""

    def __init__(self, index: int, stages: int) -> None:
        super().__init__(index, stages, stages)
        self.device = torch.device("cpu")
        self.cells: list[str] = []

    def forward_one_chunk(self, microbatch: int, *_: object, **__: object) -> None:
        self.cells.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch: int, **_: object) -> None:
        self.cells.append(f"{self.stage_index}B{microbatch}")

    def perform_reduce_grad(self, _: int) -> None:
        self.cells.append(f"{self.stage_index}REDUCE_GRAD")

    def _no_messages(self, *_: object) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _no_messages
    _get_init_p2p_neighbors_ops = _no_messages


def projects(quick: bool) -> Iterator[Project]:
    """Yield the schedules of torch: as its runtime takes them, as its visualizer shows them, and as it writes them."""
    source = f"torch {torch.__version__}"
    single = [(p, m) for p, m, _ in counts(*SINGLE, quick=quick)]
    yield Project(
        "torch ScheduleGPipe", source, [order_of(p, m, 1, _listed("ScheduleGPipe", p, m)) for p, m in single]
    )
    yield Project(
        "torch Schedule1F1B, as it runs", source, [order_of(p, m, 1, _run_1f1b(p, m)) for p, m in single]
    )
    yield Project(
        "torch Schedule1F1B, its visualizer",
        source,
        [order_of(p, m, 1, _listed("Schedule1F1B", p, m)) for p, m in single],
    )
    for name in CLASSES:
        yield Project(
            f"torch {name}", source, [order_of(*case, _cells(made)) for case, made in _made(name, quick)]
        )
    for what, write in (("messages", _with_messages), ("B beside W", _b_beside_w), ("B and BW", _b_and_bw)):
        yield Project(f"torch files, {what}", source, list(_files(write, quick)))


def _listed(name: str, p: int, m: int) -> Cells:
    """Return what a class with one stage a rank says its order is."""
    ranks = getattr(torch_schedules, name)(Stage(0, p, p), m, loss_fn=lambda *_: 0).pipeline_order
    return [["" if op is None else str(op) for op in ranks[rank]] for rank in range(p)]


def _run_1f1b(p: int, m: int) -> Cells:
    """Return what Schedule1F1B runs, rank by rank: its order for pictures has other ops."""
    stages = [Recorded(rank, p) for rank in range(p)]
    for stage in stages:
        torch_schedules.Schedule1F1B(stage, m)._step_microbatches()
    return [stage.cells for stage in stages]


def _made(name: str, quick: bool) -> Iterator[tuple[tuple[int, int, int], Any]]:
    """Yield the counts that a class takes, and its schedule."""
    for p, m, v in counts(*CLASSES[name], quick=quick):
        if (made := torchs(name, p, m, v, folded=CLASSES[name] is FOLDED)) is not None:
            yield (p, m, v), made


def _cells(made: Any) -> Cells:
    return [
        ["" if op is None else str(op) for op in made.pipeline_order[r]] for r in sorted(made.pipeline_order)
    ]


def _files(write: Callable[[Any], Cells | None], quick: bool) -> Iterator[Order]:
    """Yield a file of every class with several stages a rank, for every second of its counts, where it has such a form."""
    for name in CLASSES:
        for case, made in list(_made(name, quick))[::2]:
            if (cells := write(made)) is not None:
                order = order_of(*case, cells, ops=computing(_cells(made)))
                yield order._replace(name=f"{name} {order.name}")


def _with_messages(made: Any) -> Cells:
    """Return the file that torch writes of the schedule as its runtime takes it."""
    with NamedTemporaryFile("r", suffix=".csv") as file:
        made._dump_csv(file.name, format="compute_comms")
        return [line.rstrip("\n").split(",") for line in file]


def _b_beside_w(made: Any) -> Cells | None:
    """Return cells with the letters of torch's older files: B is the input gradient where there is a W."""
    cells = _cells(made)
    if not any("I" in cell for line in cells for cell in line):
        return None
    return [[re.sub(r"(\d)I(\d)", r"\1B\2", cell) for cell in line] for line in cells]


def _b_and_bw(made: Any) -> Cells | None:
    """Return cells with B for the input gradient and BW for the whole backward, as the zero-bubble paper has them."""
    cells = _cells(made)
    if not any("I" in cell for line in cells for cell in line):
        return None
    whole = [[re.sub(r"(\d)B(\d)", r"\1BW\2", cell) for cell in line] for line in cells]
    return [[re.sub(r"(\d)I(\d)", r"\1B\2", cell) for cell in line] for line in whole]
