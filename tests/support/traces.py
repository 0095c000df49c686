"""Traces written by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from penstock.trace.events import Activity, Trace

_EVENT = re.compile(r"(\d*)([A-Z]+)(\d*)(&?)@([\d.]+)-([\d.]+)")


def trace_of(*ranks: str, info: Mapping[str, object] | None = None) -> Trace:
    """A trace from one line of events a rank: ``0F3@1-2``, ``REDUCE@5-6``, or ``0F3&@1-4 0B1@1-4`` for a pair."""
    rows = []
    for rank, line in enumerate(ranks):
        for stage, kind, microbatch, paired, start, end in _EVENT.findall(line):
            number = float if "." in start + end else int
            ends = number(start), number(end)
            rows.append((rank, int(stage or -1), Activity[kind], int(microbatch or -1), *ends, bool(paired)))
    columns = [np.array(column) for column in zip(*rows, strict=True)] or [np.zeros(0, np.int64)] * 7
    rank, stage, kind, microbatch, start, end, paired = columns
    return Trace(
        ranks=len(ranks), rank=rank.astype(np.int32), stage=stage.astype(np.int32), kind=kind.astype(np.int8),
        microbatch=microbatch.astype(np.int32), start=start, end=end, paired=paired.astype(np.bool_), info=dict(info or {}),
    )  # fmt: skip
