"""Start and end of ops: on the host's clock, or for ops on a GPU by events on its stream.

A GPU works off its stream later than the host fills it, so on the host's clock an op would start when it is queued. Events
mark when it ran, and the host does not wait for them until they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def clock(device: torch.device | None, moments: int, stream: Any = None) -> Callable[[], Any]:
    """Return a function that returns the current moment: seconds of ``time.perf_counter``, or an event that marks it.

    Args:
        moments: number of moments kept at a time. After that many the first event is reused, so that a step makes no new
            events.
        stream: CUDA stream whose moments it marks; None (default) for the one that is current at each moment, which is
            looked up then.
    """
    if device is None:
        return perf_counter
    events = cycle([torch.cuda.Event(enable_timing=True) for _ in range(moments)])

    def mark() -> Any:
        event = next(events)
        event.record(torch.cuda.current_stream(device) if stream is None else stream)
        return event

    return mark


class Readings:
    """Moments of any clock of this process, in seconds on the host's clock; waits for the devices of the moments.

    The events of a device are compared with one of them, and that one with the host's clock while the device is idle and
    reaches an event at once. The ranks on one device thus share a clock to the event's resolution, about half a microsecond.
    Devices agree to within the time in which the host notices an event, some ten microseconds.
    """

    def __init__(self) -> None:
        self._first: dict[torch.device, tuple[Any, float]] = {}

    def seconds(self, device: torch.device | None, moments: Sequence[Any]) -> npt.NDArray[np.float64]:
        """Convert the moments of one rank to seconds."""
        if device is None:
            return np.array(moments, np.float64)
        if device not in self._first:
            self._first[device] = moments[0], _on_host_clock(device, moments[0])
        first, seconds = self._first[device]
        return np.array([seconds + first.elapsed_time(moment) / 1e3 for moment in moments], np.float64)


def _on_host_clock(device: torch.device, moment: Any) -> float:
    torch.cuda.synchronize(device)
    present = torch.cuda.Event(enable_timing=True)
    present.record(torch.cuda.current_stream(device))
    present.synchronize()
    return perf_counter() - float(moment.elapsed_time(present)) / 1e3
