"""Blocks of a timeline: the half of a pair and the shade that each event is drawn in."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.trace.events import Trace


def second_of_pair(trace: Trace) -> npt.NDArray[np.bool_]:
    """Return which events are the second half of a fused pair, shape (events,)."""
    return np.concatenate([[False], trace.paired])[: len(trace)]


def lighter(trace: Trace) -> npt.NDArray[np.bool_]:
    """Return which events are of the second, fourth, ... stage of their rank, shape (events,): their shade is lighter."""
    odd = np.zeros(len(trace), np.bool_)
    for rows in trace.rank_slices():
        stage = trace.stage[rows]
        odd[rows] = np.searchsorted(stages_of(stage), stage) % 2
    return odd


def several_stages(trace: Trace) -> bool:
    """Return whether any rank has more than one stage."""
    return any(len(stages_of(trace.stage[rows])) > 1 for rows in trace.rank_slices())


def stages_of(stage: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return the different stages in a column of a trace, ascending."""
    return np.unique(stage[stage >= 0])
