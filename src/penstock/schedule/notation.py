"""Cells of schedule files as other programs write them.

PyTorch (``_ComputationType`` in ``torch/distributed/pipelining/schedules.py``, torch 2.13) writes F, B, I and W; and, in
files that it has lowered for its runtime, messages (``0SEND_F1``, ``1RECV_B0``) and what sharded data parallelism does
(``0UNSHARD``, ``0RESHARD``, ``0REDUCE_GRAD``). Earlier versions, and the zero-bubble paper (2401.10241), write B for the
input gradient when they write W as well, and BW for the full backward.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Literal, NamedTuple, get_args

from penstock.base.errors import ScheduleError
from penstock.schedule.ops import Kind, Op, Pair, parse_op

Backward = Literal["auto", "full", "input"]
"""Meaning of B in a file: the full backward, the input gradient, or (auto) the input gradient where there is a W of it."""

_DROPPED = re.compile(r"[0-9]+(SEND_F|RECV_F|SEND_B|RECV_B)[0-9]+|[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD)[0-9]*")
_SHARDING = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
_FULL = re.compile(r"([0-9]+)BW([0-9]+)")

Ops = list[Op | Pair]


class Cell(NamedTuple):
    """A cell of a file, with its place: line and column, from 1."""

    text: str
    line: int
    column: int


class ReadOps(NamedTuple):
    """Ops of every rank, and notes that say what was dropped and assumed."""

    ranks: list[Ops]
    notes: tuple[str, ...]


def require_backward(backward: object) -> Backward:
    """Return a meaning of B; raise `ScheduleError` if it is none."""
    meanings: tuple[Backward, ...] = get_args(Backward)
    for allowed in meanings:
        if backward == allowed:
            return allowed
    raise ScheduleError(f"backward must be auto, full or input, got {backward!r}")


def read_cells(ranks: Iterable[Iterable[Cell]], backward: Backward) -> ReadOps:
    dropped: Counter[str] = Counter()
    full: set[tuple[int, int]] = set()
    lists = [[op for cell in cells if (op := _read(cell, dropped, full)) is not None] for cells in ranks]
    notes = []
    for why, sharding in (
        ("communication follows from the compute ops", False),
        (
            "ParallelOptions(shard=, window=, reduce_every=) or --shard say when replicas gather and reduce",
            True,
        ),
    ):
        words = [f"{count:,} {word}" for word, count in dropped.items() if (word in _SHARDING) == sharding]
        if words:
            notes.append(f"dropped {', '.join(words)}: {why}")
    kinds = {kind: _where(lists, kind) for kind in (Kind.B, Kind.I, Kind.W)}
    halves = set() if backward == "full" else kinds[Kind.B] - full
    # A file with BW says which backwards are whole, so all its B are halves; one with I has no B that is a half.
    if backward == "auto" and not full:
        halves = set() if kinds[Kind.I] else kinds[Kind.B] & kinds[Kind.W]
    if halves:
        why = {"input": "as asked"}.get(
            backward, "BW is the full backward" if full else "a W of the same stage and microbatch is there"
        )
        notes.append(f"read {len(halves):,} B as I, the input gradient: {why}")
        whole = len(kinds[Kind.B] - full - halves)
        if whole:
            notes.append(
                f"read {whole:,} B without a W as full backwards; if a W is missing instead, read the file with "
                "backward=input"
            )
        lists = [[_halved(op, halves) for op in ops] for ops in lists]
    return ReadOps(lists, tuple(notes))


def singles(ops: Iterable[Op | Pair]) -> Iterator[Op]:
    """Yield ops one by one, and the two ops of each pair."""
    for op in ops:
        if isinstance(op, Pair):
            yield op.forward
            yield op.backward
        else:
            yield op


def _read(cell: Cell, dropped: Counter[str], full: set[tuple[int, int]]) -> Op | Pair | None:
    text = cell.text.strip()
    if match := _DROPPED.fullmatch(text):
        dropped[match[1] or match[2]] += 1
        return None
    try:
        # A pair's backward may be whole, too.
        op = parse_op(_FULL.sub(r"\1B\2", text))
        full.update((int(stage), int(microbatch)) for stage, microbatch in _FULL.findall(text))
        return op
    except ScheduleError as error:
        raise ScheduleError(f"line {cell.line}, column {cell.column}: {error}") from None


def _where(lists: list[Ops], kind: Kind) -> set[tuple[int, int]]:
    """Return stage and microbatch of all ops of a kind."""
    return {(op.stage, op.microbatch) for ops in lists for op in singles(ops) if op.kind == kind}


def _halved(op: Op | Pair, halves: set[tuple[int, int]]) -> Op | Pair:
    """Return an op in which a B is I if its stage and microbatch are in `halves`."""
    if isinstance(op, Pair):
        backward = _halved(op.backward, halves)
        assert isinstance(backward, Op), "a pair's half is one op"
        return Pair(op.forward, backward)
    if op.kind == Kind.B and (op.stage, op.microbatch) in halves:
        return replace(op, kind=Kind.I)
    return op
