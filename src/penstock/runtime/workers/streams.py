"""CUDA streams for ranks that are threads of one process.

On one stream ranks would run one after the other, in the order in which their threads happen to ask. So each rank has
a stream of its own (on every device in use, since a rank may get values from another device), and whatever crosses from
one stream to another waits for an event. These are all the crossings:

- a step begins: the ranks' streams wait for the caller's, on which inputs were made, parameters updated and
  gradients zeroed;
- a value is handed from one rank to another, forward or back: `Streams.ready` and `Streams.arrive`;
- a step ends, or fails: the caller's stream waits for the ranks'.

Within a rank everything runs on its one stream. That holds for its backward, too: autograd runs a node on the stream of
its forward, starts from the stream on which ``backward`` is called, and lets that stream wait for the gradients at the
end (PyTorch's notes on CUDA semantics, "Stream semantics of backward passes"). A rank's streams stay the
same as long as the pipeline, as graphs that are kept from step to step are tied to them.

Memory belongs to the stream that it was allocated on, and may be used again there once it is freed. A value that is used
on another stream is therefore marked (``record_stream``) before the last reference to it can go. Inputs need no mark: the
caller holds them until its stream has waited for the ranks'. Nor do results and gradients: freed, they go back to a
rank's stream, and that waits for the caller's before it runs anything again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from penstock.stage.values import Message

Events = dict[tuple[int, int, int, torch.device], Any]
"""The events of values on their way: by sender, receiver, tag and device."""


def device_of(modules: Sequence[nn.Module]) -> torch.device | None:
    """The CUDA device of the first parameter or buffer that is on one; None if none is."""
    return next(iter(_devices(modules)), None)


class Streams:
    """The ranks' streams.

    Args:
        devices: by rank, the device on which it computes; None on the CPU.
        used: every CUDA device on which there are values.
    """

    def __init__(self, devices: Sequence[torch.device | None], used: Sequence[torch.device]) -> None:
        self.devices = devices
        self._of: list[Mapping[torch.device, Any]] = [
            {device: torch.cuda.Stream(device) for device in used}  # type: ignore[no-untyped-call]
            for _ in devices
        ]
        self._callers = {device: torch.cuda.current_stream(device) for device in used}

    @staticmethod
    def of(modules: Sequence[Sequence[nn.Module]]) -> Streams | None:
        """The streams for ranks that hold these modules; None if all are on the CPU."""
        used = sorted({d for held in modules for d in _devices(held)}, key=str)
        return Streams([device_of(held) for held in modules], used) if used else None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Between the caller's work before and the caller's work after."""
        before = self._callers
        self._callers = {device: torch.cuda.current_stream(device) for device in before}
        for streams in self._of:
            for device, stream in streams.items():
                # What the last step returned was used on its caller's stream; freed, it may be memory of this one again.
                for caller in {self._callers[device], before[device]}:
                    stream.wait_stream(caller)
        try:
            yield
        finally:
            for streams in self._of:
                for device, stream in streams.items():
                    self._callers[device].wait_stream(stream)

    def on_rank(self, rank: int, job: Callable[[], Any]) -> Callable[[], Any]:
        """The job on a rank's streams, to be called by its thread: torch keeps the current stream per thread."""
        own = self.devices[rank]
        # The last one entered says which device is current.
        order = sorted(self._of[rank].items(), key=lambda pair: pair[0] == own)

        def run() -> None:
            with ExitStack() as stack:
                for _, stream in order:
                    stack.enter_context(torch.cuda.stream(stream))
                job()

        return run

    def ready(self, events: Events, source: int, target: int, tag: int, message: Message) -> None:
        """Mark on the source's stream that a message is made: all that makes it was queued there before."""
        for device in _places(message):
            event = events.get((source, target, tag, device))
            if event is None:
                event = events[source, target, tag, device] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._of[source][device])

    def arrive(self, events: Events, source: int, target: int, tag: int, message: Message) -> None:
        """Let the target's stream wait until the message is made, and keep its memory until that stream is done with it.

        To be called while the message is held, before anything uses it.
        """
        streams = self._of[target]
        for device in _places(message):
            streams[device].wait_event(events[source, target, tag, device])
        for leaf in message.leaves:
            if isinstance(leaf, Tensor) and leaf.is_cuda:
                leaf.record_stream(streams[leaf.device])


def _devices(modules: Sequence[nn.Module]) -> Iterator[torch.device]:
    for module in modules:
        for tensor in chain(module.parameters(), module.buffers()):
            if tensor.is_cuda:
                yield tensor.device


def _places(message: Message) -> set[torch.device]:
    return {leaf.device for leaf in message.leaves if isinstance(leaf, Tensor) and leaf.is_cuda}
