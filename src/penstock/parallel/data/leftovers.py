"""What a step leaves over when all its backwards are done: gradients that are absent, and those that came too late.

Too late for its bucket is a contribution after the bucket's sum has begun (of a layer that ran in more microbatches than
in the step before), and the gradient of a parameter that began to require one after the buckets were made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.parallel.data.bucket import BucketEntry, no_gradient, require_dense
from penstock.parallel.data.reducer import Reducer
from penstock.parallel.dtensor import gradient_dtype, like, local, redistribute_grad

Missing = Literal["error", "zeros"]


def require_options(missing: object, reduce_dtype: torch.dtype | None, divisor: float) -> None:
    """Check what `GradientBuckets` was given.

    Raises:
        ConfigError: an option that cannot be used.
    """
    if missing not in ("error", "zeros"):
        raise ConfigError(f'missing must be "error" or "zeros", not {missing!r}')
    if reduce_dtype is not None and not reduce_dtype.is_floating_point:
        raise ConfigError(f"reduce_dtype must be a floating-point dtype, not {reduce_dtype}")
    if not divisor > 0:
        raise ConfigError(f"divisor must be a positive number, not {divisor!r}")


def resolve_absent(
    reducer: Reducer,
    entries: Sequence[BucketEntry],
    absent: Sequence[BucketEntry],
    missing: Missing,
    step: int,
) -> None:
    """Decide what absent gradients are; every replica calls it where any has some.

    Args:
        reducer: all replicas.
        entries: of all parameters.
        absent: those that got no gradient here, and contributed zeros.
        missing: what that means; see `GradientBuckets`.
        step: which, for the error.

    Raises:
        PenstockError: on every replica, where that is an error.
    """
    without = {entry.index for entry in absent}
    table = reducer.exchange([int(e.index in without) for e in entries])()
    holes = {e.index: [r for r, row in enumerate(table) if row[e.index]] for e in entries}
    if missing == "error":
        raise no_gradient(step, {entries[n]: where for n, where in holes.items() if where})
    for entry in absent:
        if len(holes[entry.index]) < reducer.size and entry.parameter.grad is None:
            entry.adopt()


def find_late(known: Sequence[tuple[str, Tensor]], entry_of: Mapping[int, BucketEntry]) -> dict[int, Tensor]:
    """Take what came too late out of the ``.grad`` of parameters, which are the places in the buckets again.

    Args:
        known: (name, parameter), those included that required no gradient when the buckets were made.
        entry_of: by the parameter's id.

    Returns:
        By the number among the known ones, the part that this process holds.
    """
    found: dict[int, Tensor] = {}
    for n, (name, parameter) in enumerate(known):
        entry = entry_of.get(id(parameter))
        part: Tensor | None = None
        if entry is not None:
            part = entry.late() if entry.ready else None
        elif parameter.requires_grad and parameter.grad is not None:
            require_dense(f"parameter {name!r}", parameter.grad)
            redistribute_grad(parameter)
            part = local(parameter.grad)
        if part is not None:
            found[n] = part
    return found


@torch.no_grad()
def add_late(
    reducer: Reducer,
    known: Sequence[tuple[str, Tensor]],
    entry_of: Mapping[int, BucketEntry],
    late: Mapping[int, Tensor],
    divisor: float,
    reduce_dtype: torch.dtype | None,
) -> None:
    """Sum what came too late over the replicas, on its own, and add it; every replica calls it where any has some.

    Args:
        reducer: all replicas.
        known, entry_of: as for `find_late`.
        late: what that found here.
        divisor, reduce_dtype: of the sums; see `GradientBuckets`.
    """
    table = reducer.exchange([int(n in late) for n in range(len(known))])()
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for n, (_, parameter) in enumerate(known):
        if any(row[n] for row in table):
            kinds.setdefault((gradient_dtype(parameter), local(parameter).device), []).append(n)
    for (dtype, device), numbers in kinds.items():
        wider = reduce_dtype is not None and reduce_dtype.itemsize > dtype.itemsize
        shapes = [local(known[n][1]).shape for n in numbers]
        sizes = [shape.numel() for shape in shapes]
        flat = torch.zeros(sum(sizes), dtype=reduce_dtype if wider else dtype, device=device)
        pieces = torch.split(flat, sizes)
        for n, piece in zip(numbers, pieces, strict=True):
            if n in late:
                piece.copy_(late[n].reshape(-1))
        reducer.start(flat).wait()
        flat.div_(divisor)
        for n, piece, shape in zip(numbers, pieces, shapes, strict=True):
            parameter = known[n][1]
            entry, total = entry_of.get(id(parameter)), piece.view(shape).to(dtype)
            if entry is None:
                parameter.grad = like(total, parameter)
            else:
                entry.view.add_(total)
