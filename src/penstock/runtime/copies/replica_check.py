"""Periodic comparison of copies of parameters and buffers, bit for bit.

Processes compare checksums: the sums of a tensor's bits, read as 64-bit integers, over 64 chunks of its memory. Every
difference changes the checksum, unless another one in the same chunk cancels it. Swapped chunks change it, too. Computing
it reads every byte once, on the tensor's device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.base.errors import ReplicaError
from penstock.parallel.dtensor import local
from penstock.parallel.replicas.replica_checks import digest

CHUNKS = 64


class CopiedTensor(NamedTuple):
    """A tensor that has copies.

    Attributes:
        group: name of the tensors compared at once: a stage, or a weight that several stages share.
    """

    group: str
    name: str
    kind: str
    tensor: Tensor


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


class ReplicaCheck:
    """Comparison of copies between processes."""

    def __init__(
        self, tensors: Callable[[], Iterable[CopiedTensor]], where: str, exchange: Callable[[Any], list[Any]]
    ) -> None:
        self._tensors = tensors
        self._where = where
        self._exchange = exchange

    def run(self) -> None:
        """Compare; every process calls it."""
        tensors = list(self._tensors())
        groups: dict[str, dict[str, int]] = {}
        kinds = {tensor.name: tensor.kind for tensor in tensors}
        for tensor, checksum in zip(tensors, checksums([t.tensor for t in tensors]), strict=True):
            groups.setdefault(tensor.group, {})[tensor.name] = checksum
        rows: list[dict[str, int]] = self._exchange(
            {group: digest(repr(list(members.items())).encode()) for group, members in groups.items()}
        )
        digests: dict[str, set[int]] = {}
        for row in rows:
            for group, number in row.items():
                digests.setdefault(group, set()).add(number)
        differing = {group: groups[group] for group in groups if len(digests[group]) > 1}
        if any(len(numbers) > 1 for numbers in digests.values()):
            raise _error_of(self._exchange([self._where, differing, kinds]))


def _error_of(rows: Sequence[Sequence[Any]]) -> ReplicaError:
    tensors: dict[tuple[str, str], dict[int, list[str]]] = {}
    kinds: dict[str, str] = {}
    for where, groups, kinds_there in rows:
        kinds.update(kinds_there)
        for group, members in groups.items():
            for name, checksum in members.items():
                tensors.setdefault((group, name), {}).setdefault(checksum, []).append(where)
    differing = {name: places for (_, name), places in tensors.items() if len(places) > 1}
    if not differing:
        return ReplicaError("processes that hold the same stage have different parameters or buffers in it")
    return difference_error(kinds, differing)


def difference_error(
    kinds: Mapping[str, str], differing: Mapping[str, Mapping[int, Sequence[str]]]
) -> ReplicaError:
    """Return the error for tensors whose copies differ."""
    name, places = next(iter(differing.items()))
    alike = sorted(places.values(), key=len, reverse=True)
    each = "; another on ".join(", ".join(where) for where in alike)
    more = f" {len(differing) - 1} other tensors differ, too." if len(differing) > 1 else ""
    return ReplicaError(
        f"the copies of {kinds.get(name, 'tensor')} {name!r} are no longer the same: one value on {each}.{more} Something "
        "changed them on some of the copies only (an update outside the pipeline's optimizer, another seed, a load, a "
        "conversion after the Pipeline was built, faulty memory); load a checkpoint to continue",
        name,
    )
