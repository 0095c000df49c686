"""Logits that the head of the last stage does not compute.

While the last stage computes `LinearCrossEntropy` or `log_probs`, its head, the last `nn.Linear` of the last layer, returns
a `PostponedLogits` instead of logits. Scales, `tanh` and casts that the model applies to it (a soft cap, say) are kept for
later. For any other function of torch it becomes the logits, and the loss is computed from them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

from penstock.base.errors import ConfigError, PenstockError

_SCALES = frozenset({"mul", "__mul__", "__rmul__", "multiply", "div", "__truediv__", "true_divide"})
_MAPS = frozenset({"tanh", "float", "to"}) | _SCALES
"""Functions of torch, by name, that change each logit by itself, with numbers or a dtype besides the logits."""

_FACTS = frozenset({"size", "dim", "numel", "is_floating_point", "shape", "dtype", "device", "ndim"})
"""Functions and attributes that do not need the logits."""

Map = Callable[[Tensor], Tensor]


class PostponedLogits(Tensor):
    """Logits that are not computed: the head's input and weights, and the functions that were applied since.

    Attributes:
        maps: functions of the logits that change every logit by itself.
        computed: the logits, once a function has needed them.
        autocast: function that returns a context with the autocast under which the head was called.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    maps: tuple[Map, ...]
    computed: Tensor | None
    autocast: Callable[[], AbstractContextManager[Any]]
    _version_of_hidden: int
    _trains: bool

    @staticmethod
    def __new__(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> PostponedLogits:
        kind = hidden.device.type
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        trains = torch.is_grad_enabled() and any(
            x.requires_grad for x in (hidden, weight, bias) if x is not None
        )
        made = cls._make(
            (*hidden.shape[:-1], weight.shape[0]), dtype if enabled else hidden.dtype, hidden.device, trains
        )
        made.hidden, made.weight, made.bias, made.maps = hidden, weight, bias, ()
        made.autocast = partial(torch.autocast, kind, dtype=dtype, enabled=enabled)
        made._version_of_hidden = _memory(hidden)._version
        return made

    @classmethod
    def _make(
        cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, trains: bool
    ) -> PostponedLogits:
        made: Any = Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device, requires_grad=trains
        )
        made.computed, made._trains = None, trains
        if trains:
            with torch._C.DisableTorchFunctionSubclass():
                made.register_hook(_refuse_gradient)
        postponed: PostponedLogits = made
        return postponed

    def logits(self) -> Tensor:
        """Compute the logits, once; from then on they are what functions get."""
        if self.computed is None:
            self.require_unwritten()
            # Also where a metric asks for them without gradients: the loss comes later.
            with torch.set_grad_enabled(self._trains), self.autocast():
                value: Any = F.linear(self.hidden, self.weight, self.bias)
                if Shard.of(self.weight) is not None:
                    value = value.full_tensor()
                for function in self.maps:
                    value = function(value)
            self.computed = value
        return self.computed

    def of_rows(self, rows: slice) -> Tensor:
        """Compute the logits of some tokens; with a shard of the vocabulary, of its classes."""
        bias = None if self.bias is None else local(self.bias)
        with self.autocast():
            value = F.linear(local(self.hidden).flatten(0, -2)[rows], local(self.weight), bias)
            for function in self.maps:
                value = function(value)
        return value

    def require_unwritten(self) -> None:
        """Raise PenstockError if the head's input was modified in place since, as plain PyTorch does in the backward."""
        if _memory(self.hidden)._version != self._version_of_hidden:
            raise PenstockError(
                "the input of the head was modified in place after the head was called, so LinearCrossEntropy and log_probs "
                "would see other numbers; modify a copy, or take torch.nn.CrossEntropyLoss"
            )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
        first = args[0] if args else None
        if isinstance(first, PostponedLogits):
            if name in _FACTS:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            others = (*args[1:], *kwargs.values())
            # Without gradients, as in the forward of a torch.autograd.Function, the result would have lost its graph.
            keeps_graph = torch.is_grad_enabled() or not first._trains
            if (
                name in _MAPS
                and keeps_graph
                and first.computed is None
                and all(isinstance(v, Number | torch.dtype) for v in others)
            ):
                return first._mapped(lambda logits: func(logits, *args[1:], **kwargs))
        return func(*with_logits(args), **with_logits(kwargs))

    # Only functions that Python does not see come here, without the graph of the logits. torch annotates it more narrowly.
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise _refused()

    def _mapped(self, function: Map) -> PostponedLogits:
        one = torch.empty(1, dtype=self.dtype)
        with self.autocast():
            mapped = function(one)
        if mapped is one:  # a cast to the same dtype returns the tensor itself
            return self
        made = self._make(self.shape, mapped.dtype, self.device, self._trains)
        made.hidden, made.weight, made.bias = self.hidden, self.weight, self.bias
        made.autocast = self.autocast
        made._version_of_hidden = self._version_of_hidden
        made.maps = (*self.maps, function)
        return made


def _refused() -> PenstockError:
    return PenstockError(
        "a function that is not torch's own, such as a torch.autograd.Function, takes the logits, and LinearCrossEntropy "
        "and log_probs do not compute them; call it before the head, or take torch.nn.CrossEntropyLoss"
    )


def _refuse_gradient(_: Tensor) -> None:
    raise _refused()


def with_logits(value: Any) -> Any:
    """Return arguments of a function with computed logits in the place of postponed ones."""
    if isinstance(value, PostponedLogits):
        return value.logits()
    if isinstance(value, dict):
        return {key: with_logits(inner) for key, inner in value.items()}
    return type(value)(map(with_logits, value)) if type(value) in (list, tuple) else value


@contextmanager
def postponing(layer: nn.Module) -> Iterator[None]:
    """Context in which the head of a layer, its last `nn.Linear`, returns a `PostponedLogits`."""
    linear = [module for module in layer.modules() if type(module) is nn.Linear]
    if not linear:
        raise ConfigError(
            f"LinearCrossEntropy, as log_probs, needs a head, an nn.Linear in the last layer, and {type(layer).__name__} "
            "has none; take torch.nn.CrossEntropyLoss or another loss of the output, or evaluate(..., outputs=True)"
        )
    head = linear[-1]
    hooks = head._forward_hooks
    if Shard.of(head.weight) is not None:
        # Those that put the shards of the logits together are for logits.
        head._forward_hooks = OrderedDict((n, hook) for n, hook in hooks.items() if not _joins_shards(hook))
    head.__dict__["forward"] = lambda hidden: PostponedLogits(hidden, head.weight, head.bias)
    try:
        yield
    finally:
        del head.__dict__["forward"]
        head._forward_hooks = hooks


def _joins_shards(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(("torch.distributed.tensor", "penstock.parallel."))


class Shard(NamedTuple):
    """A rank's part of the vocabulary.

    Attributes:
        group: the processes with the other parts.
        start: the first class of the part.
        classes: classes of the whole vocabulary.
    """

    group: dist.ProcessGroup
    start: int
    classes: int

    @classmethod
    def of(cls, weight: Any) -> Shard | None:
        """Return the part that a weight is for; None if it is whole."""
        if not hasattr(weight, "device_mesh"):
            return None
        mesh = weight.device_mesh
        return cls(mesh.get_group(), mesh.get_local_rank() * weight.to_local().shape[0], weight.shape[0])


def _memory(tensor: Any) -> Tensor:
    """Return a tensor, or the local one of a DTensor, whose memory it shares."""
    memory: Tensor = getattr(tensor, "_local_tensor", tensor)
    return memory


def local(tensor: Any, partial_grad: bool = False) -> Tensor:
    """Return a tensor, or the local one of a DTensor, to which its gradient flows.

    Args:
        partial_grad: whether each rank computes an addend of the gradient.
    """
    if not hasattr(tensor, "device_mesh"):
        plain: Tensor = tensor
        return plain
    from torch.distributed.tensor import Partial

    shard: Tensor = tensor.to_local(grad_placements=[Partial()] if partial_grad else None)
    return shard
