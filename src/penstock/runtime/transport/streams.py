"""CUDA streams for ranks that are threads of one process.

On one stream ranks would run one after the other, in the order in which their threads launch kernels. So each rank has its
own stream on every device in use (since it may get values from another device), and a value that crosses from one stream to
another waits for an event. The crossings are:

- A step begins: the ranks' streams wait for the caller's, on which inputs were made, parameters updated and gradients
  zeroed.
- A rank sends a value to another, forward or backward: `Streams.record_event` and `Streams.wait_event`.
- A step ends, or fails: the caller's stream waits for the ranks'.

Within a rank everything runs on its one stream, its backward included: autograd runs a node on the stream of its forward,
starts from the stream on which ``backward`` is called, and lets that stream wait for the gradients at the end (PyTorch's
notes on CUDA semantics, "Stream semantics of backward passes"). A rank's streams stay the same as long as the pipeline,
since graphs that are kept from step to step depend on them.

Memory belongs to the stream on which it was allocated, which may reuse it once it is freed. A value used on another stream
is therefore marked (``record_stream``) before its last reference can go. Inputs need no mark: the caller keeps them until
its stream has waited for the ranks'. Nor do results and gradients: when freed, they return to a rank's stream, which waits
for the caller's before it runs anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.stage.devices import device_of, devices_of
from penstock.stage.values import Message

Events = dict[tuple[int, int, int, torch.device], Any]
"""The events of messages that are under way, by sender, receiver, tag and device."""


class Streams:
    """The CUDA streams of the ranks."""

    def __init__(self, devices: Sequence[torch.device | None], used: Sequence[torch.device]) -> None:
        self.devices = devices
        self._by_rank: list[Mapping[torch.device, Any]] = [
            {device: torch.cuda.Stream(device) for device in used} for _ in devices
        ]
        self._callers = {device: torch.cuda.current_stream(device) for device in used}

    @staticmethod
    def of(modules: Sequence[Sequence[nn.Module]], devices: Sequence[torch.device] = ()) -> Streams | None:
        """Return the streams for ranks with these modules; None if all are on the CPU.

        Args:
            devices: device of each rank, where they differ (default none): a tied weight may be on another rank's.
        """
        if devices:
            cuda = [device if device.type == "cuda" else None for device in devices]
            of_gpus = sorted({device for device in cuda if device is not None}, key=str)
            return Streams(cuda, of_gpus) if of_gpus else None
        used = sorted({d for of_rank in modules for d in devices_of(of_rank)}, key=str)
        return Streams([device_of(of_rank) for of_rank in modules], used) if used else None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Return a context for one step, which orders it after the caller's earlier work and before its later work."""
        before = self._callers
        self._callers = {device: torch.cuda.current_stream(device) for device in before}
        for streams in self._by_rank:
            for device, stream in streams.items():
                # Results of the last step were used on that caller's stream; freed, their memory may be reused by this one.
                for caller in {self._callers[device], before[device]}:
                    stream.wait_stream(caller)
        try:
            yield
        finally:
            for streams in self._by_rank:
                for device, stream in streams.items():
                    self._callers[device].wait_stream(stream)

    def on_rank(self, rank: int, job: Callable[[], Any]) -> Callable[[], Any]:
        """Return the job on a rank's streams; the rank's thread must call it, since torch keeps streams per thread."""
        rank_device = self.devices[rank]
        # The stream entered last decides which device is current.
        order = sorted(self._by_rank[rank].items(), key=lambda pair: pair[0] == rank_device)

        def run() -> None:
            with ExitStack() as stack:
                for _, stream in order:
                    stack.enter_context(torch.cuda.stream(stream))
                job()

        return run

    def record_event(self, events: Events, source: int, target: int, tag: int, message: Message) -> None:
        """Record on the source's stream that a message is made, once all work that makes it is queued there."""
        for device in _message_devices(message):
            event = events.get((source, target, tag, device))
            if event is None:
                event = events[source, target, tag, device] = torch.cuda.Event()
            event.record(self._by_rank[source][device])

    def wait_event(self, events: Events, source: int, target: int, tag: int, message: Message) -> None:
        """Make the target's stream wait for a message, and keep its memory until that stream has used it.

        Call it before anything uses the message.
        """
        streams = self._by_rank[target]
        for device in _message_devices(message):
            streams[device].wait_event(events[source, target, tag, device])
        for leaf in message.leaves:
            if isinstance(leaf, Tensor) and leaf.is_cuda:
                leaf.record_stream(streams[leaf.device])


def _message_devices(message: Message) -> set[torch.device]:
    return {leaf.device for leaf in message.leaves if isinstance(leaf, Tensor) and leaf.is_cuda}
