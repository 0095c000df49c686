"""Classes of tensors whose functions pass through the `defer_weight_grads` of their thread."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class _OfThread(threading.local):
    context: Any = None
    """The `defer_weight_grads` that this thread is in, if parameters have the class `InterceptedParameter` for it."""
    defers = False
    """True within any `defer_weight_grads` of this thread."""


of_thread = _OfThread()
_lock = threading.Lock()
_contexts: Counter[int] = Counter()
"""Contexts that intercept a parameter at present, in all threads, by its id."""


def _pass_to_context(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    # Otherwise every call of torch in here would come back to this function.
    with torch._C.DisableTorchFunctionSubclass():
        if of_thread.context is None:  # another thread's parameter, too, whose context is there
            return func(*args, **(kwargs or {}))
        return of_thread.context.call(func, args, kwargs or {})


class InterceptedParameter(nn.Parameter):
    """Class of a parameter while a context intercepts the functions that take it."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _pass_to_context(func, args, kwargs)


class _Step(NamedTuple):
    """A function that makes a view, and its arguments after the tensor."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class ParameterView(Tensor):
    """A parameter's transpose, or a matrix of a parameter that is a stack of matrices, as the experts of a mixture are.

    It belongs to the graph as any view does, so that a function which is not intercepted gives the parameter its gradient.

    Attributes:
        owner: the parameter.
        plain: the view as a plain tensor.
        steps: functions that made it from the parameter.
    """

    owner: Tensor
    plain: Tensor
    steps: tuple[_Step, ...]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _pass_to_context(func, args, kwargs)

    def to_owner(self, gradient: Tensor, total: Tensor | None) -> Tensor:
        """Return the owner's gradient for a gradient of this view, added in place to a `total` from an earlier call."""
        if total is None and all(step.func in TRANSPOSES or step.func is _own_part for step in self.steps):
            for func, args, kwargs in reversed(self.steps):  # a transpose is its own inverse
                gradient = (
                    _like_owner(gradient, self.owner)
                    if func is _own_part
                    else func(gradient, *args, **kwargs)
                )
            return gradient
        if total is None:
            total = torch.zeros_like(self.owner, dtype=gradient.dtype)
        part = total
        for func, args, kwargs in self.steps:
            part = func(part, *args, **kwargs)
        part += gradient
        return total


TRANSPOSES: set[Any] = {
    torch.t,
    torch.transpose,
    Tensor.t,
    Tensor.transpose,
    Tensor.mT.__get__,  # type: ignore[attr-defined]  # torch does not annotate it
    Tensor.T.__get__,  # type: ignore[attr-defined]  # torch does not annotate it
}
VIEWS: set[Any] = TRANSPOSES | {Tensor.__getitem__, Tensor.select, torch.select}
"""Functions whose result may be a `ParameterView`."""


def view_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ParameterView | None:
    """Return what one of `VIEWS` makes of a parameter or a view, if that is a `ParameterView`; otherwise None."""
    source, *others = args
    if not isinstance(source, ParameterView) and type(source) not in (nn.Parameter, InterceptedParameter):
        return None
    if func in TRANSPOSES:
        if source.dim() == 1:
            return None
    elif source.dim() < 3 or kwargs or not all(map(_is_index, others)):
        return None
    others = [int(x) if isinstance(x, Tensor) else x for x in others]
    base = plain_of(source)
    plain = func(base, *others, **kwargs)
    view: ParameterView = plain.as_subclass(ParameterView)
    view.owner, view.plain = owner_of(source), plain
    view.steps = (*getattr(source, "steps", ()), _Step(func, tuple(others), kwargs))
    return view


def local_weight(parameter: Any) -> Tensor:
    """Return this process's part of a DTensor, in the graph, whose uses the thread's `defer_weight_grads` intercepts."""
    plain: Tensor = parameter.to_local(grad_placements=parameter.placements)
    if not of_thread.defers:
        return plain
    view: ParameterView = plain.as_subclass(ParameterView)
    view.owner, view.plain, view.steps = parameter, plain, (_Step(_own_part, (), {}),)
    return view


def has_local_uses(parameter: Tensor) -> bool:
    """Return whether a parameter is one that layers use by `local_weight` only: a share of the experts of a layer."""
    mesh = getattr(parameter, "device_mesh", None)
    return mesh is not None and mesh.mesh_dim_names == ("ep",)


def _own_part(tensor: Any) -> Tensor:
    with torch.no_grad():
        part: Tensor = tensor.to_local()
    return part


def _like_owner(gradient: Tensor, owner: Any) -> Tensor:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        gradient,
        owner.device_mesh,
        owner.placements,
        run_check=False,
        shape=owner.shape,
        stride=owner.stride(),
    )


def _is_index(value: Any) -> bool:
    """Return whether indexing with a value selects one matrix: whole numbers, but bool and uint8, which are masks."""
    if isinstance(value, Tensor):
        return (
            value.dim() == 0
            and not value.is_floating_point()
            and value.dtype not in (torch.bool, torch.uint8)
        )
    return type(value) is int


def owner_of(weight: Any) -> Any:
    """Return the parameter that a weight is a view of; the argument itself if it is none."""
    return weight.owner if isinstance(weight, ParameterView) else weight


def plain_of(weight: Tensor) -> Tensor:
    """Return a weight as a tensor whose functions are not intercepted because of its being a view."""
    return weight.plain if isinstance(weight, ParameterView) else weight


def intercept(parameters: Iterable[nn.Parameter]) -> None:
    """Give parameters the class whose functions pass through the thread's context."""
    with _lock:
        for parameter in parameters:
            _contexts[id(parameter)] += 1
            parameter.__class__ = InterceptedParameter


def release(parameters: Iterable[nn.Parameter]) -> None:
    """Give parameters their own class again, unless another thread's context needs theirs."""
    with _lock:
        for parameter in parameters:
            _contexts[id(parameter)] -= 1
            if not _contexts[id(parameter)]:
                del _contexts[id(parameter)]
                parameter.__class__ = nn.Parameter
