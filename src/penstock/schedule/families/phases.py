"""Lists of ops written as phases: repeated patterns that do not name microbatches.

In all schedules written this way, every stage sees its microbatches in order: the n-th forward of a stage is of
microbatch n, and so is the n-th backward. A pattern is a sequence of `PatternOp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.schedule.ops import Kind
from penstock.schedule.schedule import Columns


class PatternOp(NamedTuple):
    kind: Kind
    chunk: int = 0  # chunk of the rank, 0 or 1; ignored for a W in a list that takes weights in turn
    paired: bool = False  # the op and the next one are a fused pair


Phase = tuple[int, Sequence[PatternOp]]


def occurrence(keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return how many equal keys come before each key, shape as `keys`."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    new = np.ones(len(keys), np.bool_)
    new[1:] = ordered[1:] != ordered[:-1]
    starts = np.flatnonzero(new)
    count = np.empty(len(keys), np.int64)
    count[order] = np.arange(len(keys)) - np.repeat(starts, np.diff(np.append(starts, len(keys))))
    return count


def phased(
    phases: Sequence[Phase],
    stages: tuple[int, int],
    microbatches: tuple[int, int],
    first: tuple[int, int] = (0, 0),
    *,
    weights_in_turn: bool = False,
) -> Columns:
    """Return one rank's list from its phases.

    Ops of microbatches beyond the last are dropped. No op depends on an op of another microbatch, so the rest of a
    valid schedule is valid, and a rule that needs many microbatches also serves few.

    `stages`, `microbatches` (how many a chunk sees) and `first` (the first that it sees) have a number for chunk 0 and
    one for chunk 1. With `weights_in_turn` the n-th ``W`` finishes the n-th ``I`` of either chunk.
    """
    repeated = [
        np.tile(np.array(pattern, np.int64), (times, 1)) for times, pattern in phases if times > 0 and pattern
    ]
    table = np.concatenate(repeated)
    kind, chunk, paired = table[:, 0], table[:, 1], table[:, 2].astype(np.bool_)
    if weights_in_turn:
        chunk = chunk.copy()
        weights, inputs = np.flatnonzero(kind == Kind.W), np.flatnonzero(kind == Kind.I)
        chunk[weights] = chunk[inputs]
    # B and I count together: either is the n-th backward of its chunk.
    backward = np.where(kind == Kind.I, Kind.B, kind)
    number = occurrence(backward * 2 + chunk)
    if weights_in_turn:
        number[weights] = number[inputs]
    keep = number < np.array(microbatches)[chunk]
    # A forward whose backward was dropped runs alone.
    paired[:-1] &= keep[1:]
    return Columns(
        np.array(stages, np.int32)[chunk[keep]],
        kind[keep].astype(np.int8),
        (number + np.array(first)[chunk])[keep].astype(np.int32),
        paired[keep],
    )
