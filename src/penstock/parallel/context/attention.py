"""Context parallelism: the tokens of each sample are divided over processes.

A sequence is cut into 2 x cp equal chunks, and process r has the chunks r and 2 cp - 1 - r, so that with a causal mask each
process computes as much as the others (2407.21783, section 3.3.2). Layers run on the tokens of their process. Only attention
needs the others': at ``scaled_dot_product_attention`` keys and values are gathered, and their gradients are summed back to
the process whose tokens they are of.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor
from torch.overrides import TorchFunctionMode

from penstock.base.errors import BatchError, PenstockError

Finish = Callable[[], Tensor]
"""Waits for a collective, and returns its result."""


Masks = dict[tuple[int, int, torch.dtype], Tensor]


class PartExchange(Protocol):
    """Collectives of the processes that divide a sample; every one of them makes the same calls in the same order.

    Attributes:
        masks: those that layers of a step share, by queries, keys and dtype.
    """

    masks: Masks

    @property
    def microbatches(self) -> int:
        """Number of a replica's microbatches in the step."""

    def start_gather(self, part: Tensor) -> Finish:
        """Gather the tensors of all processes, along a new dimension 0."""

    def start_sum(self, whole: Tensor) -> tuple[Tensor, Finish]:
        """Sum this process's row in dimension 0 over the processes; return the tensor that will have it, too."""


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


Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


class Division:
    """The division of samples that the layers at work on a thread compute with.

    Args:
        part: this process's part of each sample.
        exchange: collectives of the processes that divide a sample.
        layer: name of the layer at work.
        rows, tokens: of a microbatch in this part; 0 if they are not known.

    Attributes:
        asked: whether a layer has asked for its part or for positions.
        met: number of exchanges that have begun.
        attends: whether attention is being computed.
    """

    def __init__(
        self, part: SequencePart, exchange: PartExchange, layer: str = "", rows: int = 0, tokens: int = 0
    ) -> None:
        self.part = part
        self.exchange = exchange
        self.layer = layer
        self.asked, self.met, self.attends = False, 0, False
        self._rows, self._tokens = rows, tokens

    def meet(self, what: str) -> None:
        """Require that the processes which divide these samples are at the same place, before they exchange tensors.

        Of two processes at different ones, each would take the other's tensors for those that it waits for, or gloo would
        end both, since their sizes differ.
        """
        self.met += 1
        own = f"layer {self.layer}, {what}".encode()[:_PLACE].ljust(_PLACE)
        every = self.exchange.start_gather(torch.frombuffer(bytearray(own), dtype=torch.uint8))()
        if bool((every != every[0]).any()):
            places = [bytes(row.tolist()).decode(errors="replace").strip() for row in every]
            raise PenstockError(
                f"the processes that divide the tokens of samples (cp) are at different places: {'; '.join(places)}. A "
                "layer decides by its own tokens, or by numbers that each process draws for itself, what it runs; draw "
                "such numbers by torch's functions in a shape without tokens, or leave cp at 1"
            )

    def draws_alike(self, shape: Sequence[int]) -> bool:
        """Return whether random numbers of a shape are of samples and not of tokens, so that all parts draw the same."""
        rows, tokens = self._rows, self._tokens
        if self.attends or not tokens or {tokens, self.part.whole_length(tokens)} & {*shape[1:]}:
            return False
        return not shape or not (shape[0] % (rows * tokens) == 0 or shape[0] == tokens != rows)

    def random_key(self, key: tuple[Any, ...], shape: Sequence[int]) -> tuple[Any, ...]:
        """Return the key of random numbers of a shape, from (seed, step, microbatch, layer) of this part.

        What is drawn for a sample is the same in all parts, as in one process, and what is drawn for tokens is not.
        """
        if not self.draws_alike(shape):
            return *key, "tokens"
        seed, step, microbatch, layer = key
        replica, number = divmod(microbatch, self.exchange.microbatches)
        return seed, step, replica // self.part.parts * self.exchange.microbatches + number, layer

    def whole(self, own: Tensor, dim: int = 1) -> Tensor:
        """Return the whole sequence from this part's tokens, along dimension `dim`; gradients are summed to their tokens."""
        _require_no_checkpoint()
        self.meet(f"values {tuple(own.shape)}")
        (part,), sums = _cut(own.movedim(dim, -2), 1)
        return self._joined(part, self.exchange.start_gather(part.detach())(), sums).movedim(-2, dim)

    def _joined(self, part: Tensor, gathered: Tensor, sums: list[Finish]) -> Tensor:
        # Torch does not annotate `apply`.
        joined: Tensor = _Gathered.apply(part, gathered, sums, self.part, self.exchange)  # type: ignore[no-untyped-call]
        return joined

    def keys_and_values(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of the whole sequence, which is dimension -2."""
        if not key.shape[-2] == value.shape[-2]:
            raise PenstockError(f"{key.shape[-2]} keys have {value.shape[-2]} values; leave cp at 1")
        key, value = self.whole(torch.cat([key, value], -1), -2).split([key.shape[-1], value.shape[-1]], -1)
        return key, value

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, attention: Attention, dim: int
    ) -> Tensor:
        """Return attention to the whole sequence, by groups of heads: while one is computed, the next one's keys come.

        In the backward, likewise, the gradients of one group's keys are summed while the next group's are computed.

        Args:
            query: shape (..., heads, tokens, width).
            key, value: of this part's tokens; their heads divide the query's.
            mask: what `attention` gets; a dimension of heads is cut.
            attention: function of query, key, value and mask, with the keys of the whole sequence.
            dim: dimension of the heads in what it returns.
        """
        if key.shape[-2] != value.shape[-2]:
            raise PenstockError(f"{key.shape[-2]} keys have {value.shape[-2]} values; leave cp at 1")
        _require_no_checkpoint()
        both = torch.cat([key, value], -1)
        self.meet(f"keys and values {tuple(both.shape)}")
        groups = _groups(both, query, self.part.parts)
        parts, sums = _cut(both, groups)
        masks = [mask] * groups
        if mask is not None and mask.dim() > 2 and mask.shape[-3] == query.shape[-3]:
            masks = list(mask.chunk(groups, -3))
        queries = query.chunk(groups, -3) if groups > 1 else [query]
        out: list[Tensor] = []
        coming = self.exchange.start_gather(parts[0].detach())
        for n, part in enumerate(parts):
            gathered = coming()  # before the next one starts, which would take half of the link from it
            if n + 1 < groups:
                coming = self.exchange.start_gather(parts[n + 1].detach())
            keys, values = self._joined(part, gathered, sums).split([key.shape[-1], value.shape[-1]], -1)
            out.append(attention(queries[n], keys, values, masks[n]))
        return torch.cat(out, dim) if groups > 1 else out[0]


_PLACE = 160
"""Bytes of the name of a place in a layer."""
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
def dividing(division: Division) -> Iterator[Division]:
    """Return a context in which attention on this thread is over whole samples, and layers have a part of each."""
    before = current_division()
    _thread.division = division
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
            # Numbers that it draws are of tokens, whatever their shape: it takes some queries at a time.
            self._division.attends = True
            try:
                return _attention(self._division, *args, **(kwargs or {}))
            finally:
                self._division.attends = False
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
    queries = query.shape[-2]
    if attn_mask is not None and (
        attn_mask.shape[-1] != length or not {*attn_mask.shape[-2:-1]} <= {1, queries}
    ):
        raise PenstockError(
            f"attention with a mask of shape {tuple(attn_mask.shape)} is not divided over the tokens of a sample; give it "
            f"the {queries} queries of this process and the {length} keys of the whole sample in its last dimensions, use "
            "is_causal=True, or leave cp at 1"
        )
    options["dropout_p"] = dropout_p
    masked = attn_mask is not None or not is_causal
    attention: Attention = (
        partial(_masked, options) if masked else partial(_causal_attention, division, options)
    )
    if key.shape[-2] != length or value.shape[-2] != length:  # a caller may have gathered them
        if query.shape[-2] != key.shape[-2]:
            raise PenstockError(
                f"attention of {query.shape[-2]} queries to {key.shape[-2]} keys is not divided over the tokens of a "
                "sample, where each token has one of each; leave cp at 1"
            )
        return division.attend(query, key, value, attn_mask, attention, -3)
    return attention(query, key, value, attn_mask)


def _masked(
    options: dict[str, Any], query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)


def _causal_attention(
    division: Division, options: dict[str, Any], query: Tensor, key: Tensor, value: Tensor, _: Tensor | None
) -> Tensor:
    part, masks = division.part, division.exchange.masks
    chunk = query.shape[-2] // 2
    out = []
    for queries, number in zip(
        query.chunk(2, -2), (part.index, 2 * part.parts - 1 - part.index), strict=True
    ):
        end = (number + 1) * chunk
        seen = key[..., :end, :], value[..., :end, :]
        out.append(
            F.scaled_dot_product_attention(
                queries, *seen, attn_mask=_causal(chunk, end, query, masks), **options
            )
        )
    return torch.cat(out, -2)


def _causal(queries: int, keys: int, like: Tensor, masks: Masks) -> Any:
    """Return the mask of queries that are the last of the keys' tokens."""
    if like.is_cuda:
        from torch.nn.attention.bias import causal_lower_right

        return causal_lower_right(queries, keys)  # fused kernels take it without making it whole
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else like.dtype
    mask = masks.get((queries, keys, dtype))
    if mask is None:
        # In the dtype of the product: of bools, each layer would make such numbers of its own and keep them.
        mask = torch.full((queries, keys), -torch.inf, dtype=dtype).triu_(keys - queries + 1)
        masks[queries, keys, dtype] = mask
    return mask


def _require_no_checkpoint() -> None:
    """Require that torch.utils.checkpoint does not run the caller: it would run it again where samples are not divided."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            raise PenstockError(
                "attention runs within torch.utils.checkpoint, which would run it again without the keys of the other "
                "processes that divide a sample (cp); turn the model's own checkpointing off, as by "
                "gradient_checkpointing_disable(), and take recompute='full' of the pipeline"
            )
        frame = frame.f_back


def _groups(both: Tensor, query: Tensor, parts: int) -> int:
    """Return the number of groups of heads whose keys and values are gathered one after another."""
    if both.dim() < 4 or query.shape[-3] % both.shape[-3]:
        return 1
    size = both.numel() * both.element_size() * parts
    return next(n for n in _GROUPS if n == 1 or (both.shape[-3] % n == 0 and size >= n * _LEAST))


_GROUPS = (4, 2, 1)
"""With 4 groups a quarter of the bytes comes before the first product; more leave each product little work."""
_LEAST = 1 << 20
"""Bytes of a group from which on it gains: fewer take about as long as a message without any."""


def _cut(both: Tensor, groups: int) -> tuple[list[Tensor], list[Finish]]:
    """Cut the heads into groups; return these, and the list of sums that are under way in their backward."""
    sums: list[Finish] = []
    # Torch does not annotate `apply`.
    parts: tuple[Tensor, ...] = _Groups.apply(both, groups, sums)  # type: ignore[no-untyped-call]
    return list(parts), sums


class _Groups(torch.autograd.Function):
    """Groups of heads, dimension -3; its backward waits for the sums of their gradients."""

    @staticmethod
    def forward(ctx: Any, both: Tensor, groups: int, sums: list[Finish]) -> tuple[Tensor, ...]:
        ctx.sums, ctx.groups = sums, groups
        return both.chunk(groups, -3) if groups > 1 else (both.view_as(both),)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        for finish in ctx.sums:
            finish()
        ctx.sums.clear()
        return torch.cat(grads, -3) if ctx.groups > 1 else grads[0], None, None


class _Gathered(torch.autograd.Function):
    """The whole sequence, dimension -2, from all parts; its gradients are summed where the tokens are.

    The gradient that the backward returns is there only when `_Groups`, which alone takes it, has waited for it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        own: Tensor,
        gathered: Tensor,
        sums: list[Finish],
        part: SequencePart,
        exchange: PartExchange,
    ) -> Tensor:
        ctx.args = sums, part, exchange
        return part.join(gathered, own.dim() - 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sums, part, exchange = ctx.args
        total, finish = exchange.start_sum(part.divide(grad, grad.dim() - 2))
        sums.append(finish)
        return total, None, None, None, None
