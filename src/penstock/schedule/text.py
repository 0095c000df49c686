"""CSV in and out, in the format PyTorch's pipelining writes and loads: a line a rank, an op a cell."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

from penstock.errors import ScheduleError
from penstock.schedule.ops import Kind, Op, Pair, parse_op
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule


def write_csv(schedule: Schedule, path: str | Path) -> None:
    """Write a schedule, one line a rank, as ``torch.distributed.pipelining`` reads it."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        for rank in range(schedule.ranks):
            writer.writerow([str(op) for op in schedule.ops(rank)])


def read_csv(path: str | Path) -> Schedule:
    """Read a schedule of compute ops; the placement follows from where each stage's ops stand.

    Empty cells (idle slots in PyTorch's files) are skipped. The schedule is parsed, not proved: `check` does
    that.

    Raises:
        ScheduleError: the file cannot be read, is empty, or holds something that is no op (with line and column).
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            lines = list(csv.reader(file, strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ScheduleError(f"cannot read the schedule {path}: {error}") from error
    while lines and not any(cell.strip() for cell in lines[-1]):
        lines.pop()
    ranks = [
        [_parse(cell, path, n, k) for k, cell in enumerate(line) if cell.strip()]
        for n, line in enumerate(lines)
    ]
    return from_lists(str(path), ranks)


def from_lists(name: str, ranks: list[list[Op | Pair]]) -> Schedule:
    """Build a schedule from lists of ops, a list a rank, with the placement that these imply.

    Raises:
        ScheduleError: no ops, a rank without ops, or stages that do not count 0, 1, 2, ...
    """
    holders: dict[int, list[int]] = {}
    microbatches = 0
    for rank, ops in enumerate(ranks):
        if not ops:
            raise ScheduleError(f"{name}: line {rank + 1} (rank {rank}) holds no op")
        for op in _singles(ops):
            held = holders.setdefault(op.stage, [])
            if rank not in held:
                held.append(rank)
            microbatches = max(microbatches, op.microbatch + 1)
    if not holders:
        raise ScheduleError(f"{name} holds no op")
    total = sum(len(ops) for ops in ranks)
    if max(holders) >= len(holders):
        missing = next(s for s in range(len(holders) + 1) if s not in holders)
        raise ScheduleError(f"{name}: stage {missing} has no op, but stage {max(holders)} has")
    if microbatches > 2 * total:
        raise ScheduleError(
            f"{name}: microbatch {microbatches - 1} stands in a file of {total} ops; microbatches "
            "count 0, 1, 2, ..."
        )
    placement = Placement(len(ranks), tuple(tuple(holders[s]) for s in range(len(holders))))
    return Schedule.from_ops(name, placement, microbatches, ranks)


def _singles(ops: Iterable[Op | Pair]) -> Iterable[Op]:
    for op in ops:
        if isinstance(op, Pair):
            yield from (op.forward, op.backward)
        else:
            yield op


_COMMUNICATION = ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD")


def _parse(cell: str, path: str | Path, line: int, column: int) -> Op | Pair:
    try:
        return parse_op(cell)
    except ScheduleError as error:
        hint = ""
        if any(word in cell for word in _COMMUNICATION):
            hint = "; communication is worked out from the compute ops, so give the compute-only file"
        raise ScheduleError(f"{path}: line {line + 1}, column {column + 1}: {error}{hint}") from None


def kinds_used(schedule: Schedule) -> set[Kind]:
    """The kinds of op that stand in a schedule."""
    import numpy as np

    return {Kind(int(k)) for k in np.unique(schedule.kind)}
