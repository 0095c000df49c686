"""Numbers as people read them: times in a unit that suits them, and amounts of memory."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

from penstock.trace.events import Trace


class Unit(NamedTuple):
    """A unit of time."""

    name: str  # its abbreviation; empty for simulated ticks
    scale: float  # how many of it make one unit of the trace

    def text(self, time: Any, digits: str = ".4g") -> str:
        """Return a time of the trace in this unit."""
        return f"{float(time) * self.scale:{digits}} {self.name}".rstrip()


TICKS = Unit("", 1.0)


def is_measured(trace: Trace) -> bool:
    """Return whether a trace was recorded in a run, in seconds."""
    return trace.info.get("source") == "measured"


def unit_of(traces: Iterable[Trace]) -> Unit:
    """Return the unit of seconds in which the longest trace is between 1 and 1000; simulated ticks stay ticks."""
    measured = [trace for trace in traces if is_measured(trace)]
    if not measured:
        return TICKS
    return unit_of_seconds(max(float(trace.end.max(initial=0)) for trace in measured))


def unit_of_seconds(longest: float) -> Unit:
    """Return the unit in which a number of seconds is between 1 and 1000."""
    for name, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if longest * scale >= 1.0:
            return Unit(name, scale)
    return Unit("ns", 1e9)


def decimals(total: float) -> int:
    """Return how many decimals show a thousandth of a total."""
    return max(0, 2 - math.floor(math.log10(total))) if total > 0 else 0


def finite(value: object) -> float | None:
    """Return a value read from a file if it is a finite number, else None."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return value if abs(value) <= sys.float_info.max else None


def amount(trace: Trace, held: int) -> str:
    """Return memory that a rank of a trace holds, with its unit: bytes or activations."""
    if trace.info.get("held", "bytes") != "bytes":
        return f"{held} activations"
    size = float(held)
    for name in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {name}"
        size /= 1024
    return f"{size:.4g} TiB"


def time_text(seconds: float) -> str:
    """Return seconds in a unit that suits them."""
    return unit_of_seconds(abs(seconds)).text(seconds) if seconds else "0 s"


def interval_text(low: float | None, high: float | None) -> str:
    """Return the ends of an interval of seconds, or that there is none if they are None."""
    return "no interval" if low is None or high is None else f"{time_text(low)} to {time_text(high)}"


def size_text(size: float) -> str:
    """Return bytes in a unit that suits them."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}" if size < 1e12 else f"{size / 1e12:.3g} TB"
    return f"{size:.0f} B"


def reserve_text(reserved: float) -> str:
    """Return a remark on bytes of a device that a plan leaves free; empty if there are none."""
    return f" ({size_text(reserved)} in reserve; see --memory-limit)" if reserved else ""


def batch_text(samples: int, sequence: int, unit: str) -> str:
    """Return the size of a batch, as in ``512 samples of 4,096 tokens``; without tokens if the unit is "samples"."""
    return f"{samples:,} samples" + ("" if unit == "samples" else f" of {sequence:,} tokens")


def parameters_text(count: float) -> str:
    """Return a number of parameters, as in ``8.03 billion parameters``."""
    for name, scale in (("billion ", 1e9), ("million ", 1e6)):
        if count >= scale:
            return f"{count / scale:.3g} {name}parameters"
    return f"{count:,.0f} parameters"
