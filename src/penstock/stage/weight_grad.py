"""The backward in two halves: input gradients now (I), weight gradients later (W).

While a stage runs its forward, `deferring` intercepts the functions that own weights (linear, addmm, convolution,
embedding). Each is called with its weights detached, so that autograd computes the gradient of its input only, and a
hook on its output queues what the weight gradient needs: the input and the output's gradient. So I is one ordinary
backward, without a walk over the graph, and W works off the queue. All other weights (norms, custom ops, weights used
in any other way) get their gradients in I.

The arithmetic of W is that of PyTorch's own backward formulas (derivatives.yaml: mm, addmm, convolution, embedding), so
gradients are bit-identical. W hands them to the autograd engine, which accumulates them and fires the parameters'
hooks, once for each microbatch, after the last contribution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from penstock.errors import PenstockError

Weights = Callable[[Tensor, Tensor], list[tuple[Tensor, Tensor]]]
"""From (input, output gradient) to the (parameter, gradient) pairs of one use of one function."""

_Sums = dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]]
"""By parameter and the dtype it was used in: the parameter, and the sum of its uses' gradients."""


class Queue:
    """What W has to do for one microbatch of one stage.

    Attributes:
        pending: (how, input, the input's version at its use, output gradient) of every use.
        note: told of every input that is kept for W, while the forward runs.
    """

    __slots__ = ("note", "pending")

    def __init__(self) -> None:
        self.pending: list[tuple[Weights, Tensor, int, Tensor]] = []
        self.note: Callable[[Tensor], None] | None = None

    def clear(self) -> None:
        """Drop everything. The hooks that fill the list hold it, and it holds what they hang on: a ring to be cut."""
        self.pending.clear()

    def tensors(self) -> Iterator[Tensor]:
        """What it keeps alive: inputs and output gradients."""
        for _, x, _, grad in self.pending:
            yield x
            yield grad

    def work_off(self, deliveries: dict[tuple[int, ...], Delivery]) -> None:
        """Compute the weight gradients and accumulate them; each parameter's hooks fire once.

        Args:
            deliveries: of the stage; filled with what the next microbatch can use again.

        Raises:
            PenstockError: an input was written to after its use, so its weight's gradient is lost.
        """
        total: _Sums = {}
        with torch.no_grad():
            for weights, x, version, grad in self.pending:
                if x._version != version:
                    raise PenstockError(
                        f"an input of shape {tuple(x.shape)} to a function that owns weights was modified in place after "
                        "its use, so the weights' gradient cannot be computed; plain PyTorch refuses this, too"
                    )
                for parameter, gradient in weights(x, grad):
                    used_in = gradient.dtype
                    if used_in is parameter.dtype:
                        gradient = _as_kept(gradient, parameter)
                    use = (id(parameter), used_in)
                    before = total.get(use)
                    total[use] = (parameter, gradient if before is None else before[1] + gradient)
            self.clear()
            parameters, gradients = _gradients(total)
        key = tuple(map(id, parameters))
        if key:
            if key not in deliveries:
                deliveries[key] = Delivery(parameters)
            deliveries[key].hand_over(gradients)


def _gradients(total: _Sums) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters and their gradients; `total` is emptied, so that ``.grad`` can take them without a copy.

    The sums are those of the autograd engine. Where a function ran in the weight's own dtype it casts each use's gradient
    to the parameter's ``grad_dtype`` before it adds. Where autocast ran it in another, all uses share one cast weight:
    theirs are added in that other dtype, and the sum is cast.
    """
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for (key, used_in), (parameter, gradient) in total.items():
        if used_in is not parameter.dtype:
            gradient = _as_kept(gradient.to(parameter.dtype), parameter)
        found[key] = (parameter, found[key][1] + gradient if key in found else gradient)
    total.clear()
    return [parameter for parameter, _ in found.values()], [gradient for _, gradient in found.values()]


def _as_kept(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient in the dtype its parameter keeps it in; older PyTorch has no ``grad_dtype``, None allows any."""
    wanted = getattr(parameter, "grad_dtype", None)
    return gradient if wanted is None or wanted is gradient.dtype else gradient.to(wanted)


class Delivery:
    """Hands gradients to parameters through the autograd engine, as if a backward had computed them just now."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self._gradients: list[Tensor] = []
        with torch.enable_grad():
            # The node gets the list alone: were it to hold this object there would be a cycle, which would keep the
            # parameters' accumulators, with the dtype and shape of when they were made, until the next garbage collection.
            self._root: Tensor = _Deliver.apply(self._gradients, *parameters)  # type: ignore[no-untyped-call]
        self._one = torch.ones_like(self._root)

    def hand_over(self, gradients: list[Tensor]) -> None:
        """Accumulate one gradient a parameter; the list is emptied, so that `.grad` can take them without a copy."""
        self._gradients[:] = gradients
        gradients.clear()
        torch.autograd.backward(self._root, self._one, retain_graph=True)


class _Deliver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        found = tuple(ctx.gradients)
        ctx.gradients.clear()
        return None, *found


class _Anchor(torch.autograd.Function):
    """Gives an output a place in the graph where its input has none."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, None]:
        return None, None


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

    def takes(self, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether these can be deferred: leaves that want a gradient, and none that is used in other ways."""
        return (
            torch.is_grad_enabled()
            and weight.is_leaf
            and weight.requires_grad
            and id(weight) not in self.shared
            and (bias is None or (bias.is_leaf and bias.requires_grad and id(bias) not in self.shared))
        )

    def watch(self, output: Tensor, x: Tensor, weights: Weights) -> Tensor:
        """When the output's gradient comes, queue the weights' part."""
        if not output.requires_grad:
            anchor = torch.empty(0, requires_grad=True, device=output.device)
            output = _Anchor.apply(output, anchor)  # type: ignore[no-untyped-call]
        if self.queue.note is not None:
            self.queue.note(x)
        pending, version = self.queue.pending, x._version
        output.register_hook(lambda grad: pending.append((weights, x, version, grad)))  # type: ignore[no-untyped-call]
        return output


def _bare(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.detach()


def _pairs(
    weight: Tensor, bias: Tensor | None, weight_gradient: Tensor, bias_gradient: Tensor | None
) -> list[tuple[Tensor, Tensor]]:
    """The gradients beside their parameters, in the dtype they were computed in."""
    if bias is None or bias_gradient is None:
        return [(weight, weight_gradient)]
    return [(weight, weight_gradient), (bias, bias_gradient)]


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def _linear(mode: deferring, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """y = x Wᵀ + b, any number of leading dimensions."""
    # Whether matmul folds an input that is not contiguous into a matrix depends on whether the weight wants a gradient
    # (should_fold in ATen's LinearAlgebra.cpp), and with it the last bits of the result.
    folds = input.dim() == 2 or (input.dim() > 2 and input.is_contiguous())
    if not folds or weight.dim() != 2 or not mode.takes(weight, bias):
        return NotImplemented
    output = F.linear(input, weight.detach(), _bare(bias))
    return mode.watch(output, input, partial(_linear_weights, weight, bias))


def _linear_weights(
    weight: Tensor, bias: Tensor | None, x: Tensor, grad: Tensor
) -> list[tuple[Tensor, Tensor]]:
    flat = _rows(grad)
    product = flat.t().mm(_rows(x.to(grad.dtype)))
    return _pairs(weight, bias, product, None if bias is None else flat.sum(0))


def _addmm(mode: deferring, input: Tensor, mat1: Tensor, mat2: Tensor, **options: Any) -> Any:
    """y = x W + b, as Hugging Face's GPT-2 writes its layers."""
    if options or input.dim() != 1 or not mode.takes(mat2, input):
        return NotImplemented
    output = torch.addmm(input.detach(), mat1, mat2.detach())
    return mode.watch(output, mat1, partial(_addmm_weights, mat2, input))


def _addmm_weights(weight: Tensor, bias: Tensor, x: Tensor, grad: Tensor) -> list[tuple[Tensor, Tensor]]:
    return _pairs(weight, bias, x.to(grad.dtype).t().mm(grad), grad.sum(0))


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
    """Rows of a table; the input has no gradient."""
    if max_norm is not None or sparse or not mode.takes(weight, None):
        return NotImplemented
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    output = F.embedding(input, weight.detach(), padding_idx)
    return mode.watch(output, input, partial(_embedding_weights, weight, padding, scale_grad_by_freq))


def _embedding_weights(
    weight: Tensor, padding: int, scale: bool, x: Tensor, grad: Tensor
) -> list[tuple[Tensor, Tensor]]:
    table = torch.ops.aten.embedding_dense_backward(grad, x, weight.shape[0], padding, scale)
    return _pairs(weight, None, table, None)


def _convolution(dimensions: int, function: Any) -> Callable[..., Any]:
    """A convolution of one, two or three dimensions."""

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
        if input.dim() != dimensions + 2 or isinstance(padding, str) or not mode.takes(weight, bias):
            return NotImplemented
        output = function(input, weight.detach(), _bare(bias), stride, padding, dilation, groups)
        sizes = [[v] * dimensions if isinstance(v, int) else list(v) for v in (stride, padding, dilation)]
        options = (*sizes, False, [0] * dimensions, groups)
        return mode.watch(output, input, partial(_convolution_weights, weight, bias, options))

    return replaced


def _convolution_weights(
    weight: Tensor, bias: Tensor | None, options: tuple[Any, ...], x: Tensor, grad: Tensor
) -> list[tuple[Tensor, Tensor]]:
    sizes = None if bias is None else list(bias.shape)
    _, of_weight, of_bias = torch.ops.aten.convolution_backward(
        grad,
        x.to(grad.dtype),
        weight.detach().to(grad.dtype),
        sizes,
        *options,
        [False, True, bias is not None],
    )
    return _pairs(weight, bias, of_weight, of_bias)


_REPLACED: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    F.embedding: _embedding,
    F.conv1d: _convolution(1, F.conv1d),
    F.conv2d: _convolution(2, F.conv2d),
    F.conv3d: _convolution(3, F.conv3d),
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
