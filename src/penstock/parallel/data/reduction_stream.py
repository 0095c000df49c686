"""Streams for reductions: on CUDA one next to the compute stream; on other devices the communicator decides."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


class ReductionStream:
    """A device's stream for reductions. Events live only from record to wait, so errors leave none behind."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)

    def compute_stream(self) -> torch.cuda.Stream | None:
        """Return the device's current stream; None where there are no streams."""
        return torch.cuda.current_stream(self.device) if self.stream is not None else None

    def wait_for(self, flat: Tensor, streams: Iterable[torch.cuda.Stream | None]) -> None:
        """Make later reductions wait for the work so far on these streams, which used `flat`."""
        for stream in streams:
            if self.stream is not None and stream is not None:
                self.stream.wait_stream(stream)
                # So that its memory, once freed, is not reused before these streams are done with it.
                flat.record_stream(stream)
                flat.record_stream(self.stream)

    def use(self) -> AbstractContextManager[object]:
        """Return a context that puts work on this stream."""
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()

    def join(self) -> None:
        """Make the device's current stream wait for all reductions so far; the host does not wait."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
