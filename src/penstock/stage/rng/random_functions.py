"""Functions of torch that draw but take no generator, computed with the draws of a given generator.

These are all kinds of dropout, attention with dropout, recurrent layers with dropout between them, and fractional pooling.
On a CPU the formulas and the order of the draws are torch's own, so the results are bit-identical to torch's with a default
generator in the same state. On other devices the draws differ from the ones of torch's fused kernels, but have the same
distribution. Attention with dropout keeps the full matrix of attention weights for the backward, as torch's own "math" path
does: several times batch × heads × queries × keys elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


class Source(Protocol):
    """A source of draws."""

    def generator(self, device: torch.device, shape: Sequence[int]) -> torch.Generator:
        """Return the generator to draw a tensor of a shape from, on a device."""


Replacement = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]
"""Called with the source (an `isolated_rng`), the function it replaces, and that function's arguments."""


class _Masked(torch.autograd.Function):
    """x · mask · scale, which keeps only the mask for the backward, one byte an element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        masked: Tensor = torch.ops.aten.native_dropout_backward(x, mask, scale)
        return masked

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Torch does not annotate it.
        return _Masked.apply(grads[0], ctx.saved_tensors[0], ctx.scale), None, None  # type: ignore[no-untyped-call]


def _dropped(source: Source, x: Tensor, p: float, inplace: bool = False) -> Tensor:
    """Compute dropout in training with 0 < p < 1."""
    if x.device.type == "cpu" or inplace:
        noise = (
            torch.empty_like(x).bernoulli_(1 - p, generator=source.generator(x.device, x.shape)).div_(1 - p)
        )
        return x.mul_(noise) if inplace else x * noise
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(
        1 - p, generator=source.generator(x.device, x.shape)
    )
    masked: Tensor = _Masked.apply(x, mask, 1 / (1 - p))  # type: ignore[no-untyped-call]  # torch does not annotate it
    return masked


def _draws_none(x: Tensor, p: float, train: bool) -> bool:
    """Return whether dropout needs no draw, or torch itself raises for the arguments."""
    return not train or not 0 < p < 1 or x.numel() == 0 or x.is_meta or x.is_nested


def _f_dropout(source: Source, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if _draws_none(input, p, training):
            return func(input, p, training, inplace)
        return _dropped(source, input, p, inplace)

    return dropout(*args, **kwargs)


def _dropout(alpha: bool = False, features: bool = False, inplace: bool = False) -> Replacement:
    """Return torch.dropout or a variant: for self-normalising networks, of whole channels, or in place."""

    def replaced(source: Source, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def dropout(input: Tensor, p: float, train: bool) -> Tensor:
            if _draws_none(input, p, train):
                result: Tensor = func(input, p, train)
                return result
            if not alpha and not features:
                return _dropped(source, input, p, inplace)
            noise = torch.empty_like(input)
            if features:
                noise = input.new_empty((*input.shape[:2], *(1 for _ in input.shape[2:])))
            noise.bernoulli_(1 - p, generator=source.generator(input.device, noise.shape))
            if not alpha:
                noise.div_(1 - p)
                return input.mul_(noise) if inplace else input * noise
            a = 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p))
            shift = (noise - 1).mul_(_ALPHA * a).add_(_ALPHA * a * p)
            noise.mul_(a)
            return (input.mul_(noise) if inplace else input * noise).add_(shift)

        return dropout(*args, **kwargs)

    return replaced


# scale · alpha of SELU, in alpha dropout: Klambauer et al. 2017, arXiv 1706.02515
_ALPHA = 1.7580993408473766


def _native_dropout(source: Source, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def dropout(input: Tensor, p: float, train: bool | None) -> Any:
        if _draws_none(input, p, train is not False):
            return func(input, p, train)
        mask = torch.empty_like(input, dtype=torch.bool)
        mask.bernoulli_(1 - p, generator=source.generator(input.device, mask.shape))
        return input * mask * (1 / (1 - p)), mask

    return dropout(*args, **kwargs)


def _attention(source: Source, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute attention with dropout on its weights; without dropout, call torch's own kernels."""

    def attention(  # noqa: PLR0917 - the parameters of torch's function
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        # With p = 1 torch draws nothing; for a mask together with is_causal torch raises an error itself.
        both = attn_mask is not None and is_causal
        if not 0 < dropout_p < 1 or both or query.is_meta or query.is_nested:
            return func(*args, **kwargs)
        kind = query.device.type
        casts = torch.is_autocast_enabled(kind)
        if casts:  # autocast treats attention as one function: it casts its inputs, and nothing inside
            dtype = torch.get_autocast_dtype(kind)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
            if attn_mask is not None and attn_mask.is_floating_point():
                attn_mask = attn_mask.to(dtype)
        with torch.autocast(kind, enabled=False) if casts else nullcontext():
            return _attend(
                source,
                query,
                key,
                value,
                attn_mask=attn_mask,
                p=dropout_p,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )

    return attention(*args, **kwargs)


def _attend(
    source: Source,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None,
    p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Compute dropout(softmax(q kᵀ · scale + mask)) v as torch's "math" path does, half precision in float32.

    Each side of q kᵀ is multiplied by the square root of the scale, which keeps its entries small. Rows without any allowed
    key give zeros.
    """
    dtype = query.dtype
    keeps_half = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    if dtype in (torch.float16, torch.bfloat16) and not keeps_half:
        query, key, value = query.float(), key.float(), value.float()
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    root = math.sqrt(abs(scale))
    query = query * math.copysign(root, scale)
    if is_causal:
        attn_mask = query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = query.new_zeros(attn_mask.shape).masked_fill_(~attn_mask, -math.inf)
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    weights = query @ (key.transpose(-2, -1) * root)
    if attn_mask is not None:
        weights = weights + attn_mask
    # A softmax that gives zeros for rows of only -inf; it has no public name.
    weights = torch._safe_softmax(weights, -1)
    return (_dropped(source, weights, p) @ value).to(dtype)


def _recurrent(source: Source, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call stacked recurrent layers one by one, with dropout between them; for the calls of nn.RNN, nn.LSTM and nn.GRU."""
    # Arguments of a packed sequence: (data, batch sizes, states, weights, ...); of others: (input, states, weights, ...).
    packed = isinstance(args[3], list | tuple)
    weights, biases, layers, p, train, bidirectional, *batch_first = args[2 + packed :]
    if not train or p == 0 or layers == 1:
        return func(*args, **kwargs)
    x, *batch_sizes, states = args[: 2 + packed]
    transposed = any(batch_first)
    x = x.transpose(0, 1) if transposed else x
    directions, each = 1 + bidirectional, len(weights) // layers
    options = (biases, 1, 0.0, train, bidirectional, *(False for _ in batch_first))
    final_states = []
    for n in range(layers):
        if n:
            x = torch.zeros_like(x) if p == 1 else _dropped(source, x, p)
        rows = slice(n * directions, (n + 1) * directions)
        initial = states[rows] if isinstance(states, Tensor) else tuple(state[rows] for state in states)
        x, *final = func(x, *batch_sizes, initial, weights[n * each : (n + 1) * each], *options)
        final_states.append(final)
    x = x.transpose(0, 1) if transposed else x
    return (x, *(torch.cat(final) for final in zip(*final_states, strict=True)))


def _pool(dimensions: int) -> Replacement:
    """Return fractional max pooling with the random samples as an argument: one a dimension for each channel."""

    def replaced(source: Source, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) > 5 or kwargs.get("_random_samples") is not None or args[0].is_meta:
            return func(*args, **kwargs)
        x: Tensor = args[0]
        rows = 1 if x.dim() == dimensions + 1 else x.shape[0]
        shape = (rows, x.shape[-dimensions - 1], dimensions)
        samples = torch.rand(
            shape, dtype=x.dtype, device=x.device, generator=source.generator(x.device, shape)
        )
        return func(*args, **{**kwargs, "_random_samples": samples})

    return replaced


COMPUTED: dict[Any, Replacement] = {
    F.dropout: _f_dropout,
    torch.dropout: _dropout(),
    torch.dropout_: _dropout(inplace=True),
    torch.feature_dropout: _dropout(features=True),
    torch.feature_dropout_: _dropout(features=True, inplace=True),
    torch.alpha_dropout: _dropout(alpha=True),
    torch.alpha_dropout_: _dropout(alpha=True, inplace=True),
    torch.feature_alpha_dropout: _dropout(alpha=True, features=True),
    torch.feature_alpha_dropout_: _dropout(alpha=True, features=True, inplace=True),
    torch.native_dropout: _native_dropout,
    F.scaled_dot_product_attention: _attention,
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _recurrent),
    **dict.fromkeys((F.fractional_max_pool2d, F.fractional_max_pool2d_with_indices), _pool(2)),
    **dict.fromkeys((F.fractional_max_pool3d, F.fractional_max_pool3d_with_indices), _pool(3)),
}
