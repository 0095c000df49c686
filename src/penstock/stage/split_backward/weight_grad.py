"""W, the half of a split backward that computes the weight gradients which I has queued.

`defer_weight_grads` fills the queue. W passes the gradients to the autograd engine, which accumulates them and fires the
parameters' hooks, once for each microbatch, after the last contribution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.base.errors import PenstockError
from penstock.stage.split_backward.intercepted import ParameterView, owner_of, plain_of

WeightFormula = Callable[[Tensor, Tensor], list[tuple[Tensor, Tensor]]]
"""From (input, output gradient) to the (weight, gradient) pairs of one use of one function; a weight may be a view."""

Sums = tuple[list[Tensor], list[Tensor]]
"""Parameters, and the gradient of each."""

_SumsByDtype = dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]]
"""(Parameter id, dtype of its uses) → the parameter, and the sum of their gradients."""


class WeightUse(NamedTuple):
    """One call of a function that owns weights, as ``call(x, weight, bias)``; the bias may be None."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    call: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    formula: WeightFormula

    def parameters(self) -> list[Tensor]:
        """Return the parameters that the weight and the bias are, or are views of."""
        return [owner_of(x) for x in (self.weight, self.bias) if x is not None]

    def run(self, x: Tensor, *, attached: bool) -> Tensor:
        """Call the function, with the weights in the graph or not."""
        weight, bias = (
            None if w is None else plain_of(w) if attached else plain_of(w).detach()
            for w in (self.weight, self.bias)
        )
        assert weight is not None, "it is not optional"
        return self.call(x, weight, bias)


class Check(Protocol):
    """A comparison of the split backward with the full one; see `split_check`."""

    def run(self, use: WeightUse) -> Tensor:
        """Call a function as plain PyTorch does, and record the use."""

    def reject(self, weight: Tensor) -> None:
        """Reject a weight, so that the layers that hold it are never deferred."""


class WeightGradQueue:
    """Uses of weights in one microbatch of one stage, for W.

    Args:
        excluded: ids of parameters that must not be deferred (default none).
        released: function that tells of a tensor whether it may be gone when W runs (default None, no tensor); see
            `penstock.stage.module.StageModule`.

    Attributes:
        pending: (formula, input, version of the input at its use, output gradient, its version) of every use.
    """

    __slots__ = ("check", "excluded", "on_input", "pending", "released", "running")

    def __init__(
        self,
        excluded: set[int] | None = None,
        check: Check | None = None,
        released: Callable[[Tensor], bool] | None = None,
    ) -> None:
        self.released = released
        self.excluded = set() if excluded is None else excluded
        self.pending: list[tuple[WeightFormula, Tensor, int, Tensor, int]] = []
        self.on_input: Callable[[Tensor], None] | None = None
        self.running = False
        self.check = check

    def clear(self) -> None:
        """Drop all uses, which also breaks the reference cycle between the queue and the hooks that fill it."""
        self.pending.clear()

    def tensors(self) -> Iterator[Tensor]:
        """Yield the inputs and output gradients that the queue keeps alive."""
        for _, x, _, grad, _ in self.pending:
            yield x
            yield grad

    def sums(self) -> Sums:
        """Compute the weight gradients, summed as the autograd engine sums them, and empty the queue."""
        sums: _SumsByDtype = {}
        with torch.no_grad():
            for formula, x, version, grad, grad_version in self.pending:
                if x._version != version:
                    raise PenstockError(
                        f"an input of shape {tuple(x.shape)} to a function that owns weights was modified in place after "
                        "its use, so the weights' gradient cannot be computed; plain PyTorch refuses this, too"
                    )
                if grad._version != grad_version:
                    raise PenstockError(
                        f"the gradient of an output of shape {tuple(grad.shape)} was modified in place by a backward "
                        "function, so the weights' gradient cannot be computed later; clone the gradient there, or use a "
                        "schedule that does not split the backward"
                    )
                for weight, gradient in formula(x, grad):
                    parameter = owner_of(weight)
                    if isinstance(weight, ParameterView):  # Autocast casts each view for itself.
                        gradient = gradient.to(parameter.dtype)
                    dtype = gradient.dtype
                    if dtype is parameter.dtype:
                        gradient = _to_grad_dtype(gradient, parameter)
                    key = (id(parameter), dtype)
                    before = sums[key][1] if key in sums else None
                    if isinstance(weight, ParameterView):
                        gradient = weight.to_owner(gradient, before)
                    elif before is not None:
                        gradient = before + gradient
                    sums[key] = (parameter, gradient)
            self.clear()
            return _sum_dtypes(sums)

    def accumulate(self, accumulators: dict[tuple[int, ...], GradAccumulator]) -> None:
        """Compute the weight gradients and accumulate them; each parameter's hooks fire once.

        Args:
            accumulators: accumulators of the stage by parameter ids; new ones are added, for the next microbatch.
        """
        parameters, gradients = self.sums()
        key = tuple(map(id, parameters))
        if key:
            if key not in accumulators:
                accumulators[key] = GradAccumulator(parameters)
            accumulators[key].accumulate(gradients)


def _sum_dtypes(sums: _SumsByDtype) -> Sums:
    """Return the parameters and their gradients; `sums` is emptied, so that ``.grad`` can take them without a copy.

    Casts and additions are in the autograd engine's order. Where a function ran in the weight's own dtype, each
    use's gradient is cast to the parameter's ``grad_dtype`` before it is added. Where autocast ran it in another dtype, all
    uses share one cast weight: their gradients are added in that dtype, and the sum is cast.
    """
    total: dict[int, tuple[Tensor, Tensor]] = {}
    for (key, dtype), (parameter, gradient) in sums.items():
        if dtype is not parameter.dtype:
            gradient = _to_grad_dtype(gradient.to(parameter.dtype), parameter)
        total[key] = (parameter, total[key][1] + gradient if key in total else gradient)
    sums.clear()
    return [parameter for parameter, _ in total.values()], [gradient for _, gradient in total.values()]


def _to_grad_dtype(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Cast a gradient to the parameter's ``grad_dtype``; None allows any dtype."""
    dtype = parameter.grad_dtype
    return gradient if dtype is None or dtype is gradient.dtype else gradient.to(dtype)


class GradAccumulator:
    """Accumulator of gradients through the autograd engine, as if a backward had just computed them."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self._gradients: list[Tensor] = []
        with torch.enable_grad():
            # The node gets only the list. If it held this object, the reference cycle would keep the parameters' own
            # accumulation nodes, with the dtype and shape from when they were made, until the next garbage collection.
            # Torch does not annotate it.
            self._root: Tensor = _ReturnGrads.apply(self._gradients, *parameters)  # type: ignore[no-untyped-call]
        self._one = torch.ones_like(self._root)

    def accumulate(self, gradients: list[Tensor]) -> None:
        """Accumulate one gradient a parameter; the list is emptied, so that `.grad` can take them without a copy."""
        self._gradients[:] = gradients
        gradients.clear()
        torch.autograd.backward(self._root, self._one, retain_graph=True)


class _ReturnGrads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradients = tuple(ctx.gradients)
        ctx.gradients.clear()
        return None, *gradients
