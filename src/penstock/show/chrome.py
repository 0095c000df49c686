"""A trace in the Chrome trace event format, which ui.perfetto.dev and chrome://tracing open.

Every rank is a process with a track for its ops and, if it has any, one for messages and one for gathers and reductions.
Slices of a track must not overlap, so overlapping events continue on another track. A flow arrow leads from the op that sent
a value to the op of another rank that received it; a counter shows the rank's memory.

The format: "Trace Event Format" of the Chromium project, phases M, X, s, f and C. Times are microseconds, to three decimals.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from penstock.base.atomic import write_text
from penstock.base.errors import ConfigError, os_errors_as
from penstock.show.palette import KINDS
from penstock.trace.events import COLLECTIVES, Activity, Trace
from penstock.trace.messages import memory_curve, producers

_MESSAGES = (Activity.SEND, Activity.RECV)
_GROUPS = (
    ("compute", tuple(kind for kind in Activity if kind not in (*_MESSAGES, *COLLECTIVES))),
    ("communication", _MESSAGES),
    ("replicas", COLLECTIVES),
)
NANOSECONDS = 1e9

Event = dict[str, Any]


def write_chrome(trace: Trace, path: str | Path) -> Path:
    """Write a trace as Chrome JSON, and return the path."""
    path = Path(path)
    with os_errors_as(ConfigError, f"cannot write {path}"):
        write_text(path, json.dumps(chrome_events(trace), separators=(",", ":")))
    return path


def chrome_events(trace: Trace) -> Event:
    """Return a trace as the format's JSON object; seconds (or simulated ticks, as if seconds) become microseconds.

    Clocks of ranks have errors, by which a message may arrive before its sender began. Such messages get no arrow, and
    ``otherData`` gives their number.
    """
    origin = trace.start.min() if len(trace) else 0
    start = np.rint((trace.start - origin).astype(np.float64) * NANOSECONDS).astype(np.int64)
    end = np.rint((trace.end - origin).astype(np.float64) * NANOSECONDS).astype(np.int64)
    track = np.zeros(len(trace), np.int64)
    events: list[Event] = []
    for rank, rows in enumerate(trace.rank_slices()):
        events.append(_meta(rank, "process_name", 0, {"name": f"rank {rank}"}))
        events.append(_meta(rank, "process_sort_index", 0, {"sort_index": rank}))
        first = 0
        for group, kinds in _GROUPS:
            mine = np.arange(rows.start, rows.stop)[np.isin(trace.kind[rows], kinds)]
            lanes = _lanes(trace, mine, start, end)
            track[mine] = first + lanes
            for lane in range(int(lanes.max(initial=-1)) + 1):
                name = group + (f" {lane + 1}" if lane else "")
                events.append(_meta(rank, "thread_name", first + lane, {"name": name}))
                events.append(_meta(rank, "thread_sort_index", first + lane, {"sort_index": first + lane}))
            first += int(lanes.max(initial=-1)) + 1
    events += _slices(trace, start, end, track)
    flows, left_out = _flows(trace, start, end, track)
    events += [*flows, *_counters(trace, origin)]
    info = {key: str(value) for key, value in trace.info.items() if isinstance(value, str | int | float)}
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {**info, "arrows left out": left_out},
    }


def _lanes(trace: Trace, rows: Any, start: Any, end: Any) -> Any:
    """Return a lane for every row so that rows of a lane do not overlap; both halves of a pair get the same lane."""
    lanes = np.zeros(len(rows), np.int64)
    free: list[int] = []
    for n, row in enumerate(rows.tolist()):
        if n and trace.paired[row - 1]:
            lanes[n] = lanes[n - 1]
            continue
        lane = next((lane for lane, until in enumerate(free) if until <= start[row]), len(free))
        lanes[n] = lane
        free[lane : lane + 1] = [int(end[row])]
    return lanes


def _slices(trace: Trace, start: Any, end: Any, track: Any) -> Iterator[Event]:
    row = 0
    while row < len(trace):
        kind = Activity(int(trace.kind[row]))
        name, args = _name(trace, row), {"kind": KINDS[kind].meaning, **_numbers(trace, row)}
        last = row + 1 if trace.paired[row] else row
        if last > row:
            name = f"({name};{_name(trace, last)})"
            args = {"forward": _numbers(trace, row), "backward": _numbers(trace, last)}
        if trace.held is not None:
            args["held after"] = int(trace.held[last])
        place = _place(trace, track, row, int(start[row]))
        length = int(end[row] - start[row]) / 1000
        yield {"ph": "X", "name": name, "cat": kind.name, **place, "dur": length, "args": args}
        row = last + 1


def _place(trace: Trace, track: Any, row: int, time: int) -> Event:
    return {"pid": int(trace.rank[row]), "tid": int(track[row]), "ts": time / 1000}


def _name(trace: Trace, row: int) -> str:
    kind = Activity(int(trace.kind[row]))
    if kind > Activity.R:
        return KINDS[kind].meaning
    return f"{trace.stage[row]}{kind.name}{trace.microbatch[row]}"


def _numbers(trace: Trace, row: int) -> dict[str, int]:
    numbers = {"stage": int(trace.stage[row]), "microbatch": int(trace.microbatch[row])}
    return {name: number for name, number in numbers.items() if number >= 0}


def _flows(trace: Trace, start: Any, end: Any, track: Any) -> tuple[list[Event], int]:
    """Return an arrow for every message, from inside the sending slice to the start of the receiving one."""
    giver = producers(trace)
    takers = np.flatnonzero((giver >= 0) & (trace.rank[giver] != trace.rank))
    arrows: list[Event] = []
    left_out = 0
    for number, taker in enumerate(takers.tolist()):
        row = int(giver[taker])
        # A viewer binds an arrow to the slice at its time, so it leaves a nanosecond before the end at the latest.
        leaves = max(int(start[row]), min(int(end[row]) - 1, int(start[taker])))
        if leaves > start[taker]:
            left_out += 1
            continue
        name = "activation" if trace.kind[taker] == Activity.F else "gradient"
        common = {"name": name, "cat": "message", "id": number}
        arrows.append({"ph": "s", **common, **_place(trace, track, row, leaves)})
        arrows.append({"ph": "f", "bp": "e", **common, **_place(trace, track, taker, int(start[taker]))})
    return arrows, left_out


def _counters(trace: Trace, origin: Any) -> Iterator[Event]:
    if trace.held is None:
        return
    unit = str(trace.info.get("held", "bytes"))
    for rank in range(trace.ranks):
        curve = memory_curve(trace, rank)
        moments = np.rint((curve.time - origin).astype(np.float64) * NANOSECONDS).astype(np.int64).tolist()
        points = [(0, 0), *zip(moments, curve.held.tolist(), strict=True)]
        # Of several changes at one moment, only the last counts.
        points = [a for a, b in pairwise(points) if a[0] != b[0]] + points[-1:]
        for moment, held in points:
            yield {
                "ph": "C",
                "name": f"held ({unit})",
                "pid": rank,
                "ts": moment / 1000,
                "args": {unit: held},
            }


def _meta(rank: int, name: str, track: int, args: dict[str, object]) -> Event:
    return {"ph": "M", "name": name, "pid": rank, "tid": track, "args": args}
