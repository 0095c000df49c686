"""Functions that own weights, and the formulas of their weights' gradients.

The formulas are from PyTorch's own backward (derivatives.yaml and FunctionsManual.cpp: mm, addmm, bmm, _grouped_mm,
convolution, embedding), so the gradients are bit-identical. A weight may be gone when they run, if it is sharded over
replicas: they read its shape only, and what they need of its layout is noted at the use.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.stage.split_backward.intercepted import plain_of
from penstock.stage.split_backward.weight_grad import WeightUse


def _pairs(
    weight: Tensor, bias: Tensor | None, weight_gradient: Tensor, bias_gradient: Tensor | None
) -> list[tuple[Tensor, Tensor]]:
    """Return (parameter, gradient) pairs, with the gradients in the dtype they were computed in."""
    if bias is None or bias_gradient is None:
        return [(weight, weight_gradient)]
    return [(weight, weight_gradient), (bias, bias_gradient)]


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def _folds(input: Tensor) -> bool:
    """Return whether matmul makes one matrix of an input's leading dimensions, whatever the weight requires.

    For an input that is not contiguous, it decides by the weight's requires_grad (should_fold in ATen's LinearAlgebra.cpp),
    which changes the last bits of the result.
    """
    return input.dim() == 2 or (input.dim() > 2 and input.is_contiguous())


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> WeightUse | None:
    """Return the `WeightUse` of y = x Wᵀ + b, with any number of leading dimensions."""
    if not _folds(input) or weight.dim() != 2:
        return None
    return WeightUse(input, weight, bias, F.linear, partial(_linear_weights, weight, bias))


def _linear_weights(
    weight: Tensor, bias: Tensor | None, x: Tensor, grad: Tensor
) -> list[tuple[Tensor, Tensor]]:
    flat = _rows(grad)
    product = flat.t().mm(_rows(x.to(grad.dtype)))
    return _pairs(weight, bias, product, None if bias is None else flat.sum(0))


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, **options: Any) -> WeightUse | None:
    """Return the `WeightUse` of y = x W + b, as in Hugging Face's GPT-2."""
    if options or input.dim() != 1:
        return None
    return WeightUse(mat1, mat2, input, _call_addmm, partial(_addmm_weights, mat2, input, _by_columns(mat2)))


def _call_addmm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    assert bias is not None
    return torch.addmm(bias, x, weight)


def _addmm_weights(
    weight: Tensor, bias: Tensor, by_columns: bool, x: Tensor, grad: Tensor
) -> list[tuple[Tensor, Tensor]]:
    return _pairs(weight, bias, _right_factor(by_columns, x, grad), grad.sum(0))


def _by_columns(weight: Tensor) -> bool:
    """Return whether matrices are stored by columns, as their gradients are then."""
    return weight.stride(-2) == 1 and weight.stride(-1) == weight.shape[-2]


def _right_factor(by_columns: bool, x: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of W in x W, of matrices, in the layout that PyTorch computes it in."""
    x = x.to(grad.dtype)
    return grad.t().mm(x).t() if by_columns else x.t().mm(grad)


def _matmul(input: Tensor, other: Tensor) -> WeightUse | None:
    """Return the `WeightUse` of y = x W, with any number of leading dimensions of x."""
    if not _folds(input) or other.dim() != 2 or _is_sharded(other):
        return None
    formula = partial(_matmul_weights, other, _by_columns(other))
    return WeightUse(input, other, None, _without_bias(torch.matmul), formula)


def _matmul_weights(weight: Tensor, by_columns: bool, x: Tensor, grad: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(weight, _right_factor(by_columns, _rows(x), _rows(grad)))]


def _bmm(input: Tensor, mat2: Tensor, **options: Any) -> WeightUse | None:
    """Return the `WeightUse` of y[e] = x[e] W[e], as of experts that all take as many tokens."""
    if options or _is_sharded(mat2):
        return None
    return WeightUse(input, mat2, None, _without_bias(torch.bmm), partial(_bmm_weights, mat2))


def _bmm_weights(weight: Tensor, x: Tensor, grad: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(weight, x.to(grad.dtype).transpose(1, 2).bmm(grad))]


def _grouped(mat_a: Tensor, mat_b: Tensor, *, offs: Tensor | None = None, **options: Any) -> WeightUse | None:
    """Return the `WeightUse` of rows of x, sorted by expert, each times the matrix of its expert.

    Args:
        offs: int32 tensor [experts]: the row at which each expert's rows end.
    """
    fits = mat_a.dim() == 2 and mat_b.dim() == 3 and not _is_sharded(mat_b)
    if offs is None or not fits or any(v is not None for v in options.values()):
        return None

    def call(x: Tensor, weight: Tensor, _: Tensor | None) -> Tensor:
        return torch._grouped_mm(x, weight, offs=offs)

    return WeightUse(mat_a, mat_b, None, call, partial(_grouped_weights, mat_b, _by_columns(mat_b), offs))


def _grouped_weights(
    weight: Tensor, by_columns: bool, offs: Tensor, x: Tensor, grad: Tensor
) -> list[tuple[Tensor, Tensor]]:
    if by_columns:
        return [(weight, torch._grouped_mm(grad.t(), x, offs=offs).transpose(-2, -1))]
    return [(weight, torch._grouped_mm(x.t(), grad, offs=offs))]


def _is_sharded(weight: Tensor) -> bool:
    """Return whether a weight is a DTensor, whose gradient PyTorch may leave in parts that the formula would have added."""
    return hasattr(weight, "to_local")


def _without_bias(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda x, weight, _: function(x, weight)


def _embedding(  # noqa: PLR0917 - the parameters of torch's function
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> WeightUse | None:
    """Return the `WeightUse` of an embedding table, whose input has no gradient."""
    if max_norm is not None or sparse:
        return None

    def call(x: Tensor, table: Tensor, _: Tensor | None) -> Tensor:
        return F.embedding(x, table, padding_idx, scale_grad_by_freq=scale_grad_by_freq)

    # -1 is ATen's value for no padding.
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    return WeightUse(
        input, weight, None, call, partial(_embedding_weights, weight, padding, scale_grad_by_freq)
    )


def _embedding_weights(
    weight: Tensor, padding: int, scale: bool, x: Tensor, grad: Tensor
) -> list[tuple[Tensor, Tensor]]:
    table = torch.ops.aten.embedding_dense_backward(grad, x, weight.shape[0], padding, scale)
    return _pairs(weight, None, table, None)


def _convolution(dimensions: int, function: Any) -> Callable[..., WeightUse | None]:
    """Return the function that makes the use of a convolution in one, two or three dimensions."""

    def make_use(  # noqa: PLR0917 - the parameters of torch's function
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> WeightUse | None:
        if input.dim() != dimensions + 2 or isinstance(padding, str):
            return None

        def call(x: Tensor, kernel: Tensor, added: Tensor | None) -> Tensor:
            output: Tensor = function(x, kernel, added, stride, padding, dilation, groups)
            return output

        sizes = [[v] * dimensions if isinstance(v, int) else list(v) for v in (stride, padding, dilation)]
        options = (*sizes, False, [0] * dimensions, groups)
        formula = partial(_convolution_weights, weight, weight.stride(), bias, options)
        return WeightUse(input, weight, bias, call, formula)

    return make_use


def _convolution_weights(
    weight: Tensor,
    strides: tuple[int, ...],
    bias: Tensor | None,
    options: tuple[Any, ...],
    x: Tensor,
    grad: Tensor,
) -> list[tuple[Tensor, Tensor]]:
    sizes = None if bias is None else list(bias.shape)
    values = plain_of(weight).detach()
    if not _is_sharded(values) and not (values.stride() == strides and values.untyped_storage().nbytes()):
        # The weight is gone. Its values are not read, but PyTorch chooses a kernel by its layout.
        values = torch.empty_strided(values.shape, strides, dtype=grad.dtype, device=grad.device)
    _, of_weight, of_bias = torch.ops.aten.convolution_backward(
        grad,
        x.to(grad.dtype),
        values.to(grad.dtype),
        sizes,
        *options,
        [False, True, bias is not None],
    )
    return _pairs(weight, bias, of_weight, of_bias)


WEIGHT_USES: dict[Any, Callable[..., WeightUse | None]] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    torch.bmm: _bmm,
    Tensor.bmm: _bmm,
    torch._grouped_mm: _grouped,
    F.embedding: _embedding,
    F.conv1d: _convolution(1, F.conv1d),
    F.conv2d: _convolution(2, F.conv2d),
    F.conv3d: _convolution(3, F.conv3d),
}
"""For each function that owns weights, the function that makes the `WeightUse` of a call; it returns None for a call whose
weights cannot be deferred."""

VALUE_NOT_READ: set[Any] = {
    *(
        getattr(Tensor, name).__get__
        for name in (
            "requires_grad",
            "shape",
            "dtype",
            "device",
            "is_leaf",
            "grad",
            "ndim",
            "layout",
            "is_nested",
        )
    ),
    Tensor.size,
    Tensor.dim,
    Tensor.stride,
    Tensor.detach,
    Tensor.is_floating_point,
    Tensor.numel,
    torch.is_floating_point,
}
"""Functions that read a parameter's properties, but not its value."""
