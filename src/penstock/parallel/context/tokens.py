"""A process's tokens of a batch, where context parallelism divides the samples."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from penstock.base.errors import BatchError
from penstock.parallel.context.attention import SequencePart
from penstock.parallel.participant import Losses
from penstock.stage.microbatches import Microbatches
from penstock.stage.values import leaves_of


def tokens_of(*values: object) -> int:
    """Return the length of the samples, which is dimension 1 of the first tensor that has two.

    Raises:
        BatchError: if there is none.
    """
    tensors = (leaf for value in values for leaf in leaves_of(value) if isinstance(leaf, Tensor))
    length = next((tensor.shape[1] for tensor in tensors if tensor.dim() > 1), None)
    if length is None:
        raise BatchError(
            "the batch has no tensor of shape (batch, tokens, ...), whose tokens context parallelism could divide; leave "
            "cp at 1"
        )
    return int(length)


def cut_tokens(value: object, part: SequencePart, length: int, what: str) -> Any:
    """Return a value with this part of each tensor of shape (batch, length, ...); other leaves stay as they are."""
    if isinstance(value, Microbatches):
        return Microbatches([cut_tokens(each, part, length, what) for each in value.parts])
    return _pytree.tree_map(partial(_cut, part=part, length=length, what=what), value)


def next_targets(value: object, ignore_index: int) -> Any:
    """Return targets with that of the next token at each position, and one that does not count at the last."""
    if isinstance(value, Microbatches):
        return Microbatches([next_targets(each, ignore_index) for each in value.parts])
    return _pytree.tree_map(partial(_next, ignore_index=ignore_index), value)


def _next(leaf: object, ignore_index: int) -> object:
    if not isinstance(leaf, Tensor) or leaf.dim() < 2:
        return leaf
    return torch.cat([leaf[:, 1:], leaf.new_full(leaf[:, :1].shape, ignore_index)], 1)


def _cut(leaf: object, part: SequencePart, length: int, what: str) -> object:
    if not isinstance(leaf, Tensor) or leaf.dim() < 2:
        return leaf
    if leaf.is_nested or leaf.shape[1] not in (1, length):
        raise BatchError(
            f"{what} has a tensor of shape {'nested' if leaf.is_nested else tuple(leaf.shape)}, and the samples have "
            f"{length} tokens; with context parallelism (cp), dimension 1 of each tensor must be the tokens, or 1"
        )
    return part.cut(leaf) if leaf.shape[1] == length else leaf


def join_tokens(losses: Losses, part: SequencePart, microbatches: int, samples: int, sums: bool) -> Losses:
    """Return the losses of whole samples' microbatches from those of their parts; the ids are then theirs.

    Args:
        microbatches: number of a replica's.
        samples: number of replicas that have different samples.
        sums: whether losses are summed rather than weighed.
    """
    joined = Losses()
    for replica in range(samples) if losses.total else ():
        for n in range(microbatches):
            ids = [(replica * part.parts + index) * microbatches + n for index in range(part.parts)]
            number = replica * microbatches + n
            weights = [losses.weights[i] for i in ids]
            joined.weights[number] = 1.0 if sums else sum(weights)
            joined.total[number] = _joined([losses.total[i] for i in ids], weights, part, sums)
            names = sorted({name for i in ids for name in losses.parts.get(i, {})})
            joined.parts[number] = {
                name: _joined([losses.parts[i][name] for i in ids], weights, part, sums) for name in names
            }
    return joined


def _joined(values: list[Tensor], weights: list[float], part: SequencePart, sums: bool) -> Tensor:
    every = torch.stack(values)
    if every.dim() > 1:  # of each token
        return part.join(every, 1)
    if sums:
        return every.sum()
    counting = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
    if not counting:
        return every.mean()
    total: Tensor = sum(value * weight for value, weight in counting) / sum(weights)  # type: ignore[assignment]
    return total
