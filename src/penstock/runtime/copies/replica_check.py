"""Whether copies of parameters and buffers still have the same bits, looked at now and then.

Between processes a tensor is compared by a checksum: the sums of its bits, read as 64-bit integers, over 64 runs of its
memory. A difference in one run that is not made up for in the same run changes it, and so does what is in the wrong run. It
reads every byte once, on the device where the tensor is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import ReplicaError
from penstock.parallel.data.replica_checks import digest
from penstock.parallel.dtensor import local

RUNS = 64


class CopiedTensor(NamedTuple):
    """A tensor of which there are copies.

    Attributes:
        group: what is compared at once: a stage's, or a weight that several stages share.
        name: in the whole model.
        kind: "parameter" or "buffer".
        tensor: this process's part of it.
    """

    group: str
    name: str
    kind: str
    tensor: Tensor


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """A 64-bit number for each tensor's shape, dtype and bits."""
    sums = [_sums(tensor) for tensor in tensors]
    devices: dict[torch.device, list[int]] = {}
    for n, one in enumerate(sums):
        devices.setdefault(one.device, []).append(n)
    found = [0] * len(tensors)
    for numbers in devices.values():
        table = torch.stack([sums[n] for n in numbers]).cpu()  # waits for a device once
        for n, row in zip(numbers, table, strict=True):
            kind = f"{tuple(tensors[n].shape)} {tensors[n].dtype}".encode()
            found[n] = digest(kind + row.numpy().tobytes())
    return found


@torch.no_grad()
def _sums(tensor: Tensor) -> Tensor:
    part = local(tensor.detach()).resolve_conj().resolve_neg()
    if part.is_complex():
        part = torch.view_as_real(part)
    octets = part.contiguous().view(-1).view(torch.uint8)
    if octets.storage_offset() % 8:
        octets = octets.clone()
    each = len(octets) // (8 * RUNS)
    found = octets[: each * 8 * RUNS].view(torch.int64).view(RUNS, each).sum(1)
    rest = octets[each * 8 * RUNS :].to(torch.int64)  # fewer than 8 for each run
    weights = 3 ** (1 + torch.arange(len(rest), device=rest.device) // RUNS)
    return found.index_add_(0, torch.arange(len(rest), device=rest.device) % RUNS, rest * weights)


class ReplicaCheck:
    """Compares copies between processes.

    Args:
        held: what this process has copies of, or other processes may have; asked at every check.
        where: this process, in words.
        exchange: gives every process's value to all of them.
    """

    def __init__(
        self, held: Callable[[], Iterable[CopiedTensor]], where: str, exchange: Callable[[Any], list[Any]]
    ) -> None:
        self._held = held
        self._where = where
        self._exchange = exchange

    def run(self) -> None:
        """Compare; every process calls it.

        Raises:
            ReplicaError: on every process; names the first tensor that differs, and where.
        """
        held = list(self._held())
        groups: dict[str, dict[str, int]] = {}
        kinds = {one.name: one.kind for one in held}
        for one, number in zip(held, checksums([h.tensor for h in held]), strict=True):
            groups.setdefault(one.group, {})[one.name] = number
        told: list[dict[str, int]] = self._exchange(
            {group: digest(repr(list(found.items())).encode()) for group, found in groups.items()}
        )
        numbers: dict[str, set[int]] = {}
        for row in told:
            for group, number in row.items():
                numbers.setdefault(group, set()).add(number)
        wrong = [group for group, found in numbers.items() if len(found) > 1]
        if wrong:
            mine = {g: found for g, found in groups.items() if g in wrong}
            raise _differing(self._exchange([self._where, mine, kinds]))


def _differing(told: Sequence[Sequence[Any]]) -> ReplicaError:
    tensors: dict[tuple[str, str], dict[int, list[str]]] = {}
    kinds: dict[str, str] = {}
    for where, groups, its_kinds in told:
        kinds.update(its_kinds)
        for group, found in groups.items():
            for name, number in found.items():
                tensors.setdefault((group, name), {}).setdefault(number, []).append(where)
    wrong = {name: places for (_, name), places in tensors.items() if len(places) > 1}
    if not wrong:
        return ReplicaError("processes that hold the same stage have different parameters or buffers in it")
    return differs(kinds, wrong)


def differs(kinds: Mapping[str, str], wrong: Mapping[str, Mapping[int, Sequence[str]]]) -> ReplicaError:
    """The error for tensors whose copies differ.

    Args:
        kinds: "parameter" or "buffer", by name.
        wrong: by name and then by what is the same, the places that have it.
    """
    name, places = next(iter(wrong.items()))
    alike = sorted(places.values(), key=len, reverse=True)
    each = "; another on ".join(", ".join(where) for where in alike)
    more = f" So are {len(wrong) - 1} others." if len(wrong) > 1 else ""
    return ReplicaError(
        f"the copies of {kinds.get(name, 'tensor')} {name!r} are no longer the same: one value on {each}.{more} Something "
        "changed them on some of the copies only (an update outside the pipeline's optimizer, another seed, a load, a "
        "conversion after the Pipeline was built, faulty memory); load a checkpoint to continue",
        name,
    )
