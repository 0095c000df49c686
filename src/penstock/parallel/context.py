"""Context parallelism: the tokens of each sample are divided over processes.

A sequence is cut into 2 x cp equal chunks, and process r has the chunks r and 2 cp - 1 - r, so that with a causal mask each
process computes as much as the others (2407.21783, section 3.3.2). Layers run on the tokens of their process. Only attention
needs the others': at ``scaled_dot_product_attention`` keys and values are gathered, and their gradients are summed back to
the process whose tokens they are of.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from penstock.base.errors import BatchError, PenstockError


class PartExchange(Protocol):
    """Collectives of the processes that divide a sample; every one of them makes the same calls in the same order."""

    def gather_parts(self, part: Tensor) -> Tensor:
        """Return the tensors of all processes, along a new dimension 0."""

    def sum_parts(self, whole: Tensor) -> Tensor:
        """Return the sum over the processes of this one's row in dimension 0."""


@dataclass(frozen=True)
class SequencePart:
    """One process's tokens of each sample.

    Attributes:
        index: number of the process among those that divide a sample.
        parts: number of these processes.
    """

    index: int
    parts: int

    def cut(self, whole: Tensor, dim: int = 1) -> Tensor:
        """Return this part of a tensor whose dimension `dim` is the sequence, as a new tensor.

        Raises:
            BatchError: if the sequence does not divide into 2 x parts chunks.
        """
        length = whole.shape[dim]
        if length % (2 * self.parts):
            raise BatchError(
                f"a sequence of {length} tokens does not divide into 2 x cp = {2 * self.parts} chunks; pad it to "
                f"{-(-length // (2 * self.parts)) * 2 * self.parts} with targets that the loss ignores, or take another cp"
            )
        chunk = length // (2 * self.parts)
        last = 2 * self.parts - 1 - self.index
        return torch.cat(
            [whole.narrow(dim, self.index * chunk, chunk), whole.narrow(dim, last * chunk, chunk)], dim
        )

    def join(self, parts: Tensor, dim: int) -> Tensor:
        """Return the whole sequence from all parts, which lie along dimension 0; `dim` is the sequence's in the result."""
        halves = parts.unflatten(dim + 1, (2, -1)).movedim(dim + 1, 1)
        chunks = torch.cat([halves[:, 0], halves[:, 1].flip(0)])
        return chunks.movedim(0, dim).flatten(dim, dim + 1)

    def divide(self, whole: Tensor, dim: int) -> Tensor:
        """Return all parts of a whole sequence along a new dimension 0, the inverse of `join`."""
        chunks = whole.unflatten(dim, (2 * self.parts, -1)).movedim(dim, 0)
        halves = torch.stack([chunks[: self.parts], chunks[self.parts :].flip(0)], 1)
        return halves.movedim(1, dim + 1).flatten(dim + 1, dim + 2)

    def positions(self, length: int, device: torch.device | None = None) -> Tensor:
        """Return the positions of this part's `length` tokens in the whole sequence; int64 (length,)."""
        chunk = length // 2
        own = torch.arange(chunk, device=device)
        return torch.cat([self.index * chunk + own, (2 * self.parts - 1 - self.index) * chunk + own])

    def whole_length(self, length: int) -> int:
        """Return the length of a sequence, from the `length` tokens of this part."""
        return length * self.parts


class Division:
    """The division of samples that the layers at work on a thread compute with.

    Attributes:
        part: this process's part of each sample.
        asked: whether a layer has asked for its part or for positions.
    """

    def __init__(self, part: SequencePart, exchange: PartExchange) -> None:
        self.part = part
        self.asked = False
        self._exchange = exchange

    def whole(self, own: Tensor, dim: int = 1) -> Tensor:
        """Return the whole sequence from this part's tokens, along dimension `dim`; gradients are summed to their tokens."""
        # Torch does not annotate `apply`.
        joined: Tensor = _Gathered.apply(own.movedim(dim, -2), self.part, self._exchange)  # type: ignore[no-untyped-call]
        return joined.movedim(-2, dim)

    def keys_and_values(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of the whole sequence, which is dimension -2."""
        if not key.shape[-2] == value.shape[-2]:
            raise PenstockError(f"{key.shape[-2]} keys have {value.shape[-2]} values; leave cp at 1")
        key, value = self.whole(torch.cat([key, value], -1), -2).split([key.shape[-1], value.shape[-1]], -1)
        return key, value


_thread = threading.local()


def current_division() -> Division | None:
    """Return the division of the layer at work on this thread; None if it has whole samples."""
    return getattr(_thread, "division", None)


def current_part() -> SequencePart | None:
    """Return the part of each sample that the layer at work on this thread has; None if it has whole samples."""
    division = current_division()
    if division is None:
        return None
    division.asked = True
    return division.part


def sequence_positions(length: int, device: torch.device | None = None) -> Tensor:
    """Return the positions of a layer's tokens in their sample, which context parallelism (cp) divides over processes.

    Layers that use positions call it in their ``forward`` in place of ``torch.arange(length)``, which it returns without cp.

    Args:
        length: number of tokens that the layer was given.

    Returns:
        int64 tensor of shape (length,).
    """
    part = current_part()
    return torch.arange(length, device=device) if part is None else part.positions(length, device)


@contextmanager
def dividing(part: SequencePart, exchange: PartExchange) -> Iterator[Division]:
    """Return a context in which attention on this thread is over whole samples, and layers have a part of each."""
    before = current_division()
    _thread.division = division = Division(part, exchange)
    try:
        with _DividedAttention(division):
            yield division
    finally:
        _thread.division = before


class _DividedAttention(TorchFunctionMode):
    """Mode of one thread in which ``scaled_dot_product_attention`` takes the other processes' keys and values, too."""

    def __init__(self, division: Division) -> None:
        super().__init__()
        self._division = division

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return _attention(self._division, *args, **(kwargs or {}))
        if func in _OTHER_ATTENTION:
            raise PenstockError(
                f"{func.__name__} is not divided over the tokens of a sample; call scaled_dot_product_attention, or leave "
                "cp at 1"
            )
        return func(*args, **(kwargs or {}))


_OTHER_ATTENTION = {F.multi_head_attention_forward}


def _attention(  # noqa: PLR0917 (after the first one, the arguments of torch's function)
    division: Division,
    /,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Return the attention of this part's queries to all keys; shapes as ``scaled_dot_product_attention`` takes them."""
    part = division.part
    length = part.whole_length(query.shape[-2])
    if attn_mask is not None and attn_mask.shape[-1] != length:
        raise PenstockError(
            f"attention with a mask of shape {tuple(attn_mask.shape)} is not divided over the tokens of a sample; give it "
            f"the {length} keys of the whole sample in its last dimension, use is_causal=True, or leave cp at 1"
        )
    if key.shape[-2] != length or value.shape[-2] != length:  # a caller may have gathered them
        if query.shape[-2] != key.shape[-2]:
            raise PenstockError(
                f"attention of {query.shape[-2]} queries to {key.shape[-2]} keys is not divided over the tokens of a "
                "sample, where each token has one of each; leave cp at 1"
            )
        key, value = division.keys_and_values(key, value)
    options["dropout_p"] = dropout_p
    if attn_mask is not None or not is_causal:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, **options)
    chunk = query.shape[-2] // 2
    out = []
    for queries, number in zip(
        query.chunk(2, -2), (part.index, 2 * part.parts - 1 - part.index), strict=True
    ):
        end = (number + 1) * chunk
        seen = key[..., :end, :], value[..., :end, :]
        out.append(
            F.scaled_dot_product_attention(queries, *seen, attn_mask=_causal(chunk, end, query), **options)
        )
    return torch.cat(out, -2)


def _causal(queries: int, keys: int, like: Tensor) -> Any:
    """Return the mask of queries that are the last of the keys' tokens."""
    if like.is_cuda:
        from torch.nn.attention.bias import causal_lower_right

        return causal_lower_right(queries, keys)  # fused kernels take it without making it whole
    return torch.ones(queries, keys, dtype=torch.bool, device=like.device).tril(keys - queries)


class _Gathered(torch.autograd.Function):
    """The whole sequence, dimension -2, from all parts; its gradients are summed where the tokens are."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, part: SequencePart, exchange: PartExchange) -> Tensor:
        ctx.args = part, exchange
        return part.join(exchange.gather_parts(own), own.dim() - 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        part, exchange = ctx.args
        return exchange.sum_parts(part.divide(grad, grad.dim() - 2)), None, None
