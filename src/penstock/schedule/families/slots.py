"""Chimera and Hanayo, written as the slot of every op on a clock that ticks once a forward or a backward.

Chimera sends microbatches down one pipe and up a second; Hanayo folds each pipe where it would leave the ranks, and needs
no copies of stages.
"""

from __future__ import annotations

import numpy as np

from penstock.base.errors import ScheduleError
from penstock.schedule.ops import Kind
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Columns, Schedule, plain_columns


def chimera(ranks: int, microbatches: int) -> Schedule:
    """Chimera with two pipes (2107.06925), blocks of p microbatches following each other directly.

    Stage s lives on rank s and a copy on rank p-1-s. Of each block the first half goes down and the second up. With m a
    multiple of p and F = B+W the bubble is (p-2)F; rank r holds at most p/2+1+min(r, p-1-r) activations.
    The last block may be short.

    ::

        2 ranks, 4 microbatches
        rank 0  0F0 1F1 1B1 0B0 0F2 1F3 1B3 0B2
        rank 1  0F1 1F0 1B0 0B1 0F3 1F2 1B2 0B3
    """
    p, m = ranks, microbatches
    if p % 2:
        raise ScheduleError(f"chimera needs an even number of ranks, got {p}; hanayo takes any number")
    each = np.arange(m)
    block, place = np.divmod(each, p)
    half = (np.minimum(m - block * p, p) + 1) // 2
    up = place >= half
    turn = block * p + place - np.where(up, half, 0)
    columns = []
    for r in range(p):
        stage = np.where(up, p - 1 - r, r)
        columns.append(_by_slot(stage, each, 2 * turn + stage, 2 * turn + 2 * p - 1 - stage))
    return Schedule.from_columns("chimera", Placement.two_way(p), m, columns)


def hanayo(ranks: int, microbatches: int, virtual_stages: int = 2) -> Schedule:
    """Hanayo's waves (2308.15762): blocks of p microbatches pass down the ranks and up again, v/2 times.

    The slots are a Chimera pipe's over all p·v stages, each folded back onto the p ranks. With m = p and
    B+W >= F the bubble is (2p-2)(B+W)/v; with F = B+W it is the same for every multiple of p. Blocks hold all v·p
    activations of their microbatches on the rank where the waves turn, and p-1-r fewer on rank r.
    The last block may be short.

    ::

        2 ranks, 2 microbatches, 2 virtual stages
        rank 0  0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1
        rank 1  1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1
    """
    p, m, v = ranks, microbatches, virtual_stages
    if v % 2:
        raise ScheduleError(f"hanayo goes down and up in every wave: virtual_stages must be even, got {v}")
    each = np.arange(m)
    block, place = np.divmod(each, p)
    start = 2 * p * v * block + 2 * place
    columns = []
    for r in range(p):
        visit = np.arange(v)
        stage, mb = (
            grid.ravel()
            for grid in np.meshgrid(visit * p + np.where(visit % 2, p - 1 - r, r), each, indexing="ij")
        )
        columns.append(_by_slot(stage, mb, start[mb] + stage, start[mb] + 2 * p * v - 1 - stage))
    return Schedule.from_columns("hanayo", Placement.waves(p, v), m, columns)


def _by_slot(stage: np.ndarray, microbatch: np.ndarray, forward: np.ndarray, backward: np.ndarray) -> Columns:
    """Return a rank's list from the slots of its forwards and backwards."""
    order = np.argsort(np.concatenate([forward, backward]), kind="stable")
    kinds = np.repeat(np.array([Kind.F, Kind.B], np.int8), len(stage))
    return plain_columns(np.tile(stage, 2)[order], kinds[order], np.tile(microbatch, 2)[order])
