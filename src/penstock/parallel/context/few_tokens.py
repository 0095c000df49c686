"""Few tokens of each chunk of a sample, by which layers and losses of parts are compared with those of whole samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.parallel.context.attention import PartExchange, SequencePart
from penstock.parallel.dtensor import is_dtensor, local

_PROBED = 8
"""Most tokens of each chunk that are compared with those of whole samples."""


def dims_of(leaf: object) -> list[int]:
    """Return the dimensions of a tensor that may be its tokens: 1, or the first of a table that all rows share."""
    if not isinstance(leaf, Tensor):
        return []
    first = next((d for d, size in enumerate(leaf.shape) if size != 1), 0)
    return [d for d in dict.fromkeys((1, first)) if d < leaf.dim()]


def few_of(leaf: Any, dim: int | None) -> Any:
    """Return the first tokens of each chunk of a tensor in float32; other values as they are.

    All rows have them, as a mask may leave some of them as they are.
    """
    if dim is None:
        return leaf
    own = local(leaf.detach())
    chunks = [chunk.narrow(dim, 0, probed(own.shape[dim])) for chunk in own.chunk(2, dim)]
    return widened(placed_like(leaf, torch.cat(chunks, dim).contiguous()))


def few_keys(leaf: Any, keys: int, chunks: int) -> Any:
    """Return a mask of so many keys with those of the first tokens of each chunk; other values as they are."""
    if not isinstance(leaf, Tensor) or is_dtensor(leaf) or leaf.dim() < 2 or leaf.shape[-1] != keys:
        return leaf
    return torch.cat([chunk[..., :_PROBED] for chunk in leaf.chunk(chunks, -1)], -1)


def whole_of(few: Any, dim: int | None, part: SequencePart, exchange: PartExchange) -> Any:
    """Return the tokens of all parts, of a tensor with those of one; other values as they are."""
    return few if dim is None else placed_like(few, part.join(gathered(few, exchange), dim))


def gathered(part: Tensor, exchange: PartExchange) -> Tensor:
    """Return a tensor of all parts along a new dimension 0."""
    own = local(part.detach())
    if own.is_complex():
        return torch.view_as_complex(exchange.start_gather(torch.view_as_real(own))())
    return exchange.start_gather(own)()


def placed_like(model: Tensor, values: Tensor) -> Tensor:
    """Return values, as a DTensor if `model` is one, as the inputs of a sharded layer are."""
    if not is_dtensor(model):
        return values
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(values, model.device_mesh, model.placements, run_check=False)


def widened(value: Any) -> Any:
    """Return a tensor of half precision in float32, and other values as they are."""
    halves = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if halves and (type(value) is Tensor or is_dtensor(value)) else value


def probed(length: int) -> int:
    """Return the number of tokens of each chunk that are compared with whole samples, of a part's `length` tokens."""
    return min(_PROBED, length // 2)
