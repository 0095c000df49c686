"""The backward in two halves: input gradients now (I), weight gradients later (W).

While a stage runs its forward, `deferring` intercepts the functions that own weights (linear, addmm, convolution,
embedding). Each is replaced by one whose backward returns the gradient of its input only and queues what the weight
gradient needs: the input and the output's gradient. So I is one ordinary backward, without a walk over the graph, and W
works off the queue. All other weights (norms, biases of custom ops, weights used in any other way) get their gradients in I.

The arithmetic of both halves is that of PyTorch's own backward formulas (derivatives.yaml: mm, addmm, convolution,
embedding), so gradients are bit-identical. W hands them to the autograd engine, which accumulates them and fires the
parameters' hooks, once for each microbatch, after the last contribution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

Contribution = Callable[[], list[tuple[Tensor, Tensor]]]
"""Computes (parameter, gradient) pairs of one use of one function."""


class Queue:
    """What W has to do for one microbatch of one stage."""

    __slots__ = ("pending",)

    def __init__(self) -> None:
        self.pending: list[Contribution] = []

    def work_off(self) -> None:
        """Compute the weight gradients and accumulate them; each parameter's hooks fire once."""
        total: dict[int, tuple[Tensor, Tensor]] = {}
        for contribution in self.pending:
            for parameter, gradient in contribution():
                before = total.get(id(parameter))
                total[id(parameter)] = (parameter, gradient if before is None else before[1] + gradient)
        self.pending = []
        if total:
            torch.autograd.backward([p for p, _ in total.values()], [g for _, g in total.values()])


class deferring(TorchFunctionMode):  # noqa: N801 - used as a context manager, like torch's own modes
    """Within it, functions that own weights put their weight gradients into `queue`.

    Args:
        queue: of the microbatch.
        shared: ids of parameters that are also used in other ways and so must not be deferred; filled in as such uses
            are seen.
    """

    def __init__(self, queue: Queue, shared: set[int]) -> None:
        super().__init__()
        self.queue = queue
        self.shared = shared

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        replace = _REPLACED.get(func)
        if replace is not None:
            result = replace(self, *args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        if func not in _HARMLESS:
            for arg in args:
                if isinstance(arg, nn.Parameter):
                    self.shared.add(id(arg))
        return func(*args, **(kwargs or {}))

    def takes(self, *parameters: Tensor | None) -> bool:
        """Whether these can be deferred: leaves that want a gradient, or None."""
        return torch.is_grad_enabled() and all(
            p is None or (p.is_leaf and p.requires_grad and id(p) not in self.shared) for p in parameters
        )


def _cast(*tensors: Tensor | None) -> list[Tensor | None]:
    """As autocast would cast them for a matrix product."""
    kind = next(t.device.type for t in tensors if t is not None)
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [t if t is None or not t.is_floating_point() else t.to(dtype) for t in tensors]


class _Deferred(torch.autograd.Function):
    """Runs a function without a graph; its backward queues the weights' half and returns the input's.

    `anchor` is a tensor that wants a gradient, so that the backward is reached even where the input wants none.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor | None, rule: _Rule) -> Tensor:
        ctx.rule = rule
        ctx.save_for_backward(x)
        return rule.forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        (grad,) = grads
        rule: _Rule = ctx.rule
        (x,) = ctx.saved_tensors
        rule.queue.pending.append(lambda: rule.weights(x, grad))
        return rule.input(x, grad) if ctx.needs_input_grad[0] else None, None, None


class _Rule:
    """One use of one function: its forward and the two halves of its backward."""

    __slots__ = ("bias", "parameters", "queue", "weight")

    def __init__(
        self, queue: Queue, weight: Tensor, bias: Tensor | None, cast: Iterable[Tensor | None]
    ) -> None:
        self.queue = queue
        self.parameters = (weight, bias)
        self.weight, self.bias = (None if t is None else t.detach() for t in cast)

    def apply(self, x: Tensor) -> Tensor:
        anchor = None if x.requires_grad else torch.empty(0, requires_grad=True, device=x.device)
        return _Deferred.apply(x, anchor, self)  # type: ignore[no-untyped-call, no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError

    def input(self, x: Tensor, grad: Tensor) -> Tensor:
        raise AssertionError

    def weights(self, x: Tensor, grad: Tensor) -> list[tuple[Tensor, Tensor]]:
        raise AssertionError

    def pairs(self, weight: Tensor, bias: Callable[[], Tensor]) -> list[tuple[Tensor, Tensor]]:
        """The gradients beside their parameters, in the parameters' dtype."""
        found = [(self.parameters[0], weight.to(self.parameters[0].dtype))]
        if self.parameters[1] is not None:
            found.append((self.parameters[1], bias().to(self.parameters[1].dtype)))
        return found


class _Linear(_Rule):
    """y = x Wᵀ + b, any number of leading dimensions."""

    __slots__ = ()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)  # type: ignore[arg-type]

    def input(self, x: Tensor, grad: Tensor) -> Tensor:
        assert self.weight is not None
        if grad.dim() == 2:
            return grad.mm(self.weight)
        return grad.reshape(-1, grad.shape[-1]).mm(self.weight).view(x.shape)

    def weights(self, x: Tensor, grad: Tensor) -> list[tuple[Tensor, Tensor]]:
        flat = grad if grad.dim() == 2 else grad.reshape(-1, grad.shape[-1])
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        return self.pairs(flat.t().mm(rows), lambda: flat.sum(0))


class _Addmm(_Rule):
    """y = x W + b, as Hugging Face's GPT-2 writes its layers."""

    __slots__ = ()

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        return torch.addmm(self.bias, x, self.weight)  # type: ignore[arg-type]

    def input(self, x: Tensor, grad: Tensor) -> Tensor:
        assert self.weight is not None
        return grad.mm(self.weight.t())

    def weights(self, x: Tensor, grad: Tensor) -> list[tuple[Tensor, Tensor]]:
        return self.pairs(x.t().mm(grad), lambda: grad.sum(0))


class _Convolution(_Rule):
    """A convolution of one, two or three dimensions."""

    __slots__ = ("options",)

    def __init__(
        self, queue: Queue, weight: Tensor, bias: Tensor | None, cast: Iterable[Tensor | None], options: Any
    ) -> None:
        super().__init__(queue, weight, bias, cast)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        stride, padding, dilation = self.options
        return torch.convolution(
            x, self.weight, self.bias, stride, padding, dilation, False, [0] * (x.dim() - 2), 1
        )

    def _half(self, x: Tensor, grad: Tensor, mask: list[bool]) -> Any:
        assert self.weight is not None
        sizes = None if self.bias is None else list(self.bias.shape)
        return torch.ops.aten.convolution_backward(
            grad, x, self.weight, sizes, *self.options, False, [0] * (x.dim() - 2), 1, mask
        )

    def input(self, x: Tensor, grad: Tensor) -> Tensor:
        half: Tensor = self._half(x, grad, [True, False, False])[0]
        return half

    def weights(self, x: Tensor, grad: Tensor) -> list[tuple[Tensor, Tensor]]:
        _, weight, bias = self._half(x, grad, [False, True, self.bias is not None])
        return self.pairs(weight, lambda: bias)


class _Embedding(_Rule):
    """Rows of a table; the input has no gradient."""

    __slots__ = ("padding", "rows", "scale")

    def __init__(self, queue: Queue, weight: Tensor, padding: int, scale: bool) -> None:
        super().__init__(queue, weight, None, (weight, None))
        self.padding, self.scale = padding, scale
        self.rows = weight.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        return F.embedding(x, self.weight, self.padding if self.padding >= 0 else None)

    def weights(self, x: Tensor, grad: Tensor) -> list[tuple[Tensor, Tensor]]:
        table = torch.ops.aten.embedding_dense_backward(grad, x, self.rows, self.padding, self.scale)
        return self.pairs(table, lambda: table)


def _linear(mode: deferring, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if input.dim() < 2 or weight.dim() != 2 or not mode.takes(weight, bias):
        return NotImplemented
    x, *cast = _cast(input, weight, bias)
    assert x is not None
    return _Linear(mode.queue, weight, bias, cast).apply(x)


def _addmm(mode: deferring, input: Tensor, mat1: Tensor, mat2: Tensor, **options: Any) -> Any:
    if options or input.dim() != 1 or not mode.takes(mat2, input):
        return NotImplemented
    x, weight, bias = _cast(mat1, mat2, input)
    assert x is not None
    return _Addmm(mode.queue, mat2, input, (weight, bias)).apply(x)


def _embedding(
    mode: deferring,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if max_norm is not None or sparse or not mode.takes(weight):
        return NotImplemented
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    return _Embedding(mode.queue, weight, padding, scale_grad_by_freq).apply(input)


def _convolution(dimensions: int) -> Callable[..., Any]:
    def replaced(
        mode: deferring,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        batched = input.dim() == dimensions + 2
        if not batched or groups != 1 or isinstance(padding, str) or not mode.takes(weight, bias):
            return NotImplemented
        options = [[v] * dimensions if isinstance(v, int) else list(v) for v in (stride, padding, dilation)]
        x, *cast = _cast(input, weight, bias)
        assert x is not None
        return _Convolution(mode.queue, weight, bias, cast, options).apply(x)

    return replaced


_REPLACED: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    F.embedding: _embedding,
    F.conv1d: _convolution(1),
    F.conv2d: _convolution(2),
    F.conv3d: _convolution(3),
}

_HARMLESS: set[Any] = {
    # What reads a parameter's properties is no use of its value.
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
