"""A batch split into microbatches."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

# Private, but other libraries register their output types in it.
from torch.utils import _pytree

from penstock.base.counts import plural
from penstock.base.errors import BatchError

Dims = object
"""Dimension of a value's tensors along which it is split: a number, None for what every microbatch gets whole, or these in a
structure, each for a part of the value."""


@dataclass(frozen=True)
class Microbatches:
    """A batch already split into microbatches, which may differ in shape.

    Attributes:
        parts: one value for each microbatch, in order.
    """

    parts: Sequence[object]


def split_batch(
    value: object,
    cuts: int | Sequence[range],
    what: str,
    device: torch.device | None = None,
    dims: Dims = 0,
) -> tuple[list[object], list[int | None]]:
    """Split every tensor of a batch into microbatches; other leaves go to all of them.

    Args:
        value: a tensor, or tensors in tuples, lists and dicts; or `Microbatches`.
        cuts: number of microbatches; where it does not divide the batch, the first ones are larger by one row; or
            the rows of each.
        dims: the dimension that is split, and along which rows of `Microbatches` are counted (default 0).

    Returns:
        The microbatches, and the rows (the size of that dimension) of each; None for one of `Microbatches` whose tensors
        have no common number of rows.
    """
    if isinstance(value, Microbatches):
        return _given_parts(value, cuts, what, device, dims)
    leaves, structure = _pytree.tree_flatten(value)
    require_divisible(value, what)
    of_leaves = _dims_of(dims, structure, what)
    sizes = _sizes(leaves, of_leaves)
    if len(sizes) != 1 or None in sizes:
        reason = "no tensor" if not sizes else f"batch sizes {sorted(map(str, sizes))}"
        raise BatchError(f"{what}: {reason}; it needs tensors that share dimension 0, the batch")
    (size,) = sizes
    assert size is not None
    if isinstance(cuts, int):
        if size < cuts:
            raise BatchError(
                f"{what}: a batch of {size} is too small for {plural(cuts, 'microbatch')}; every one needs at least one row"
            )
        cuts = even_cuts(size, cuts)
    # A tensor that is there twice is one object in every microbatch, too.
    tensors = _moved(leaves, device)
    parts = {
        (id(leaf), dim): _cut(tensors[id(leaf)], cuts, dim)
        for leaf, dim in zip(leaves, of_leaves, strict=True)
        if isinstance(leaf, Tensor)
    }
    of_each = [
        parts.get((id(leaf), dim), (leaf,) * len(cuts)) for leaf, dim in zip(leaves, of_leaves, strict=True)
    ]
    return (
        [_pytree.tree_unflatten([leaf[n] for leaf in of_each], structure) for n in range(len(cuts))],
        [len(rows) for rows in cuts],
    )


def even_cuts(size: int, microbatches: int) -> list[range]:
    """Return the rows of each microbatch; where they do not divide the batch, the first ones are larger by one."""
    rows, extra = divmod(size, microbatches)
    starts = [rows * n + min(n, extra) for n in range(microbatches + 1)]
    return [range(*pair) for pair in pairwise(starts)]


def _cut(tensor: Tensor, cuts: Sequence[range], dim: int | None) -> Sequence[Tensor]:
    if dim is None:
        return [tensor] * len(cuts)
    return [tensor.narrow(dim, rows.start, len(rows)) for rows in cuts]


def _given_parts(
    value: Microbatches, cuts: int | Sequence[range], what: str, device: torch.device | None, dims: Dims
) -> tuple[list[object], list[int | None]]:
    count = cuts if isinstance(cuts, int) else len(cuts)
    if len(value.parts) != count:
        raise BatchError(
            f"{what}: {plural(len(value.parts), 'microbatch')} given, but there are {count}; a step takes another number "
            "by microbatches=..."
        )
    parts: list[object] = []
    rows: list[int | None] = []
    for part in value.parts:
        leaves, structure = _pytree.tree_flatten(part)
        sizes = _sizes(leaves, _dims_of(dims, structure, what))
        rows.append(sizes.pop() if len(sizes) == 1 else None)
        parts.append(on_device(part, device))
    return parts, rows


def on_device(value: object, device: torch.device | None) -> object:
    """Return a value whose tensors are without a graph, and on a device unless that is None."""
    leaves, structure = _pytree.tree_flatten(value)
    moved = _moved(leaves, device)
    return _pytree.tree_unflatten([moved.get(id(leaf), leaf) for leaf in leaves], structure)


def _moved(leaves: Sequence[object], device: torch.device | None) -> dict[int, Tensor]:
    # ``to(None)`` leaves a tensor where it is.
    return {id(leaf): leaf.detach().to(device) for leaf in leaves if isinstance(leaf, Tensor)}


def _dims_of(dims: Dims, structure: _pytree.TreeSpec, what: str) -> list[int | None]:
    """Return the dimension of each leaf of a structure."""
    found = _pytree._broadcast_to_and_flatten(dims, structure)
    if found is None or not all(dim is None or type(dim) is int for dim in found):
        raise BatchError(
            f"{what}: dims has {dims!r} for it; it must be a number, None for what every microbatch gets whole, or these in "
            "the structure of the value"
        )
    return found


def _sizes(leaves: Sequence[object], dims: Sequence[int | None]) -> set[int | None]:
    """Return the sizes of the dimensions that are split; None for a tensor without that dimension."""
    tensors = [
        (x, dim) for x, dim in zip(leaves, dims, strict=True) if isinstance(x, Tensor) and dim is not None
    ]
    return {x.shape[dim] if -x.dim() <= dim < x.dim() else None for x, dim in tensors}


_OFFSETS = re.compile(r"cu_?seq|cu_?len|offset|seq_?lens|indptr", re.IGNORECASE)
"""Names that people give to the offsets of packed sequences, such as cu_seqlens."""


def require_divisible(value: object, what: str) -> None:
    """Refuse parts of a value that have the numbers of several rows in no tensor, so that every microbatch gets all."""
    for path, leaf in _pytree.tree_flatten_with_path(value)[0]:
        _require_divisible(leaf, what + _pytree.keystr(path))


def _require_divisible(leaf: object, name: str) -> None:
    ways = "convert it to tensors of (batch, ...), or give every microbatch its own in penstock.Microbatches"
    if isinstance(leaf, Tensor):
        if leaf.is_nested:
            raise BatchError(
                f"{name} is a nested tensor, which has no rows to split; pad it (torch.nested.to_padded_tensor), or give "
                "every microbatch its own in penstock.Microbatches"
            )
        if _OFFSETS.search(name) and _may_be_offsets(leaf):
            raise BatchError(
                f"{name} has the offsets of packed sequences, {leaf[:4].tolist()} and so on, not a value for each row, so "
                "it cannot be split along dimension 0; give every microbatch its own in penstock.Microbatches"
            )
    elif isinstance(leaf, np.ndarray):
        raise BatchError(f"{name} is a NumPy array, and only tensors are split; give torch.from_numpy(...)")
    elif any(isinstance(inner, Tensor) for inner in _held(leaf)):
        raise BatchError(
            f"{name} is a {type(leaf).__name__}, which holds tensors that cannot be split; {ways}. Between two stages it "
            "travels if it is registered (torch.utils._pytree.register_pytree_node)"
        )


def _held(value: object, depth: int = 2) -> Iterator[object]:
    """Yield what an object holds in its attributes, and in the attributes of objects there."""
    if isinstance(value, type):
        return
    for inner in _pytree.tree_leaves(list(getattr(value, "__dict__", {}).values())):
        yield inner
        if depth > 1:
            yield from _held(inner, depth - 1)


def _may_be_offsets(tensor: Tensor) -> bool:
    """Return whether numbers are whole, and rise from 0; where all are 0, they are of rows."""
    whole = tensor.dim() == 1 and not (tensor.is_floating_point() or tensor.is_complex())
    return whole and bool(tensor[0] == 0) and bool(tensor[-1] > 0) and bool((tensor.diff() >= 0).all())
