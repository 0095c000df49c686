"""Gradients that are absent, or came too late for their bucket, when all backwards of a step are done.

Two kinds come too late: a contribution after the bucket's reduction has begun (of a layer that ran in more microbatches
than in the step before), and the gradient of a parameter that began to require one after the buckets were made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from penstock.parallel.data.bucket import BucketEntry, require_dense
from penstock.parallel.data.reducer import GroupReducer
from penstock.parallel.dtensor import from_local_like, gradient_dtype, local, redistribute_grad


def resolve_absent(
    reducer: GroupReducer, entries: Sequence[BucketEntry], absent: Sequence[BucketEntry]
) -> None:
    """Give absent gradients the sum, if another replica had one; every replica calls it if any has absent ones.

    Args:
        reducer: this replica's end of the communicator.
        entries: bucket entries of all parameters.
        absent: entries that got no gradient on this replica, and contributed zeros.
    """
    absent_here = {entry.index for entry in absent}
    table = reducer.exchange([int(e.index in absent_here) for e in entries])()
    for entry in absent:
        if entry.parameter.grad is None and not all(row[entry.index] for row in table):
            entry.set_grad()


def find_late(known: Sequence[tuple[str, Tensor]], entry_of: Mapping[int, BucketEntry]) -> dict[int, Tensor]:
    """Take late gradients out of the ``.grad`` of parameters, and reset those to their places in the buckets.

    Args:
        known: (name, parameter) pairs, including parameters that required no gradient when the buckets were made.
        entry_of: bucket entry of each parameter that has one, by the parameter's id.

    Returns:
        This process's shard of each late gradient, by the parameter's number in `known`.
    """
    late: dict[int, Tensor] = {}
    for n, (name, parameter) in enumerate(known):
        entry = entry_of.get(id(parameter))
        shard: Tensor | None = None
        if entry is not None:
            shard = entry.take_late() if entry.ready else None
        elif parameter.requires_grad and parameter.grad is not None:
            require_dense(f"parameter {name!r}", parameter.grad)
            redistribute_grad(parameter)
            shard = local(parameter.grad)
        if shard is not None:
            late[n] = shard
    return late


@torch.no_grad()
def add_late(
    reducer: GroupReducer,
    known: Sequence[tuple[str, Tensor]],
    entry_of: Mapping[int, BucketEntry],
    late: Mapping[int, Tensor],
) -> None:
    """Sum late gradients over the replicas and add them to the reduced ones; every replica calls it if any has some.

    Args:
        reducer: this replica's end of the communicator.
        known, entry_of: parameters and bucket entries, as for `find_late`.
        late: late gradients of this replica, as `find_late` returns them.
    """
    table = reducer.exchange([int(n in late) for n in range(len(known))])()
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for n, (_, parameter) in enumerate(known):
        if any(row[n] for row in table):
            kinds.setdefault((gradient_dtype(parameter), local(parameter).device), []).append(n)
    for (dtype, device), numbers in kinds.items():
        shapes = [local(known[n][1]).shape for n in numbers]
        sizes = [shape.numel() for shape in shapes]
        flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
        views = torch.split(flat, sizes)
        for n, view in zip(numbers, views, strict=True):
            if n in late:
                view.copy_(late[n].reshape(-1))
        reducer.all_reduce(flat).wait()
        for n, view, shape in zip(numbers, views, shapes, strict=True):
            parameter = known[n][1]
            entry, total = entry_of.get(id(parameter)), view.view(shape)
            if entry is None:
                parameter.grad = from_local_like(total, parameter)
            else:
                entry.view.add_(total)
