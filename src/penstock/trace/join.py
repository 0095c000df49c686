"""One step's trace from those that several processes recorded, each of its own ranks and by its own clock."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.errors import DataError
from penstock.trace.clock import Alignment
from penstock.trace.events import Trace

_COLUMNS = ("rank", "stage", "kind", "microbatch", "start", "end", "paired")


def present(trace: Trace) -> list[int]:
    """The ranks of which the trace has events, ascending."""
    return [int(rank) for rank in np.unique(trace.rank)]


def join(parts: Sequence[Trace], clocks: Alignment | None = None) -> Trace:
    """Put the parts of a step together.

    Args:
        parts: one a process, no rank in two of them. ``info["origin"]`` of each is the moment its times count from, on
            its process's clock; 0 if it does not say.
        clocks: those of the parts, in their order; without it they are taken for one clock.

    Returns:
        Times from the first event of all; `info` is the first part's, with ``ranks_present``, ``origin`` on the first
        part's clock, ``clock_error``, the seconds by which the times of two ranks can be off, and ``whole_backward`` of
        all parts.

    Raises:
        DataError: there is no part, or two of them do not belong together.
    """
    if not parts:
        raise DataError("there is nothing to join: no rank left a trace")
    first = parts[0]
    for part in parts[1:]:
        for what, ours, its in (
            ("ranks", first.ranks, part.ranks),
            ("schedule", first.info.get("schedule"), part.info.get("schedule")),
        ):
            if ours != its:
                raise DataError(f"these traces are not of one run: one has {what} {ours!r}, another {its!r}")
    of = [rank for part in parts for rank in present(part)]
    if twice := sorted({rank for rank in of if of.count(rank) > 1}):
        raise DataError(f"two of these traces have events of rank {twice[0]}")
    offsets = np.zeros(len(parts)) if clocks is None else clocks.offset
    began = [_origin(part) + float(offset) for part, offset in zip(parts, offsets, strict=True)]
    firsts = [at + float(part.start.min()) for part, at in zip(parts, began, strict=True) if len(part)]
    origin = min(firsts, default=0.0)
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS}
    shift = np.repeat([at - origin for at in began], [len(part) for part in parts])
    columns["start"], columns["end"] = columns["start"] + shift, columns["end"] + shift
    held = [part.held for part in parts if part.held is not None]
    order = np.argsort(columns["rank"], kind="stable")
    error = 0.0 if clocks is None else float(clocks.error.max())
    info = {**first.info, "ranks_present": sorted(of), "origin": origin, "clock_error": error}
    if whole := {name for part in parts for name in _whole(part)}:
        info["whole_backward"] = sorted(whole)
    return Trace(
        first.ranks,
        **{name: column[order] for name, column in columns.items()},
        held=np.concatenate(held)[order] if len(held) == len(parts) else None,
        info=info,
    )


def _whole(part: Trace) -> list[str]:
    given = part.info.get("whole_backward", [])
    return list(map(str, given)) if isinstance(given, list) else []


def _origin(part: Trace) -> float:
    given = part.info.get("origin", 0.0)
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise DataError(f"a trace counts its times from {given!r}, which is no number of seconds")
    return float(given)
