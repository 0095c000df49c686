"""Digests of batches, by which processes find that they were given different ones."""

from __future__ import annotations

import math
from collections.abc import Iterable
from zlib import crc32

import torch
from torch import Tensor

from penstock.parallel.checksums import checksums
from penstock.parallel.dtensor import local
from penstock.parallel.replicas.replica_checks import digest
from penstock.stage.values import leaves_of

FULL_STEPS = 3
"""First training steps in which every number of a batch counts; later, a sample of them does."""

_SAMPLE = 4096
"""Most numbers in the sample of a tensor."""

_EVERY = 100
"""Training steps from one sample to the next, if reading it has to wait for a device."""


def batch_digest(values: Iterable[object], number: int, trains: bool) -> int | None:
    """Return a digest of a step's batch; None if it has no plain tensor, or is not to be compared in this step."""
    return digest_of(values) if trains and number < FULL_STEPS else sample_digest_of(values, number)


def digest_of(values: Iterable[object]) -> int | None:
    """Return a digest of all numbers of the tensors in some values; None if there is no plain tensor."""
    plain = _plain_tensors(values)
    return digest(repr(checksums(plain)).encode()) if plain else None


def sample_digest_of(values: Iterable[object], number: int = 0) -> int | None:
    """Return a digest of the tensors' shapes and of a sample of their numbers; it takes microseconds.

    None if there is no plain tensor, or if reading them has to wait for a device and `number` is not a multiple of 100.
    """
    plain = _plain_tensors(values)
    if not plain or (number % _EVERY and any(leaf.device.type != "cpu" for leaf in plain)):
        return None
    found = 0
    for leaf in plain:
        found = crc32(f"{tuple(leaf.shape)} {leaf.dtype}".encode(), found)
        found = crc32(_sample(leaf), found)
    return found


def _plain_tensors(values: Iterable[object]) -> list[Tensor]:
    leaves = [leaf for value in values for leaf in leaves_of(value) if isinstance(leaf, Tensor)]
    return [leaf for leaf in leaves if leaf.layout is torch.strided and not leaf.is_nested]


def _sample(tensor: Tensor) -> bytes:
    """Return the bytes of numbers that are spread over a tensor, with every row among them if there are not too many."""
    sample = local(tensor.detach())
    while sample.numel() > _SAMPLE:
        longest = max(range(1, sample.dim()), key=lambda d: sample.shape[d], default=0)
        dim = longest if sample.shape[longest] > 1 else 0
        step = min(math.ceil(sample.numel() / _SAMPLE), sample.shape[dim])
        sample = sample[(slice(None),) * dim + (slice(step // 2, None, step),)]
    sample = sample.resolve_conj().resolve_neg()
    if sample.is_complex():
        sample = torch.view_as_real(sample)
    return sample.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
