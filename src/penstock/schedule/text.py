"""Schedules as CSV in the format of PyTorch's pipelining: one line a rank, one op a cell."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path

from penstock.atomic import open_replacing
from penstock.bounded_io import MEGABYTE, read_bytes
from penstock.errors import ScheduleError
from penstock.schedule.ops import Op, Pair, parse_op
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule

_MAX_BYTES = 512 * MEGABYTE


def csv_line(schedule: Schedule, rank: int) -> str:
    """Return one rank's ops as a line of CSV.

    ``torch.distributed.pipelining`` reads it, unless it has recomputes.
    """
    return ",".join(str(op) for op in schedule.ops(rank))


def write_csv(schedule: Schedule, path: str | Path) -> None:
    """Write a schedule as CSV that ``torch.distributed.pipelining`` reads.

    Raises:
        ScheduleError: if the file cannot be written.
    """
    try:
        with open_replacing(path) as file:
            file.writelines(f"{csv_line(schedule, rank)}\n".encode() for rank in range(schedule.ranks))
    except OSError as error:
        raise ScheduleError(f"cannot write the schedule {path}: {error}") from error


def read_csv(path: str | Path) -> Schedule:
    """Read a schedule of compute ops; a stage is placed on the ranks that have its ops.

    Empty cells (idle slots in PyTorch's files) are skipped. Use `check` to prove that the schedule is valid.

    Raises:
        ScheduleError: if the file cannot be read, is empty, or has a cell that is no op (named by line and column).
    """
    try:
        text = read_bytes(path, _MAX_BYTES, pipes=True).decode("utf-8-sig")
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        lines = [(reader.line_num, cells) for cells in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ScheduleError(f"cannot read the schedule {path}: {error}") from error
    while lines and not any(cell.strip() for cell in lines[-1][1]):
        lines.pop()
    ranks = [
        [_parse(cell, path, number, k) for k, cell in enumerate(cells) if cell.strip()]
        for number, cells in lines
    ]
    return from_lists(str(path), ranks)


def from_lists(name: str, ranks: list[list[Op | Pair]]) -> Schedule:
    """Build a schedule from one list of ops a rank; a stage is placed on the ranks that have its ops.

    Raises:
        ScheduleError: if a rank has no ops, or the stages do not count 0, 1, 2, ...
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
            f"{name}: microbatch {microbatches - 1} appears in a file of {total} ops; microbatches "
            "count 0, 1, 2, ..."
        )
    placement = Placement(len(ranks), tuple(tuple(holders[s]) for s in range(len(holders))))
    return Schedule.from_ops(name, _two_way_if_it_is(placement), microbatches, ranks)


def _two_way_if_it_is(placement: Placement) -> Placement:
    """Return the placement of two opposite pipes if the copies fit it: a file does not say which copy is the first."""
    if placement.has_copies and placement.ranks == placement.stages and placement.ranks % 2 == 0:
        pipes = Placement.two_way(placement.ranks)
        if all(set(held) <= set(both) for held, both in zip(placement.holders, pipes.holders, strict=True)):
            return pipes
    return placement


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
        raise ScheduleError(f"{path}: line {line}, column {column + 1}: {error}{hint}") from None
