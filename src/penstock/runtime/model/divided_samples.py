"""Layers that have a part of each sample's tokens (context parallelism), and the check that they may be divided."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from penstock.base.errors import ConfigError, PenstockError, describe_error
from penstock.parallel.context import PartExchange, SequencePart, dividing
from penstock.parallel.dtensor import is_dtensor, local
from penstock.stage.compute.linear_cross_entropy import IGNORED
from penstock.stage.named import Context, names_given, within

_PROBED = 2
"""Tokens of each chunk in the check: the least that have a first and a last one."""
_NEAR = {8: 1e-9, 4: 2e-5, 2: 5e-2, 1: 1.0}
"""By bytes of an element, the difference that another order of sums explains, of the largest value."""


def divide_samples(
    layers: Iterable[tuple[str, nn.Module]], part: SequencePart, exchange: PartExchange
) -> None:
    """Have layers compute with a part of each sample, in place.

    Raises:
        ConfigError: if a layer has a forward of its own, as compiled ones do.
    """
    done: set[int] = set()
    for name, layer in layers:
        if id(layer) in done:
            continue
        done.add(id(layer))
        if "forward" in vars(layer):
            raise ConfigError(
                f"layer {name} has had its forward replaced, which context parallelism does not divide; leave cp at 1"
            )
        layer.forward = DividedLayer(name, layer, part, exchange)


def undo_samples(layers: Iterable[tuple[str, nn.Module]]) -> None:
    """Give layers of `divide_samples` their own forward back."""
    for _, layer in layers:
        if isinstance(vars(layer).get("forward"), DividedLayer):
            del layer.forward


def asks_for_positions(layers: Iterable[tuple[str, nn.Module]]) -> bool:
    """Return whether a call of layers of `divide_samples` has asked for positions."""
    forwards = (vars(layer).get("forward") for _, layer in layers)
    return any(forward.asked for forward in forwards if isinstance(forward, DividedLayer))


class DividedLayer:
    """The forward of a layer that has a part of each sample's tokens; called as the layer's own.

    The first call also computes a few tokens of the batch twice, in float32: whole on each process, and divided. A layer
    that gives other values then does something along the sequence that is not divided, such as positions that it counts
    itself, a convolution, or a state.

    Attributes:
        asked: whether a call has asked for positions.
    """

    def __init__(self, name: str, layer: nn.Module, part: SequencePart, exchange: PartExchange) -> None:
        self._name, self._part, self._exchange = name, part, exchange
        self._layer = layer
        self._forward: Callable[..., Any] = layer.forward
        self._checked = self.asked = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the layer's output for this process's tokens."""
        if not self._checked:
            self._check(args, kwargs)
            self._checked = True
        with dividing(self._part, self._exchange) as division:
            out = self._forward(*args, **kwargs)
        self.asked |= division.asked
        return out

    def _check(self, args: Any, kwargs: dict[str, Any]) -> None:
        leaves, structure = _pytree.tree_flatten((args, kwargs))
        lengths = [x.shape[1] for x in leaves if isinstance(x, Tensor) and x.dim() > 1]
        if not lengths or lengths[0] < 2 * _PROBED:
            return
        few = [_widened(_few(x, lengths[0])) for x in leaves]
        size = 2 * _PROBED
        whole = [_whole(x, size, self._part, self._exchange) for x in few]
        modes = [(module, module.training) for module in self._layer.modules()]
        devices = [x.device for x in leaves if isinstance(x, Tensor) and x.is_cuda][:1]
        self._layer.eval()
        try:
            with torch.no_grad(), torch.random.fork_rng(devices), _in_float32(self._layer):
                expected, divided = self._probe(structure, whole, few)
        finally:
            for module, training in modes:
                module.training = training
        for one, other in zip(expected, divided, strict=True):
            if not isinstance(one, Tensor) or one.dim() < 2 or one.shape[1] != size * self._part.parts:
                continue
            one = self._part.cut(one)
            if one.shape != other.shape or _differ(one, other):
                raise self._refusal("gives other values")

    def _refusal(self, what: str) -> ConfigError:
        kind = next(
            k.__name__ for k in type(self._layer).__mro__ if not k.__module__.startswith("penstock.stage")
        )
        return ConfigError(
            f"layer {self._name} ({kind}) {what} if the tokens of its samples are divided (cp). It may only use other "
            "tokens in scaled_dot_product_attention, and positions from penstock.sequence_positions(length); leave cp at 1"
        )

    def _of_part(self, args: Any, kwargs: dict[str, Any]) -> Any:
        try:
            with dividing(self._part, self._exchange):
                return self._forward(*args, **kwargs)
        except PenstockError:
            raise
        except Exception as error:  # of attention by matrix products, which has other shapes than it expects
            raise self._refusal(f"fails with {describe_error(error)}") from error

    def _probe(self, structure: Any, whole: list[Any], few: list[Any]) -> tuple[list[Any], list[Any]]:
        """Return the leaves of the layer's output for whole samples, and for this part of them."""
        outputs = []
        for leaves, divides in ((whole, False), (few, True)):
            args, kwargs = _pytree.tree_unflatten(leaves, structure)
            with within(Context(dict(kwargs), {}, frozenset(names_given(self._layer)))) as context:
                out = self._of_part(args, kwargs) if divides else self._forward(*args, **kwargs)
            if context.losses:
                raise ConfigError(
                    f"layer {self._name} adds a loss ({', '.join(context.losses)}), which with cp would be that of one "
                    "process's tokens; leave it out, or leave cp at 1"
                )
            outputs.append([local(x) if isinstance(x, Tensor) else x for x in _pytree.tree_leaves(out)])
        return outputs[0], outputs[1]


class DividedLoss:
    """A loss function of a part of each sample's tokens; called as the function itself.

    The first call whose few tokens have a loss also computes it for all processes' tokens together. A function that gives
    another value then uses other tokens, as one that shifts its targets does.

    Args:
        reduction: "mean", "sum", or a function from a target to its weight.
    """

    def __init__(
        self,
        function: Callable[[Any, Any], Any],
        part: SequencePart,
        exchange: PartExchange,
        reduction: str | Callable[[Any], object],
    ) -> None:
        self._function, self._part, self._exchange = function, part, exchange
        self._reduction = reduction
        self._checked = False

    def __call__(self, output: Any, target: Any) -> Any:
        """Return the loss of this process's tokens."""
        if self._reduction == "mean":
            _require_all_count(target)
        if not self._checked:
            self._check(output, target)
        return self._function(output, target)

    def _check(self, output: Any, target: Any) -> None:
        leaves, structure = _pytree.tree_flatten((output, target))
        lengths = [x.shape[1] for x in leaves if isinstance(x, Tensor) and x.dim() > 1]
        if not lengths or lengths[0] < 2 * _PROBED:
            self._checked = True
            return
        few = [_widened(_few(x, lengths[0])) for x in leaves]
        whole = [_whole(x, 2 * _PROBED, self._part, self._exchange) for x in few]
        with torch.no_grad(), torch.random.fork_rng([]):
            expected, own = (self._value(_pytree.tree_unflatten(x, structure)) for x in (whole, few))
        every = self._exchange.start_gather(torch.stack([own[0], own[1]])[None])()[:, 0]
        total = (every[:, 0] * every[:, 1]).nansum() / (
            1.0 if self._reduction == "sum" else every[:, 1].sum()
        )
        # Without a target that counts there is no loss to compare.
        if not bool(expected[0].isfinite()) or not bool(expected[1]):
            return
        self._checked = True
        near = 1e-2 if few[0].dtype.itemsize < 4 else 1e-4
        if bool((total - expected[0]).abs() > near * expected[0].abs().clamp(min=1e-3)):
            raise ConfigError(
                "the loss function gives another value if the tokens of a sample are divided (cp): it may not shift its "
                "targets, or use other tokens, or its reduction may count others (reduction='valid' counts all that are not "
                "ignored, penstock.valid_tokens those of a loss that shifts). Give shifted targets; or leave cp at 1"
            )

    def _value(self, values: tuple[Any, Any]) -> tuple[Tensor, Tensor]:
        """Return the loss of some tokens, and its weight, as float64."""
        returned = self._function(*values)
        loss = sum(returned.values()) if isinstance(returned, Mapping) else returned
        weight: Any = self._reduction(values[1]) if callable(self._reduction) else 1.0
        return torch.as_tensor(loss).double().cpu(), torch.as_tensor(weight).double().cpu()


def _require_all_count(target: object) -> None:
    """Require targets that all count, since processes with other numbers of them would weigh the same."""
    for leaf in _pytree.tree_leaves(target):
        if isinstance(leaf, Tensor) and leaf.dtype == torch.int64 and bool((leaf == IGNORED).any()):
            raise ConfigError(
                f"a target has {IGNORED}, which losses leave out, so parts of a sample (cp) have other numbers of tokens "
                "that count, and the mean of their means is not the mean; give reduction='valid'"
            )


@contextmanager
def _in_float32(layer: nn.Module) -> Iterator[None]:
    """Return a context in which a layer computes in float32: the rounding of bf16 would hide what a state changes."""
    tables = [table for module in layer.modules() for table in (module._parameters, module._buffers)]
    own: list[tuple[dict[str, Any], str, Tensor]] = [
        (table, name, value) for table in tables for name, value in table.items() if value is not None
    ]
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        for table, name, value in own:
            table[name] = _widened(value.detach())
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for table, name, value in own:
            table[name] = value


def _widened(value: Any) -> Any:
    """Return a tensor of half precision in float32, and other values as they are."""
    halves = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if halves and (type(value) is Tensor or is_dtensor(value)) else value


def _whole(few: Any, size: int, part: SequencePart, exchange: PartExchange) -> Any:
    """Return the tokens of all parts, of a tensor with `size` of them; other values as they are."""
    if not isinstance(few, Tensor) or few.dim() < 2 or few.shape[1] != size:
        return few
    return _like(few, part.join(exchange.start_gather(local(few))(), 1))


def _like(model: Tensor, values: Tensor) -> Tensor:
    """Return values, as a DTensor if `model` is one, as the inputs of a sharded layer are."""
    if not is_dtensor(model):
        return values
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(values, model.device_mesh, model.placements, run_check=False)


def _few(leaf: object, length: int) -> object:
    """Return the first tokens of each chunk of a tensor, detached; other values as they are."""
    if not isinstance(leaf, Tensor) or leaf.dim() < 2 or leaf.shape[1] != length:
        return leaf
    chunks = local(leaf.detach())[:1].chunk(2, 1)
    return _like(leaf, torch.cat([chunk[:, :_PROBED] for chunk in chunks], 1).contiguous())


def _differ(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point():
        return not torch.equal(one, other)
    odd = ~one.isfinite()  # attention of padding to nothing
    if not torch.equal(odd, ~other.isfinite()):
        return True
    one, other = one.masked_fill(odd, 0), other.masked_fill(odd, 0)
    bound = _NEAR[one.dtype.itemsize] * one.abs().max()
    return bool((one - other).abs().max() > bound)
