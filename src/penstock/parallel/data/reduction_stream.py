"""Where reductions run: on CUDA a stream beside the one that computes, elsewhere wherever the communicator likes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


class ReductionStream:
    """A device's lane for reductions. Its events live only from the record to the wait, so errors leave none behind."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def here(self) -> torch.cuda.Stream | None:
        """The stream that computes now; None where there are no streams."""
        return torch.cuda.current_stream(self.device) if self.stream is not None else None

    def admit(self, flat: Tensor, streams: Iterable[torch.cuda.Stream | None]) -> None:
        """What enters the lane from now on runs after what these streams, which used `flat`, have been given so far."""
        for stream in streams:
            if self.stream is not None and stream is not None:
                self.stream.wait_stream(stream)
                # Its memory is not used again, once it is freed, before these are done with it.
                flat.record_stream(stream)
                flat.record_stream(self.stream)

    def inside(self) -> AbstractContextManager[object]:
        """Within it, work goes into the lane."""
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()

    def join(self) -> None:
        """The stream that computes now goes on only after all work in the lane; the host does not wait."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
