"""The link between a rank's device and its store, in one direction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch


class Link:
    """Copies of one rank in one direction, one after the other, beside its ops.

    On a GPU they are on a stream of their own. On a CPU a thread makes them, which lives as long as a step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread: ThreadPoolExecutor | None = None

    def open(self) -> None:
        """Begin a step."""
        if self._stream is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-link")

    def start(self, copies: Sequence[Callable[[], None]]) -> Callable[[], object]:
        """Start copies, after the rank's work so far and the copies before; return a function that waits for these alone."""
        if self._thread is not None:
            return self._thread.submit(_call_all, copies).result
        assert self._stream is not None, "the step was begun"
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            _call_all(copies)
            done = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(done)

    def close(self) -> None:
        """End a step: no copy reads or writes memory any more, and those that have not begun never will."""
        if self._stream is not None:
            self._stream.synchronize()
        elif self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread = None


def _call_all(copies: Sequence[Callable[[], None]]) -> None:
    for copy in copies:
        copy()
