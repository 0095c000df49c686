"""I, the half of a split backward that computes input gradients and defers the weight gradients to W.

While a stage runs its forward, `defer_weight_grads` intercepts the functions that own weights (linear, addmm, convolution,
embedding). It calls each with its weights detached, so that autograd computes only the gradient of the input, and registers
a hook on the function's node in the graph. The hook queues the operands of the weight gradient: the input and the output's
gradient. I is then an ordinary backward without a walk over the graph, and W works through the queue. Weights used in any
other way (norms, custom functions) get their gradients in I.

W uses the formulas of PyTorch's own backward (derivatives.yaml: mm, addmm, convolution, embedding), so the gradients are
bit-identical. `split_check` verifies that on the first microbatch of every stage.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from penstock.errors import PenstockError
from penstock.stage.split_backward.weight_grad import WeightFormula, WeightGradQueue, WeightUse


class defer_weight_grads(TorchFunctionMode):  # noqa: N801 - used as a context manager, like torch's own modes
    """Context in which functions that own weights put their weight gradients into `queue`.

    The mode does not intercept uses where a recompute or another derivative would not see its detached weights: under hooks
    on saved tensors that were set within it (``torch.utils.checkpoint``, ``save_on_cpu``), within ``torch.func``
    transforms, without gradients, and for complex weights. Those uses get their weight gradients in I.

    Args:
        queue: queue of the microbatch; parameters that are used in any other way are added to its `excluded`.
    """

    def __init__(self, queue: WeightGradQueue) -> None:
        super().__init__()
        self.queue = queue
        self._saved_hooks: object = None

    def __enter__(self) -> defer_weight_grads:
        self._saved_hooks = _saved_tensor_hooks()
        super().__enter__()  # type: ignore[no-untyped-call]  # not annotated in torch
        return self

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        make_use = _WEIGHT_USES.get(func)
        if make_use is not None:
            use = make_use(*args, **(kwargs or {}))
            if use is not None and self._can_defer(use):
                return self._defer(use)
        if func not in _VALUE_NOT_READ:
            self._exclude(args)
            if kwargs:
                self._exclude(kwargs.values())
        return func(*args, **(kwargs or {}))

    def _exclude(self, args: Any) -> None:
        """Never defer these parameters again: the last bits of a sum depend on the order of its terms."""
        for arg in args:
            if isinstance(arg, nn.Parameter):
                self.queue.excluded.add(id(arg))
            elif type(arg) is list or type(arg) is tuple:
                self._exclude(arg)

    def _can_defer(self, use: WeightUse) -> bool:
        """Return whether a use can be deferred: trained leaves as weights, in a context that does not run again."""
        weight, bias, excluded = use.weight, use.bias, self.queue.excluded
        return (
            torch.is_grad_enabled()
            and weight.is_leaf
            and weight.requires_grad
            and id(weight) not in excluded
            and (bias is None or (bias.is_leaf and bias.requires_grad and id(bias) not in excluded))
            and not weight.is_complex()
            and _saved_tensor_hooks() == self._saved_hooks
            and not _in_transform()
        )

    def _defer(self, use: WeightUse) -> Tensor:
        queue = self.queue
        if queue.check is not None:
            output = queue.check.run(use)
        else:
            output = use.call(use.x, use.weight.detach(), None if use.bias is None else use.bias.detach())
            if not output.requires_grad:
                anchor = torch.empty(0, requires_grad=True, device=output.device)
                output = _Anchor.apply(output, anchor)  # type: ignore[no-untyped-call]
        if queue.on_input is not None:
            queue.on_input(use.x)
        node = output.grad_fn
        assert node is not None, "the output of a function whose weights or input require a gradient"
        # A hook on the node, not on the tensor, sees the gradient after all hooks on the tensor have changed it.
        node.register_prehook(partial(_enqueue, queue, use.formula, use.x, use.x._version, use.weight))
        return output


def _enqueue(
    queue: WeightGradQueue,
    formula: WeightFormula,
    x: Tensor,
    version: int,
    weight: Tensor,
    grads: tuple[Tensor | None, ...],
) -> None:
    (grad,) = grads
    if grad is None:
        return
    if not queue.running:
        queue.pending.append((formula, x, version, grad, grad._version))
    elif queue.check is not None:
        queue.check.reject(weight)
    else:
        queue.excluded.add(id(weight))
        raise PenstockError(
            f"a layer computed gradients in its forward (torch.autograd.grad) through a weight of shape "
            f"{tuple(weight.shape)} in this microbatch, but not in the first one, so its backward was split. The weight "
            "is not split from now on: zero the gradients and run the step again, or use a schedule without W ops"
        )


class _Anchor(torch.autograd.Function):
    """Function that gives an output a node in the graph if its input has none."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, None]:
        return None, None


# torch has no public function to read either state; its own Python code calls these C++ functions.


def _saved_tensor_hooks() -> object:
    """Return the innermost hooks on saved tensors of this thread; None if there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def _in_transform() -> bool:
    """Return whether a ``torch.func`` transform is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _pairs(
    weight: Tensor, bias: Tensor | None, weight_gradient: Tensor, bias_gradient: Tensor | None
) -> list[tuple[Tensor, Tensor]]:
    """Return (parameter, gradient) pairs, with the gradients in the dtype they were computed in."""
    if bias is None or bias_gradient is None:
        return [(weight, weight_gradient)]
    return [(weight, weight_gradient), (bias, bias_gradient)]


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> WeightUse | None:
    """Return the `WeightUse` of y = x Wᵀ + b, with any number of leading dimensions."""
    # For an input that is not contiguous, matmul decides by the weight's requires_grad whether to fold it into a matrix
    # (should_fold in ATen's LinearAlgebra.cpp), which changes the last bits of the result.
    folds = input.dim() == 2 or (input.dim() > 2 and input.is_contiguous())
    if not folds or weight.dim() != 2:
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
    return WeightUse(mat1, mat2, input, _call_addmm, partial(_addmm_weights, mat2, input))


def _call_addmm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    assert bias is not None
    return torch.addmm(bias, x, weight)


def _addmm_weights(weight: Tensor, bias: Tensor, x: Tensor, grad: Tensor) -> list[tuple[Tensor, Tensor]]:
    return _pairs(weight, bias, x.to(grad.dtype).t().mm(grad), grad.sum(0))


def _embedding(
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

    def make_use(
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
        return WeightUse(input, weight, bias, call, partial(_convolution_weights, weight, bias, options))

    return make_use


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


_WEIGHT_USES: dict[Any, Callable[..., WeightUse | None]] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    F.embedding: _embedding,
    F.conv1d: _convolution(1, F.conv1d),
    F.conv2d: _convolution(2, F.conv2d),
    F.conv3d: _convolution(3, F.conv3d),
}

_VALUE_NOT_READ: set[Any] = {
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
