"""Schedules as CSV in the format of PyTorch's pipelining: one line per rank, one op per cell."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

from penstock.base.atomic import open_replacing
from penstock.base.bounded_io import MEGABYTE, read_bytes
from penstock.base.errors import ScheduleError
from penstock.schedule.notation import Backward, Cell, read_cells, require_backward, singles
from penstock.schedule.ops import Op, Pair
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule

_MAX_BYTES = 512 * MEGABYTE


def csv_line(schedule: Schedule, rank: int) -> str:
    """Return one rank's ops as a line of CSV.

    ``torch.distributed.pipelining`` reads it, unless it has recomputes.
    """
    return ",".join(str(op) for op in schedule.ops(rank))


def write_csv(schedule: Schedule, path: str | Path) -> None:
    """Write a schedule to a path as CSV that ``torch.distributed.pipelining`` reads.

    Raises:
        ScheduleError: if the file cannot be written.
    """
    try:
        with open_replacing(path) as file:
            file.writelines(f"{csv_line(schedule, rank)}\n".encode() for rank in range(schedule.ranks))
    except OSError as error:
        raise ScheduleError(f"cannot write the schedule {path}: {error}") from error


def is_csv(name: str) -> bool:
    """Return whether the name of a schedule names a file, not a family."""
    return name.lower().endswith(".csv")


def read_csv(path: str | Path, backward: Backward = "auto") -> Schedule:
    """Read a schedule of compute ops; a stage is placed on the ranks that have its ops.

    PyTorch's files are read, lowered or not: messages, and what sharded data parallelism does, are dropped, because they
    follow from the compute ops. Empty cells (idle slots in PyTorch's files) and lines that begin with ``#`` are skipped.
    ``Schedule.notes`` says what was dropped and assumed. Use `check` to prove that the schedule is valid.

    Args:
        path: file to read.
        backward: meaning of B: "full" (the whole backward), "input" (the input gradient, whose other half is W; a full
            backward is BW then), or "auto" (default): the input gradient if a W of the same stage and microbatch is there
            and the file has no I, else the full one.

    Raises:
        ScheduleError: if the file cannot be read, is empty, or has a cell that is not an op (named by line and column).
    """
    meaning = require_backward(backward)
    try:
        # Spreadsheets begin a file with a byte order mark, which utf-8-sig drops.
        text = read_bytes(path, _MAX_BYTES, pipes=True).decode("utf-8-sig")
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        lines = [(reader.line_num, cells) for cells in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ScheduleError(f"cannot read the schedule {path}: {error}") from error
    lines = [line for line in lines if not "".join(line[1]).lstrip().startswith("#")]
    while lines and not any(cell.strip() for cell in lines[-1][1]):
        lines.pop()
    cells = [
        [Cell(cell, number, k + 1) for k, cell in enumerate(line) if cell.strip()] for number, line in lines
    ]
    try:
        ranks, notes = read_cells(cells, meaning)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from None
    return replace(from_lists(str(path), ranks), notes=notes)


def from_lists(name: str, ranks: list[list[Op | Pair]], microbatches: int | None = None) -> Schedule:
    """Build a schedule from one list of ops per rank; a stage is placed on the ranks that have its ops."""
    holders: dict[int, list[int]] = {}
    last = 0
    for rank, ops in enumerate(ranks):
        if not ops:
            raise ScheduleError(f"{name}: line {rank + 1} (rank {rank}) holds no op")
        for op in singles(ops):
            held = holders.setdefault(op.stage, [])
            if rank not in held:
                held.append(rank)
            last = max(last, op.microbatch)
    if not holders:
        raise ScheduleError(f"{name} holds no op")
    total = sum(len(ops) for ops in ranks)
    if max(holders) >= len(holders):
        missing = next(s for s in range(len(holders) + 1) if s not in holders)
        raise ScheduleError(f"{name}: stage {missing} has no op, but stage {max(holders)} has")
    # A few ops that name a huge microbatch would make huge tables; `check` finds smaller gaps.
    if last >= 2 * total:
        raise ScheduleError(
            f"{name}: microbatch {last} appears in a file of {total} ops; microbatches count 0, 1, 2, ..."
        )
    placement = Placement(len(ranks), tuple(tuple(holders[s]) for s in range(len(holders))))
    count = last + 1 if microbatches is None else microbatches
    return Schedule.from_ops(name, _in_known_order(placement), count, ranks)


def _in_known_order(placement: Placement) -> Placement:
    """Return a placement with its first copies where families have them: a file does not say which copy is the first.

    Copies that fit two opposite pipes are those; others begin with the rank that a loop gives the stage, or the next one.
    """
    ranks, stages = placement.ranks, placement.stages
    if not placement.has_copies or stages % ranks:
        return placement
    if ranks == stages and ranks % 2 == 0:
        pipes = Placement.two_way(ranks)
        if all(set(held) <= set(both) for held, both in zip(placement.holders, pipes.holders, strict=True)):
            return pipes
    turns = (sorted((rank - stage) % ranks for rank in held) for stage, held in enumerate(placement.holders))
    return Placement(
        ranks, tuple(tuple((stage + turn) % ranks for turn in each) for stage, each in enumerate(turns))
    )
