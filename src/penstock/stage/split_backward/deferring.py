"""I, the half of a split backward that computes input gradients and defers the weight gradients to W.

While a stage runs its forward, `defer_weight_grads` intercepts the functions that own weights (linear, addmm, convolution,
embedding). It calls each with its weights detached, so that autograd computes only the gradient of the input, and registers
a hook on the function's node in the graph. The hook queues the operands of the weight gradient: the input and the output's
gradient. I is then an ordinary backward without a walk over the graph, and W works through the queue. Weights used in any
other way (norms, custom functions) get their gradients in I.

Where weights are sharded over replicas, they may be gone when W runs. So what W would read of them gets its gradient in I,
too: a use whose input is a weight or a view of one, and a weight with hooks, which may read it.

W uses the formulas in `weight_uses`. `split_check` verifies them on the first microbatch of every stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.base.errors import PenstockError
from penstock.stage.split_backward.intercepted import (
    VIEWS,
    InterceptedParameter,
    ParameterView,
    has_local_uses,
    intercept,
    of_thread,
    owner_of,
    plain_of,
    release,
    view_of,
)
from penstock.stage.split_backward.weight_grad import WeightFormula, WeightGradQueue, WeightUse
from penstock.stage.split_backward.weight_uses import VALUE_NOT_READ, WEIGHT_USES


class defer_weight_grads:  # noqa: N801 - used as a context manager, like torch's own modes
    """Context in which functions that own weights put their weight gradients into `queue`.

    Uses where a recompute or another derivative would not see the detached weights are not intercepted: under hooks on saved
    tensors that were set within the context (``torch.utils.checkpoint``, ``save_on_cpu``), within ``torch.func`` transforms,
    without gradients, and for complex weights. Those uses get their weight gradients in I.

    Args:
        queue: queue of the microbatch; parameters that are used in any other way are added to its `excluded`.
        parameters: parameters whose uses are intercepted, so that only calls that take one of them pass through Python. All
            functions of torch do if there are none (default), or if one is of another class, as DTensors are; then the
            context costs twice as much. Shares of experts do not count, whose uses are by `local_weight`.
    """

    def __init__(self, queue: WeightGradQueue, parameters: Sequence[nn.Parameter] = ()) -> None:
        self.queue = queue
        parameters = [p for p in parameters if not has_local_uses(p)]
        plain = all(type(p) is nn.Parameter or type(p) is InterceptedParameter for p in parameters)
        self._parameters = parameters if plain else ()
        self._mode = None if self._parameters else _AllFunctions(self)
        self._outer: defer_weight_grads | None = None
        self._outer_defers = False
        self._saved_hooks: object = None

    def __enter__(self) -> defer_weight_grads:
        self._saved_hooks = _saved_tensor_hooks()
        self._outer_defers, of_thread.defers = of_thread.defers, True
        if self._mode is not None:
            self._mode.__enter__()  # type: ignore[no-untyped-call]  # not annotated in torch
        else:
            self._outer = of_thread.context
            of_thread.context = self
            intercept(self._parameters)
        return self

    def __exit__(self, *error: object) -> None:
        of_thread.defers = self._outer_defers
        if self._mode is not None:
            self._mode.__exit__(*error)  # type: ignore[no-untyped-call]  # torch does not annotate it
        else:
            release(self._parameters)
            of_thread.context = self._outer

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of torch, with its weight gradients deferred if it owns weights."""
        make_use = WEIGHT_USES.get(func)
        if make_use is not None:
            use = make_use(*args, **kwargs)
            if use is not None and self._can_defer(use):
                return self._defer(use)
        if func in VIEWS and args and self._can_defer_parameter(owner_of(args[0])):
            view = view_of(func, args, kwargs)
            if view is not None:
                return view
        if func not in VALUE_NOT_READ:
            self._exclude(args)
            self._exclude(kwargs.values())
        return func(*args, **kwargs)

    def _exclude(self, args: Iterable[Any]) -> None:
        """Never defer these parameters again: the last bits of a sum depend on the order of its terms."""
        for arg in args:
            if isinstance(arg, nn.Parameter | ParameterView):
                self.queue.excluded.add(id(owner_of(arg)))
            elif type(arg) is list or type(arg) is tuple:
                self._exclude(arg)

    def _can_defer(self, use: WeightUse) -> bool:
        """Return whether a use can be deferred: trained leaves as weights, in a context that does not run again."""
        return (
            all(map(self._can_defer_parameter, use.parameters()))
            and not use.weight.is_complex()
            and _saved_tensor_hooks() == self._saved_hooks
            and torch._C._functorch.peek_interpreter_stack() is None  # no torch.func transform runs
            and not (self.queue.released and self.queue.released(plain_of(use.x)))
        )

    def _can_defer_parameter(self, parameter: Tensor) -> bool:
        return (
            torch.is_grad_enabled()
            and isinstance(parameter, nn.Parameter)
            and parameter.is_leaf
            and parameter.requires_grad
            and id(parameter) not in self.queue.excluded
            and not (
                self.queue.released and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
            )
        )

    def _defer(self, use: WeightUse) -> Tensor:
        queue = self.queue
        if queue.check is not None:
            output = queue.check.run(use)
        else:
            output = use.run(use.x, attached=False)
            if not output.requires_grad:
                # Without a gradient of the input, as for an embedding, the output has no node, so the hook needs one.
                anchor = torch.empty(0, requires_grad=True, device=output.device)
                output = _Anchor.apply(output, anchor)  # type: ignore[no-untyped-call]  # torch does not annotate it
        if queue.on_input is not None:
            queue.on_input(use.x)
        node = output.grad_fn
        assert node is not None, "the output of a function whose weights or input require a gradient"
        # A hook on the node, not on the tensor, sees the gradient after all hooks on the tensor have changed it.
        node.register_prehook(
            partial(_enqueue, queue, use.formula, use.x, use.x._version, owner_of(use.weight))
        )
        return output


class _AllFunctions(TorchFunctionMode):
    """Mode that intercepts every function of torch in this thread."""

    def __init__(self, context: defer_weight_grads) -> None:
        super().__init__()
        self._context = context

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._context.call(func, args, kwargs or {})


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
    if queue.released and queue.released(grad):  # a function of the user's returned a weight
        grad = grad.clone()
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
