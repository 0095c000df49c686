"""Values of every process of a group for every process of it, as `penstock.encoding` writes them: nothing is unpickled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist

from penstock.encoding import decode, encode


def _wait(work: dist.Work) -> None:
    work.wait()


def gather_values(
    value: object, group: dist.ProcessGroup | None, finish: Callable[[dist.Work], None] = _wait
) -> list[Any]:
    """The values of all processes of a group, by rank; all of them call it.

    Args:
        value: as `encode` takes it.
        group: None for all processes.
        finish: waits for what was begun.

    Raises:
        TypeError: as `encode`, before anything is sent.
        TransportError: as `decode`.
        RuntimeError: what ``torch.distributed``, or `finish`, raises where a process is gone.
    """
    size = dist.get_world_size(group)
    # Between hosts' memories where the group can, so that nobody waits for a device.
    device = "cpu" if "cpu:" in dist.get_backend_config(group) else "cuda"
    data = torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    finish(_started(dist.all_gather(lengths, torch.tensor([len(data)], device=device), group, async_op=True)))
    counts = [int(length) for length in lengths]
    padded = torch.zeros(max(counts), dtype=torch.uint8, device=device)
    padded[: len(data)] = data
    parts = [torch.empty_like(padded) for _ in range(size)]
    finish(_started(dist.all_gather(parts, padded, group, async_op=True)))
    return [decode(part[:n].cpu().numpy().data) for part, n in zip(parts, counts, strict=True)]


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this process is in the group"
    return work
