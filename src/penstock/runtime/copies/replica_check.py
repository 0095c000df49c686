"""Periodic comparison of copies of parameters and buffers, bit for bit, by their checksums."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from penstock.base.errors import ReplicaError
from penstock.parallel.checksums import checksums
from penstock.parallel.replicas.replica_checks import digest


class CopiedTensor(NamedTuple):
    """A tensor that has copies.

    Attributes:
        group: name of the tensors compared at once: a stage, or a weight that several stages share.
    """

    group: str
    name: str
    kind: str
    tensor: Tensor


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
