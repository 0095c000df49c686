"""Cross entropy of a linear head without its logits.

The logits of a microbatch, [tokens, vocabulary], are often the largest tensor of a step. `LinearCrossEntropy` takes the
head's input instead, and goes through the tokens in chunks: it computes the logits of a chunk, its loss, and at once its
gradients, and keeps only these: [tokens, width] for the input and, in fp32, [vocabulary, width] for the weight.

While the last stage computes such a loss, its head, the last `nn.Linear` of the last layer, returns a `PostponedLogits`
instead of logits. Scales, `tanh` and casts that the model applies to it (a soft cap, say) are kept for later. For any other
function of torch it becomes the logits, and the loss is computed from them.

With tensor parallelism each rank has a shard of the vocabulary, and computes the chunk's logits and gradients for it alone.
Of other shards, a rank gets three numbers a token: the logarithm of their softmax's denominator, the target's logit, and the
mean logit. `log_probs` goes through the same chunks without gradients.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from penstock.base.errors import BatchError, ConfigError, PenstockError

_SCALES = frozenset({"mul", "__mul__", "__rmul__", "multiply", "div", "__truediv__", "true_divide"})
_MAPS = frozenset({"tanh", "float", "to"}) | _SCALES
"""Functions of torch, by name, that change each logit by itself, with numbers or a dtype besides the logits."""

_FACTS = frozenset({"size", "dim", "numel", "is_floating_point", "shape", "dtype", "device", "ndim"})
"""Functions and attributes that do not need the logits."""

_Map = Callable[[Tensor], Tensor]

IGNORED = -100
"""Target without a class, as in torch."""

CHUNKS = 8
"""Parts of a microbatch's tokens."""


class LinearCrossEntropy:
    """Loss function: mean cross entropy in nats of a linear head, by chunks of tokens, so that whole logits never exist.

    A `Pipeline` with this loss does not call the head, the last ``nn.Linear`` of the last layer, in training steps and
    evaluations; it may be tied, and the model may scale, cast or cap the logits afterwards. Loss and gradients equal those
    of ``torch.nn.functional.cross_entropy`` of fp32 logits (float64 stays) to summation order. Between the forward and the
    backward of a microbatch a gradient of the weight's size is kept, in fp32, instead of the logits. Called with logits, as
    outside a pipeline, in a compiled stage or with ``outputs=True``, it computes the same loss from them.

    Args:
        chunks: number of parts of the tokens of a microbatch (default 8).
        ignore_index: target that does not count (default -100).
        label_smoothing: share of the target's probability that is spread over the vocabulary (default 0).
        z_loss: weight of the squared logarithm of the softmax's denominator, which is added to each token's loss
            (default 0; PaLM, 2204.02311, has 1e-4).
        shift: whether the target of a position is the next one's, as in `causal_lm_loss` (default False).

    Raises:
        ConfigError: if an argument is out of range.
    """

    postpones_logits = True
    """True if a stage gives the loss a `PostponedLogits` in place of logits; a loss that calls this one sets it, too."""

    def __init__(
        self,
        chunks: int = CHUNKS,
        ignore_index: int = IGNORED,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        *,
        shift: bool = False,
    ) -> None:
        if type(chunks) is not int or chunks < 1:
            raise ConfigError(f"chunks must be a whole number of at least 1, got {chunks!r}")
        if type(ignore_index) is not int:
            raise ConfigError(f"ignore_index must be a whole number, got {ignore_index!r}")
        if not isinstance(label_smoothing, int | float) or not 0 <= label_smoothing < 1:
            raise ConfigError(f"label_smoothing must be at least 0 and less than 1, got {label_smoothing!r}")
        if not isinstance(z_loss, int | float) or not 0 <= z_loss < float("inf"):
            raise ConfigError(f"z_loss must be a finite number of at least 0, got {z_loss!r}")
        if type(shift) is not bool:
            raise ConfigError(f"shift must be True or False, got {shift!r}")
        self.chunks = chunks
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.shift = shift

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss; 0 if no target counts.

        Args:
            output: logits of shape (..., vocabulary), or what the head of a pipeline returns instead.
            target: int64 tensor of shape (...).

        Raises:
            BatchError: if the target's shape or dtype is not the one above, or it has a class beyond the vocabulary.
        """
        if not isinstance(output, Tensor):
            raise BatchError(
                f"LinearCrossEntropy takes logits, a tensor of shape (..., vocabulary), and the last layer returned a "
                f"{type(output).__name__}; return the tensor alone, or take a loss function of your own"
            )
        shape, classes = tuple(output.shape[:-1]), output.shape[-1]
        if tuple(self._classes(target).shape) != shape:
            raise BatchError(
                f"the target of LinearCrossEntropy must be int64 of the output's shape without the vocabulary, {shape}; got "
                f"int64 of shape {tuple(target.shape)}"
            )
        target = self._shifted(target)
        counts = target != self.ignore_index
        # On a GPU this would wait for the device, and torch's own assertion is there. FakeTensors have no values.
        if target.device.type == "cpu" and not isinstance(target, FakeTensor):
            _require_classes(target, counts, classes, f"ignore_index={self.ignore_index}")
        target, counts = target.reshape(-1), counts.reshape(-1)
        if not isinstance(output, PostponedLogits):
            return self._from_logits(output.flatten(0, -2), target, counts)
        if output.computed is not None:
            return self._from_logits(output.computed.flatten(0, -2), target, counts)
        output.require_unwritten()
        work = _Work(target, counts, self, output.maps, torch.is_grad_enabled(), _Shard.of(output.weight))
        hidden = _local(output.hidden, partial_grad=True).flatten(0, -2)
        weight = _local(output.weight)
        bias = None if output.bias is None else _local(output.bias)
        with output.autocast():
            # torch does not annotate it.
            loss: Tensor = _Chunks.apply(hidden, weight, bias, work)  # type: ignore[no-untyped-call]
        return loss

    @property
    def without_shift(self) -> LinearCrossEntropy | None:
        """The same loss of targets that were shifted before; None if it does not shift them."""
        if not self.shift:
            return None
        other = copy.copy(self)
        other.shift = False
        return other

    def valid_targets(self, target: Tensor) -> int:
        """Return the number of targets that count; a `Pipeline` weighs each microbatch by it unless it is told otherwise."""
        return int((self._shifted(self._classes(target)) != self.ignore_index).sum())

    @staticmethod
    def _classes(target: object) -> Tensor:
        if isinstance(target, Tensor) and target.dtype == torch.int64:
            return target
        got = (
            f"{str(target.dtype).removeprefix('torch.')} of shape {tuple(target.shape)}"
            if isinstance(target, Tensor)
            else f"a {type(target).__name__}"
        )
        raise BatchError(
            "the target of LinearCrossEntropy must be an int64 tensor of the output's shape without the vocabulary; got "
            f"{got}. A loss that weighs tokens is a loss function of your own, on logits"
        )

    def _shifted(self, target: Tensor) -> Tensor:
        return F.pad(target[:, 1:], (0, 1), value=self.ignore_index) if self.shift else target

    def _from_logits(self, logits: Tensor, target: Tensor, counts: Tensor) -> Tensor:
        logits = logits.to(_wide(logits))
        loss = F.cross_entropy(
            logits,
            target,
            ignore_index=self.ignore_index,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )
        if self.z_loss:
            loss = loss + self.z_loss * logits.logsumexp(-1)[counts].square().sum()
        return loss / counts.sum().clamp(min=1)


def log_probs(output: object, target: Tensor, chunks: int = CHUNKS) -> Tensor:
    """Return the logarithm of each target's probability, in fp32 and of the target's shape; 0 where it is -100.

    Args:
        output: logits of shape (..., vocabulary), or what the head returns in `postponing`.
        target: int64 tensor of shape (...).
        chunks: number of parts of the tokens; probabilities of one part exist at a time.

    Raises:
        BatchError: if the target does not fit the output, or has a class beyond the vocabulary.
    """
    if not isinstance(output, Tensor) or output.shape[:-1] != target.shape:
        what = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
        raise BatchError(
            f"log_probs needs logits of shape {(*target.shape, 'vocabulary')} for a microbatch of y of shape "
            f"{tuple(target.shape)}, and the last layer returned {what}; y must have a class for each position"
        )
    counts = (target != IGNORED).reshape(-1)
    target_of_token = target.reshape(-1)
    _require_classes(target, target != IGNORED, output.shape[-1], str(IGNORED))
    found = torch.empty(target.numel(), dtype=torch.float32, device=target.device)
    length = max(1, -(-target.numel() // chunks))
    for start in range(0, target.numel(), length):
        rows = slice(start, start + length)
        if isinstance(output, PostponedLogits) and output.computed is None:
            output.require_unwritten()
            logits, shard = output.of_rows(rows), _Shard.of(output.weight)
        else:
            logits, shard = _computed(output).flatten(0, -2)[rows], None
        logs = _logs_of(logits, target_of_token[rows], counts[rows], shard)
        found[rows] = torch.where(counts[rows], logs.of_target, 0)
    return found.view(target.shape)


def _require_classes(target: Tensor, counts: Tensor, classes: int, ignored: str) -> None:
    wrong = (((target < 0) | (target >= classes)) & counts).nonzero()
    if len(wrong):
        place = tuple(wrong[0].tolist())
        raise BatchError(
            f"the target has class {int(target[place])} at {[*place]} of the microbatch, and the vocabulary is 0 to "
            f"{classes - 1}; only {ignored} is left out"
        )


def _wide(logits: Tensor) -> torch.dtype:
    """Return the dtype that a loss is computed in."""
    return torch.float64 if logits.dtype is torch.float64 else torch.float32


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
    maps: tuple[_Map, ...]
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
                if _Shard.of(self.weight) is not None:
                    value = value.full_tensor()
                for function in self.maps:
                    value = function(value)
            self.computed = value
        return self.computed

    def of_rows(self, rows: slice) -> Tensor:
        """Compute the logits of some tokens; with a shard of the vocabulary, of its classes."""
        bias = None if self.bias is None else _local(self.bias)
        with self.autocast():
            value = F.linear(_local(self.hidden).flatten(0, -2)[rows], _local(self.weight), bias)
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
        return func(*_computed(args), **_computed(kwargs))

    # Only functions that Python does not see come here, without the graph of the logits. torch annotates it more narrowly.
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise _refused()

    def _mapped(self, function: _Map) -> PostponedLogits:
        one = torch.empty(1, dtype=self.dtype)
        with self.autocast():
            mapped = function(one)
        if mapped is one:  # a cast to the same dtype returns the tensor itself
            return self
        made = self._make(self.shape, mapped.dtype, self.device, self._trains)
        made.hidden, made.weight, made.bias, made.autocast = (
            self.hidden,
            self.weight,
            self.bias,
            self.autocast,
        )
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


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _computed(value: Any) -> Any:
    """Return arguments of a function with computed logits in the place of postponed ones."""
    if isinstance(value, PostponedLogits):
        return value.logits()
    if isinstance(value, dict):
        return {key: _computed(inner) for key, inner in value.items()}
    return type(value)(map(_computed, value)) if type(value) in (list, tuple) else value


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
    if _Shard.of(head.weight) is not None:
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


class _Shard(NamedTuple):
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
    def of(cls, weight: Any) -> _Shard | None:
        """Return the part that a weight is for; None if it is whole."""
        if not hasattr(weight, "device_mesh"):
            return None
        mesh = weight.device_mesh
        return cls(mesh.get_group(), mesh.get_local_rank() * weight.to_local().shape[0], weight.shape[0])


def _memory(tensor: Any) -> Tensor:
    """Return a tensor, or the local one of a DTensor, whose memory it shares."""
    memory: Tensor = getattr(tensor, "_local_tensor", tensor)
    return memory


def _local(tensor: Any, partial_grad: bool = False) -> Tensor:
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


class _Work(NamedTuple):
    target: Tensor
    counts: Tensor
    options: LinearCrossEntropy
    maps: Sequence[_Map]
    trains: bool
    shard: _Shard | None


class _Chunks(torch.autograd.Function):
    """The loss, and its gradients in the same pass over the chunks, which the backward only scales."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, work: _Work) -> Tensor:
        for_hidden, for_weight, for_bias = (work.trains and needed for needed in ctx.needs_input_grad[:3])
        dtype = _wide(weight)
        total = hidden.new_zeros((), dtype=dtype)
        number = work.counts.sum().clamp(min=1)
        hidden_grad = torch.empty_like(hidden) if for_hidden else None
        weight_grad = torch.zeros_like(weight, dtype=dtype) if for_weight else None
        bias_grad = torch.zeros_like(bias, dtype=dtype) if for_bias and bias is not None else None
        length = max(1, -(-len(hidden) // work.options.chunks))
        for start in range(0, len(hidden), length):
            rows = slice(start, start + length)
            loss, grad = _loss_and_grad(F.linear(hidden[rows], weight, bias), rows, work)
            total += loss
            # Tokens that do not count are left out of the small operand of each product, not of the logits' gradient.
            counts = work.counts[rows].unsqueeze(-1).to(grad.dtype)
            if hidden_grad is not None:
                hidden_grad[rows] = (grad @ weight.to(grad.dtype)) * counts
            x = hidden[rows].to(grad.dtype) * counts
            if weight_grad is not None and grad.dtype is dtype:
                weight_grad.addmm_(grad.t(), x)
            elif weight_grad is not None and grad.is_cuda:  # the product adds in fp32 by itself
                torch.addmm(weight_grad, grad.t(), x, out_dtype=dtype, out=weight_grad)
            elif weight_grad is not None:
                weight_grad += grad.t() @ x
            if bias_grad is not None:
                bias_grad += (grad.t() @ counts).squeeze(-1)
        ctx.save_for_backward(hidden_grad, weight_grad, bias_grad)
        ctx.number = number
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return total / number

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # In place, since a second gradient of the weight's size would cost much of what the chunks save. A second backward
        # is refused by autograd, which sees that saved tensors were modified.
        factor = grad / ctx.number
        saved = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *(None if one is None else one.mul_(factor).to(dtype) for one, dtype in saved), None


def _loss_and_grad(raw: Tensor, rows: slice, work: _Work) -> tuple[Tensor, Tensor]:
    """Return the sum of a chunk's losses, and the gradient of each token's own loss by its logits before the maps.

    The gradient is p (1 + 2 z lse) - (1 - s) [target] - s / vocabulary, with the softmax p, the logarithm lse of its
    denominator, the label smoothing s and the weight z of the z-loss. With a shard of the vocabulary, it is its gradient.
    """
    counts, options, maps = work.counts[rows], work.options, work.maps
    classes = raw.shape[-1] if work.shard is None else work.shard.classes
    raw = raw.detach().requires_grad_(bool(maps))
    # Hooks of a recompute, which drop what is saved, are not for this graph: it ends in this call.
    with torch.enable_grad(), saved_tensors_hooks(_same, _same):
        mapped = raw
        for function in maps:
            mapped = function(mapped)
    smoothing = options.label_smoothing
    found = _logs_of(mapped.detach(), work.target[rows], counts, work.shard, with_mean=bool(smoothing))
    lse, of_target = found.lse, found.of_target
    loss = -(1 - smoothing) * of_target
    if smoothing:
        loss -= smoothing * found.mean
    if options.z_loss:
        loss += options.z_loss * lse.square()
    grad = found.softmax.exp_()
    if options.z_loss:
        grad *= (1 + 2 * options.z_loss * lse).unsqueeze(-1)
    if smoothing:
        grad -= smoothing / classes
    at_target = torch.full_like(lse, smoothing - 1)
    if work.shard is not None:
        at_target = at_target * found.here
    grad.scatter_add_(-1, found.chosen, at_target.unsqueeze(-1))
    if maps:
        (grad,) = torch.autograd.grad(mapped, raw, grad.to(mapped.dtype))
    # A token that does not count may have a loss that is not finite; 0 times it would be NaN.
    return torch.where(counts, loss, 0).sum(), grad.to(raw.dtype)


class _Logs(NamedTuple):
    """Logarithms of probabilities by token.

    Attributes:
        softmax: of each class of the rank's part of the vocabulary.
        of_target, lse, mean: of the target, of the softmax's denominator, and the mean over the classes (0 unless asked).
        chosen, here: index of the target in the part, and whether it is there.
    """

    softmax: Tensor
    of_target: Tensor
    lse: Tensor
    mean: Tensor
    chosen: Tensor
    here: Tensor


def _logs_of(
    logits: Tensor, target: Tensor, counts: Tensor, shard: _Shard | None, with_mean: bool = False
) -> _Logs:
    here = counts
    if shard is not None:
        target = target - shard.start
        here = counts & (target >= 0) & (target < logits.shape[-1])
    chosen = torch.where(here, target, 0).unsqueeze(-1)
    logs = F.log_softmax(logits, -1, dtype=_wide(logits))
    of_target = logs.gather(-1, chosen).squeeze(-1)
    of_target_logit = logits.gather(-1, chosen).squeeze(-1).to(logs.dtype)
    lse = of_target_logit - of_target
    mean = logs.mean(-1) if with_mean else torch.zeros_like(lse)
    if shard is not None:
        own = lse
        lse, of_target, mean = _over_shards(
            shard.group, lse, torch.where(here, of_target_logit, 0), mean + lse
        )
        logs += (own - lse).unsqueeze(-1)
    return _Logs(logs, of_target, lse, mean, chosen, here)


def _over_shards(
    group: dist.ProcessGroup, lse: Tensor, of_target: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each token's logarithm of the whole denominator, and the logarithms of its target's and its mean probability.

    Args:
        group: processes with equal parts of the vocabulary.
        lse, of_target, mean: of the rank's part, the logarithm of the denominator, the target's logit (0 if it is in
            another part) and the mean logit.
    """
    own = torch.stack([lse, of_target, mean])
    each = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(each, own, group=group)
    parts = torch.stack(each)
    lse = parts[:, 0].logsumexp(0)
    return lse, parts[:, 1].sum(0) - lse, parts[:, 2].mean(0) - lse
