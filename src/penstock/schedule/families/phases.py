"""Lists of ops written as phases: a pattern, how often it is repeated, and nothing about microbatches.

In all schedules that are written so, every stage sees its microbatches in order: the n-th forward of a stage is that of
microbatch n, and so for the backwards. A pattern is a sequence of `PatternOp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.schedule.ops import Kind
from penstock.schedule.schedule import Columns


class PatternOp(NamedTuple):
    """One op of a pattern.

    Attributes:
        kind: what it computes.
        chunk: which of the rank's chunks, 0 or 1; of no meaning for a ``W`` in a list that takes weights in turn.
        paired: it and the next step are a fused pair.
    """

    kind: Kind
    chunk: int = 0
    paired: bool = False


Phase = tuple[int, Sequence[PatternOp]]


def occurrence(keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many equal keys stand before each one, shape as `keys`."""
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
    """One rank's list from its phases.

    Microbatches beyond those there are get dropped: no op depends on an op of another microbatch, so what is left of
    a valid schedule is valid, and a rule that needs many microbatches serves few.

    Args:
        phases: how often, and what.
        stages: the stage of chunk 0 and of chunk 1.
        microbatches: how many each chunk sees.
        first: the number of the first microbatch that each chunk sees.
        weights_in_turn: the n-th ``W`` finishes the n-th ``I``, whichever chunk that was of.
    """
    parts = [
        np.tile(np.array(pattern, np.int64), (times, 1)) for times, pattern in phases if times > 0 and pattern
    ]
    table = np.concatenate(parts)
    kind, chunk, paired = table[:, 0], table[:, 1], table[:, 2].astype(np.bool_)
    if weights_in_turn:
        chunk = chunk.copy()
        weights, inputs = np.flatnonzero(kind == Kind.W), np.flatnonzero(kind == Kind.I)
        chunk[weights] = chunk[inputs]
    backward = np.where(kind == Kind.I, Kind.B, kind)
    number = occurrence(backward * 2 + chunk)
    if weights_in_turn:
        number[weights] = number[inputs]
    keep = number < np.array(microbatches)[chunk]
    paired[:-1] &= keep[1:]
    return Columns(
        np.array(stages, np.int32)[chunk[keep]],
        kind[keep].astype(np.int8),
        (number + np.array(first)[chunk])[keep].astype(np.int32),
        paired[keep],
    )
