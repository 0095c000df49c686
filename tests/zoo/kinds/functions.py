"""A custom torch.autograd.Function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.kind import WIDTH, Inner, Layer, kind
from tests.zoo.kinds.values import handed


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grad


@kind()
def own_function():
    """a custom torch.autograd.Function without weights"""
    return Layer(lambda m, x: torch.tanh(Square.apply(m.inner(x))), inner=nn.Linear(WIDTH, WIDTH))


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        out = x @ weight.t()
        return out if bias is None else out + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x, grad.sum(0)


@kind(autocast=False)
def own_function_with_weights():
    """a custom torch.autograd.Function that saves weights"""
    return Layer(
        lambda m, x: Multiply.apply(x, m.weight, m.bias),
        weight=nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3),
        bias=nn.Parameter(torch.zeros(WIDTH)),
    )


@kind(autocast=False)
class OwnFunctionAndLinear(Inner):
    """a weight in a custom torch.autograd.Function and in F.linear"""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(x))
        return Multiply.apply(h, self.inner.weight, self.inner.bias)


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 0.5


class SameView(Same):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)


@kind()
def function_that_returns_its_input():
    """one that returns its input, at the end of a layer and at the begin of the next"""
    return handed(Same.apply, Same.apply)


@kind()
def function_that_returns_a_view():
    """one that returns a view of its input, at both places"""
    return handed(SameView.apply, SameView.apply)


class Several(torch.autograd.Function):
    """A product, its input's square and its sign; gradients of outputs that nobody uses are None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sign = x.sign()
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(sign)
        ctx.save_for_backward(x, weight)
        return x @ weight, x * x, sign

    @staticmethod
    def backward(
        ctx: Any, product: Tensor | None, square: Tensor | None, sign: None
    ) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x = of_weight = None
        if product is not None:
            of_x, of_weight = product @ weight.t(), x.t() @ product
        if square is not None:
            slope = 2 * x * square
            of_x = slope if of_x is None else of_x + slope
        return of_x, of_weight


@kind(autocast=False)
def function_with_several_outputs():
    """one with several outputs that are handed over, one of them not differentiable"""
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)
    return [
        Layer(lambda m, x: Several.apply(x, m.weight), weight=weight),
        Layer(lambda m, v: m.inner(v[0]) + v[1] * v[2], inner=nn.Linear(WIDTH, WIDTH)),
    ]


@kind(autocast=False)
def function_whose_weight_gets_no_gradient():
    """one with several outputs, of which none with its weight is used"""
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)
    return [
        Layer(lambda m, x: Several.apply(x, m.weight), weight=weight),
        Layer(lambda m, v: m.inner(v[1]), inner=nn.Linear(WIDTH, WIDTH)),
    ]


class AddTo(torch.autograd.Function):
    """Adds a weight times a number to its input, in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, factor: float, note: str) -> Tensor:
        ctx.mark_dirty(x)
        ctx.factor = factor
        return x.add_(weight, alpha=factor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, grad.sum(0) * ctx.factor, None, None


@kind(autocast=False)
def function_in_place():
    """one that writes into its input, and takes a number and text"""
    return Layer(
        lambda m, x: AddTo.apply(m.inner(x) * 1.5, m.bias, 0.5, "text").sigmoid(),
        inner=nn.Linear(WIDTH, WIDTH),
        bias=nn.Parameter(torch.randn(WIDTH)),
    )
