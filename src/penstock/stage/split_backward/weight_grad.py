"""W, the half of a split backward that computes weight gradients from what I left in a queue.

See `defer_weight_grads` for how the queue is filled. W hands the gradients to the autograd engine, which accumulates them
and fires the parameters' hooks, once for each microbatch, after the last contribution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.errors import PenstockError

Weights = Callable[[Tensor, Tensor], list[tuple[Tensor, Tensor]]]
"""From (input, output gradient) to the (parameter, gradient) pairs of one use of one function."""

Sums = tuple[list[Tensor], list[Tensor]]
"""Parameters, and beside each its gradient."""

_ByUse = dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]]
"""By parameter and the dtype it was used in: the parameter, and the sum of its uses' gradients."""


class Use(NamedTuple):
    """One call of a function that owns weights.

    Attributes:
        x: its input.
        weight, bias: its weights; the bias may be None.
        call: the function, as ``call(x, weight, bias)``.
        weights: the formula of the weights' gradients.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    call: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    weights: Weights


class Check(Protocol):
    """Compares the split with the full backward; see `split_check`."""

    def run(self, use: Use) -> Tensor:
        """Call a function as plain PyTorch does, and record the use."""

    def reject(self, weight: Tensor) -> None:
        """Never defer the layers that hold this weight."""


class Queue:
    """The uses of weights in one microbatch of one stage, for W.

    Args:
        excluded: ids of parameters that must not be deferred.
        check: compares the split with the full backward, which then runs; None to split.

    Attributes:
        pending: (formula, input, the input's version at its use, output gradient, its version) of every use.
        note: called with every input that is kept for W, while the forward runs.
        running: whether the forward is running now.
    """

    __slots__ = ("check", "excluded", "note", "pending", "running")

    def __init__(self, excluded: set[int] | None = None, check: Check | None = None) -> None:
        self.excluded = set() if excluded is None else excluded
        self.pending: list[tuple[Weights, Tensor, int, Tensor, int]] = []
        self.note: Callable[[Tensor], None] | None = None
        self.running = False
        self.check = check

    def clear(self) -> None:
        """Drop everything, which also breaks the reference cycle between the queue and the hooks that fill it."""
        self.pending.clear()

    def tensors(self) -> Iterator[Tensor]:
        """The inputs and output gradients that the queue keeps alive."""
        for _, x, _, grad, _ in self.pending:
            yield x
            yield grad

    def sums(self) -> Sums:
        """Compute the weight gradients, summed as the autograd engine sums them, and empty the queue.

        Raises:
            PenstockError: an input or an output gradient was modified in place, so a weight's gradient is lost.
        """
        total: _ByUse = {}
        with torch.no_grad():
            for weights, x, version, grad, grad_version in self.pending:
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
                for parameter, gradient in weights(x, grad):
                    used_in = gradient.dtype
                    if used_in is parameter.dtype:
                        gradient = _as_kept(gradient, parameter)
                    use = (id(parameter), used_in)
                    before = total.get(use)
                    total[use] = (parameter, gradient if before is None else before[1] + gradient)
            self.clear()
            return _gradients(total)

    def work_off(self, deliveries: dict[tuple[int, ...], GradAccumulator]) -> None:
        """Compute the weight gradients and accumulate them; each parameter's hooks fire once.

        Args:
            deliveries: of the stage; filled with what the next microbatch can use again.

        Raises:
            PenstockError: as `sums`.
        """
        parameters, gradients = self.sums()
        key = tuple(map(id, parameters))
        if key:
            if key not in deliveries:
                deliveries[key] = GradAccumulator(parameters)
            deliveries[key].hand_over(gradients)


def _gradients(total: _ByUse) -> Sums:
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


class GradAccumulator:
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
