"""A process's tokens of a batch, where context parallelism divides the samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils import _pytree

from penstock.base.errors import BatchError
from penstock.parallel.context.attention import SequencePart
from penstock.stage.microbatches import Microbatches
from penstock.stage.values import leaves_of


@dataclass(frozen=True)
class TokenDivision:
    """The division of the tokens of each sample among a number of processes."""

    parts: int

    def cut(self, values: Mapping[str, Any], index: int) -> dict[str, Any]:
        """Return a part of each tensor of shape (batch, tokens, ...); other leaves stay as they are."""
        length, part = tokens_of(*values.values()), SequencePart(index, self.parts)
        return {what: cut_tokens(value, part, length, what) for what, value in values.items()}

    def join(self, parts: Tensor) -> Tensor:
        """Return values of shape (batch, tokens, ...) from those of all parts, which lie along dimension 0."""
        return SequencePart(0, self.parts).join(parts, 1)


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


def _cut(leaf: object, part: SequencePart, length: int, what: str) -> object:
    if not isinstance(leaf, Tensor) or leaf.dim() < 2:
        return leaf
    if leaf.is_nested or leaf.shape[1] not in (1, length):
        raise BatchError(
            f"{what} has a tensor of shape {'nested' if leaf.is_nested else tuple(leaf.shape)}, and the samples have "
            f"{length} tokens; with context parallelism (cp), dimension 1 of each tensor must be the tokens, or 1"
        )
    return part.cut(leaf) if leaf.shape[1] == length else leaf
