"""Checksums of tensors, to compare them bit for bit between processes.

A checksum has the sums of a tensor's bits, read as 64-bit integers, over 64 chunks of its memory. Every difference changes
it, unless another one in the same chunk cancels it. Swapped chunks change it, too. Computing it reads every byte once, on
the tensor's device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.parallel.dtensor import local
from penstock.parallel.replicas.replica_checks import digest

CHUNKS = 64


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """Return a 64-bit checksum of each tensor's shape, dtype and bits."""
    sums = [_sums(tensor) for tensor in tensors]
    devices: dict[torch.device, list[int]] = {}
    for n, row in enumerate(sums):
        devices.setdefault(row.device, []).append(n)
    digests = [0] * len(tensors)
    for numbers in devices.values():
        table = torch.stack([sums[n] for n in numbers]).cpu()  # synchronizes with each device once
        for n, row in zip(numbers, table, strict=True):
            kind = f"{tuple(tensors[n].shape)} {tensors[n].dtype}".encode()
            digests[n] = digest(kind + row.numpy().tobytes())
    return digests


@torch.no_grad()
def _sums(tensor: Tensor) -> Tensor:
    shard = local(tensor.detach()).resolve_conj().resolve_neg()
    if shard.is_complex():
        shard = torch.view_as_real(shard)
    octets = shard.contiguous().view(-1).view(torch.uint8)
    # A view as int64 must begin at a multiple of 8 bytes.
    if octets.storage_offset() % 8:
        octets = octets.clone()
    length = len(octets) // (8 * CHUNKS)
    sums = octets[: length * 8 * CHUNKS].view(torch.int64).view(CHUNKS, length).sum(1)
    rest = octets[length * 8 * CHUNKS :].to(torch.int64)  # fewer than 8 for each chunk
    positions = torch.arange(len(rest), device=rest.device)
    # Powers of 3 are odd, so modulo 2**64 no change of a byte is lost; each byte of a chunk has another power.
    return sums.index_add_(0, positions % CHUNKS, rest * 3 ** (1 + positions // CHUNKS))
