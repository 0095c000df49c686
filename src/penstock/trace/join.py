"""The trace of one step, joined from the traces that processes recorded of their own ranks, by their clocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.base.errors import DataError
from penstock.trace.clock import Alignment
from penstock.trace.events import COLUMNS, Trace


def present(trace: Trace) -> list[int]:
    """Return the ranks that have events, ascending."""
    return [int(rank) for rank in np.unique(trace.rank)]


def join(parts: Sequence[Trace], clocks: Alignment | None = None) -> Trace:
    """Join the parts of a step, no rank in two of them.

    ``info["origin"]`` of a part is the time from which it counts, in seconds on its process's clock (default 0);
    without `clocks` the parts share one clock. The result counts from its first event. Its `info` is the first
    part's, with ``ranks_present``, ``origin`` on the first part's clock, ``clock_error``, the largest error in
    seconds between the times of two ranks, and ``whole_backward`` of all parts.
    """
    if not parts:
        raise DataError("there is nothing to join: no rank left a trace")
    first = parts[0]
    for part in parts[1:]:
        for name, ours, its in (
            ("ranks", first.ranks, part.ranks),
            ("schedule", first.info.get("schedule"), part.info.get("schedule")),
        ):
            if ours != its:
                raise DataError(f"these traces are not of one run: one has {name} {ours!r}, another {its!r}")
    ranks = [rank for part in parts for rank in present(part)]
    if twice := sorted({rank for rank in ranks if ranks.count(rank) > 1}):
        raise DataError(f"two of these traces have events of rank {twice[0]}")
    offsets = np.zeros(len(parts)) if clocks is None else clocks.offset
    began = [_origin(part) + float(offset) for part, offset in zip(parts, offsets, strict=True)]
    error = 0.0 if clocks is None else float(clocks.error.max())
    info: dict[str, object] = {"ranks_present": sorted(ranks), "clock_error": error}
    if stages := {name for part in parts for name in _whole_backward(part)}:
        info["whole_backward"] = sorted(stages)
    return _concatenated(parts, began, info)


def _concatenated(parts: Sequence[Trace], began: Sequence[float], info: dict[str, object]) -> Trace:
    """Concatenate traces that began at given times."""
    lengths = [len(part) for part in parts]
    firsts = [at + float(part.start.min()) for at, part in zip(began, parts, strict=True) if len(part)]
    origin = min(firsts, default=0.0)
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS}
    shift = np.repeat([at - origin for at in began], lengths)
    columns["start"], columns["end"] = columns["start"] + shift, columns["end"] + shift
    held = [part.held for part in parts if part.held is not None]
    # A stable sort keeps the events of a rank in the order of their part.
    order = np.argsort(columns["rank"], kind="stable")
    return Trace(
        ranks=parts[0].ranks,
        **{name: column[order] for name, column in columns.items()},
        held=np.concatenate(held)[order] if len(held) == len(parts) else None,
        info={**parts[0].info, **info, "origin": origin},
    )


def _whole_backward(part: Trace) -> list[str]:
    names = part.info.get("whole_backward", [])
    return list(map(str, names)) if isinstance(names, list) else []


def _origin(part: Trace) -> float:
    origin = part.info.get("origin", 0.0)
    if isinstance(origin, bool) or not isinstance(origin, int | float):
        raise DataError(f"a trace counts its times from {origin!r}, which is not a number of seconds")
    return float(origin)
