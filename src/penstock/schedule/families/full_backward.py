"""Schedules of whole backwards on a loop: GPipe, breadth-first, 1F1B, eager 1F1B and interleaved 1F1B."""

from __future__ import annotations

import numpy as np

from penstock.base.errors import ScheduleError
from penstock.schedule.ops import Kind
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Columns, Schedule, plain_columns


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """GPipe (1811.06965), with the backwards in the order of the forwards, as torch runs them.

    The bubble is (p-1)(F+B); every rank holds all m activations.

    ::

        2 ranks, 3 microbatches
        rank 0  0F0 0F1 0F2 0B0 0B1 0B2
        rank 1  1F0 1F1 1F2 1B0 1B1 1B2
    """
    each = np.arange(microbatches)
    kinds = np.repeat([Kind.F, Kind.B], microbatches)
    return Schedule.from_columns(
        "gpipe",
        Placement.loop(ranks),
        microbatches,
        [plain_columns(r, kinds, np.tile(each, 2)) for r in range(ranks)],
    )


def breadth_first(ranks: int, microbatches: int, virtual_stages: int = 2) -> Schedule:
    """Looped breadth-first (2211.05953): all forwards chunk by chunk, then all backwards from the last chunk.

    Stage s lives on rank s mod p. The bubble is (p-1)(F+B+W)/v, as interleaved 1F1B's, at the price of all m·v
    activations; with data parallelism, gradients of a chunk can be reduced while the next one runs. The backwards
    keep the order of the forwards here (torch's ScheduleLoopedBFS reverses it, with the same time and memory).

    ::

        2 ranks, 2 microbatches, 2 virtual stages
        rank 0  0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        rank 1  1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1
    """
    p, m, v = ranks, microbatches, virtual_stages
    down = np.arange(v)
    chunks = np.repeat(np.concatenate([down, down[::-1]]), m)
    kinds = np.repeat([Kind.F, Kind.B], v * m)
    each = np.tile(np.arange(m), 2 * v)
    return Schedule.from_columns(
        "breadth-first",
        Placement.loop(p, v),
        m,
        [plain_columns(chunks * p + r, kinds, each) for r in range(p)],
    )


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """1F1B (PipeDream-Flush, 2006.09503; DAPPLE): rank r warms up with p-1-r forwards.

    The bubble is (p-1)(F+B), as GPipe's; rank r holds at most p-r activations.

    ::

        2 ranks, 3 microbatches
        rank 0  0F0 0F1 0B0 0F2 0B1 0B2
        rank 1  1F0 1B0 1F1 1B1 1F2 1B2
    """
    return Schedule.from_columns(
        "1f1b",
        Placement.loop(ranks),
        microbatches,
        # Microbatch 0 comes back to rank r after p-1-r stages forward and as many backward; these forwards fill the wait.
        [alternating(r, microbatches, min(ranks - 1 - r, microbatches)) for r in range(ranks)],
    )


def eager_1f1b(ranks: int, microbatches: int) -> Schedule:
    """Eager 1F1B (2211.05322; Alpa's overlap-friendly schedule): as 1F1B, with 2(p-1-r) forwards to warm up.

    The bubble is 1F1B's, (p-1)(F+B), and stays so while a message takes up to half of F+B, because an activation is
    sent a whole step before it is needed; rank r holds at most 2(p-r)-1 activations.

    ::

        2 ranks, 4 microbatches
        rank 0  0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
        rank 1  1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3
    """
    return Schedule.from_columns(
        "eager-1f1b",
        Placement.loop(ranks),
        microbatches,
        [alternating(r, microbatches, min(2 * (ranks - 1 - r), microbatches)) for r in range(ranks)],
    )


def alternating(stage: int, microbatches: int, warm_up: int) -> Columns:
    """Return one stage's list: `warm_up` forwards, then forward and backward in turn, then the backwards left."""
    m, w = microbatches, warm_up
    kinds = np.empty(2 * m, np.int8)
    order = np.empty(2 * m, np.int32)
    steady = slice(w, 2 * m - w)
    kinds[:w], order[:w] = Kind.F, np.arange(w)
    kinds[steady][0::2], order[steady][0::2] = Kind.F, np.arange(w, m)
    kinds[steady][1::2], order[steady][1::2] = Kind.B, np.arange(m - w)
    kinds[2 * m - w :], order[2 * m - w :] = Kind.B, np.arange(m - w, m)
    return plain_columns(stage, kinds, order)


def interleaved_1f1b(
    ranks: int, microbatches: int, virtual_stages: int = 2, group_size: int | None = None
) -> Schedule:
    """Interleaved 1F1B in Megatron's order (2104.04473; core/pipeline_parallel/schedules.py).

    Stage s lives on rank s mod p. Forwards go through groups of N microbatches, chunk by chunk; rank r warms up with
    2(p-1-r) + (v-1)N of them. The bubble is (p-1)(F+B)/v.

    N is the smallest allowed unless `group_size` is given. It must be at least p, and m mod N 0 or at least p, because a
    shorter group cannot fill the pipe (Megatron refuses it, too). With m < p the one group is m.

    ::

        2 ranks, 2 microbatches, 2 virtual stages
        rank 0  0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        rank 1  1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """
    p, m, v = ranks, microbatches, virtual_stages
    n = chosen_group("interleaved-1f1b", p, m, group_size)
    return Schedule.from_columns(
        "interleaved-1f1b",
        Placement.loop(p, v),
        m,
        [depth_first(r, p, m, v, n, min(2 * (p - 1 - r) + (v - 1) * n, m * v)) for r in range(p)],
        {"group_size": n},
    )


def chosen_group(family: str, ranks: int, microbatches: int, group_size: int | None) -> int:
    """Return `group_size` if it is legal, or the smallest legal size if it is None."""
    p, m = ranks, microbatches
    smallest = smallest_group(p, m)
    if group_size is None:
        return smallest
    if isinstance(group_size, bool) or not isinstance(group_size, int):
        raise ScheduleError(f"{family}: group_size must be a whole number, got {group_size!r}")
    if group_size == smallest or legal_group(p, m, group_size):
        return group_size
    if m < p:
        raise ScheduleError(
            f"{family}: with fewer microbatches ({m}) than ranks ({p}), group_size must be {m}, one group of all "
            f"microbatches; got {group_size}"
        )
    raise ScheduleError(
        f"{family}: group_size must be between {p} (ranks) and {m} (microbatches), and {m} % group_size must be 0 or at "
        f"least {p}; got {group_size}, take {smallest}"
    )


def legal_group(ranks: int, microbatches: int, size: int) -> bool:
    """Return whether groups of `size` keep the pipe full: p <= N <= m, and no short last group."""
    rest = microbatches % size if size >= 1 else 0
    return ranks <= size <= microbatches and (rest == 0 or rest >= ranks)


def smallest_group(ranks: int, microbatches: int) -> int:
    """Return the smallest legal group size; all microbatches if there are fewer than ranks."""
    sizes = range(ranks, microbatches + 1)
    return next((n for n in sizes if legal_group(ranks, microbatches, n)), microbatches)


def visits(microbatches: int, virtual_stages: int, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Return microbatches and chunks of one rank's forwards, group by group, and chunk by chunk in a group."""
    each = np.arange(microbatches)
    order, chunks = [], []
    for start in range(0, microbatches, group):
        members = each[start : start + group]
        order.append(np.tile(members, virtual_stages))
        chunks.append(np.repeat(np.arange(virtual_stages), len(members)))
    return np.concatenate(order), np.concatenate(chunks)


def depth_first(
    rank: int, ranks: int, microbatches: int, virtual_stages: int, group: int, warm_up: int
) -> Columns:
    """Return one rank's list: `warm_up` forwards, forward and backward in turn, the backwards left."""
    order, chunks = visits(microbatches, virtual_stages, group)
    total, w = len(order), warm_up
    backward_chunks = virtual_stages - 1 - chunks
    kinds = np.full(2 * total, Kind.B, np.int8)
    position = np.empty(2 * total, np.int64)
    steady = slice(w, 2 * total - w)
    kinds[:w], position[:w] = Kind.F, np.arange(w)
    kinds[steady][0::2], position[steady][0::2] = Kind.F, np.arange(w, total)
    position[steady][1::2] = np.arange(total - w)
    position[2 * total - w :] = np.arange(total - w, total)
    chunk = np.where(kinds == Kind.F, chunks[position], backward_chunks[position])
    return plain_columns(chunk * ranks + rank, kinds, order[position])
