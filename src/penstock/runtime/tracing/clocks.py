"""When ops start and end: on the host's clock, or where they run on a GPU by events on its stream.

A GPU works off its stream later than the host fills it, so the host's clock would tell when ops were asked for. Events
tell when they ran, and nobody waits for them until they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def clock(device: torch.device | None, moments: int) -> Callable[[], Any]:
    """A function that returns the present moment: seconds of ``time.perf_counter``, or an event that marks it.

    Args:
        device: the CUDA device whose moments are meant; None for the host's.
        moments: how many are kept at a time. After as many the first event is used again, so that a step
            makes no events of its own.
    """
    if device is None:
        return perf_counter
    events = cycle([torch.cuda.Event(enable_timing=True) for _ in range(moments)])  # type: ignore[no-untyped-call]

    def mark() -> Any:
        event = next(events)
        event.record(torch.cuda.current_stream(device))
        return event

    return mark


class Readings:
    """Moments of any clock of this process as seconds on the host's; waits for the devices on which they were taken.

    The events of a device are set against one of them, and that one against the host's clock: the device is idle then,
    so an event is reached as it is recorded. The device's ranks thus share one clock to the event's resolution, about
    half a microsecond, and devices agree to within what the host needs to notice an event, some ten microseconds.
    """

    def __init__(self) -> None:
        self._known: dict[torch.device, tuple[Any, float]] = {}

    def seconds(self, device: torch.device | None, moments: Sequence[Any]) -> npt.NDArray[np.float64]:
        """The moments of one rank, of which there is at least one.

        Args:
            device: as for `clock`.
            moments: what that clock returned.
        """
        if device is None:
            return np.array(moments, np.float64)
        if device not in self._known:
            self._known[device] = moments[0], _on_host_clock(device, moments[0])
        first, at = self._known[device]
        return np.array([at + first.elapsed_time(moment) / 1e3 for moment in moments], np.float64)


def _on_host_clock(device: torch.device, moment: Any) -> float:
    torch.cuda.synchronize(device)
    present = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    present.record(torch.cuda.current_stream(device))
    present.synchronize()
    return perf_counter() - float(moment.elapsed_time(present)) / 1e3
