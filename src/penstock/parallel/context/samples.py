"""Layers that have a part of each sample's tokens (context parallelism), and the check that they may be divided.

`penstock.parallel.context.tokens` cuts the tokens.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils import _pytree

from penstock.base.errors import ConfigError, PenstockError, describe_error
from penstock.parallel.context.attention import Division, Finish, PartExchange, SequencePart, dividing
from penstock.parallel.context.few_tokens import (
    dims_of,
    few_keys,
    few_of,
    gathered,
    placed_like,
    probed,
    whole_of,
    widened,
)
from penstock.parallel.dtensor import is_dtensor, local
from penstock.parallel.opened import opened
from penstock.stage.compute.postponed_logits import PostponedLogits
from penstock.stage.module import modes_of
from penstock.stage.named import Context, names_given, within
from penstock.stage.rng.isolated_rng import isolated_rng, set_random_keys

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
    itself, a convolution, or a state. The first call in each mode, such as training, also runs the layer with other first
    and last tokens, also of named values, and the same keys and random numbers: values of the tokens between them may not
    change.

    Attributes:
        asked: whether a call has asked for positions.
    """

    def __init__(self, name: str, layer: nn.Module, part: SequencePart, exchange: PartExchange) -> None:
        self._name, self._part, self._exchange = name, part, exchange
        self._layer = layer
        self._forward: Callable[..., Any] = layer.forward
        self._checked: set[tuple[bool, ...]] = set()  # modes
        self.asked = self._exchanges = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the layer's output for this process's tokens."""
        modes = modes_of([self._layer])
        if modes not in self._checked:
            self._check(args, kwargs)
            self._checked.add(modes)
        with self._dividing(args, self._exchange) as division:
            out = self._forward(*args, **kwargs)
            if self._exchanges or division.met:  # a process that left its exchanges out is found here
                division.meet("at its end")
        self.asked |= division.asked
        return out

    @contextmanager
    def _dividing(self, args: Any, exchange: PartExchange) -> Iterator[Division]:
        shape = (0, 0) if (main := _main(args)) is None else main.shape[:2]
        with dividing(Division(self._part, exchange, self._name, *shape)) as division:
            set_random_keys(division.random_key)
            try:
                yield division
            finally:
                set_random_keys(None)
                self._exchanges |= division.met > 0

    def _check(self, args: Any, kwargs: dict[str, Any]) -> None:
        main = _main(args)
        if main is None or main.shape[1] < 2:
            return
        leaves, structure = _pytree.tree_flatten((args, kwargs))
        dims = [_token_dim(x, main, self._exchange) for x in leaves]
        with torch.no_grad():
            if not self._checked:
                modes = [(module, module.training) for module in self._layer.modules()]
                self._layer.eval()
                try:
                    self._compare_few(leaves, dims, structure, main.shape[1])
                finally:
                    for module, training in modes:
                        module.training = training
            given = len(_pytree.tree_leaves(args))
            others = [_other_ends] * given + [_other_named_ends] * (len(leaves) - given)
            ends = [other(x) if dim == 1 else x for other, x, dim in zip(others, leaves, dims, strict=True)]
            self._require_apart((leaves, ends), structure, main.shape[1])

    def _compare_few(self, leaves: list[Any], dims: list[int | None], structure: Any, length: int) -> None:
        size = 2 * probed(length)
        few = [few_of(x, dim) for x, dim in zip(leaves, dims, strict=True)]
        try:
            expected = self._leaves_of(self._joined(few, dims), structure, None)
        except PenstockError:
            raise
        except Exception as error:
            # Few tokens do not have all keys of a mask; the layer may also take those keys that its few tokens have.
            shorter = [few_keys(x, length * self._part.parts, 2 * self._part.parts) for x in few]
            if all(x is y for x, y in zip(few, shorter, strict=True)):
                raise
            few = shorter
            try:
                expected = self._leaves_of(self._joined(few, dims), structure, None)
            except Exception:
                raise self._refusal(f"fails with {describe_error(error)}") from error
        divided = self._leaves_of(few, structure, self._exchange)
        for one, other in zip(expected, divided, strict=True):
            for dim in dims_of(other):
                if (other.shape[dim], *one.shape[dim : dim + 1]) == (size, size * self._part.parts):
                    one = self._part.cut(one, dim)
                    if one.shape != other.shape or _differ(one, other):
                        raise self._refusal("gives other values")
                    break

    def _joined(self, few: list[Any], dims: list[int | None]) -> list[Any]:
        return [whole_of(x, dim, self._part, self._exchange) for x, dim in zip(few, dims, strict=True)]

    def _require_apart(self, inputs: tuple[list[Any], list[Any]], structure: Any, length: int) -> None:
        """Require the same values for inputs with other ends, whose tokens are not near those that are compared."""
        kept = KeptExchange(self._exchange)
        # Bits may also differ by rounding, of experts that get other numbers of tokens.
        for widens in (False, True):
            outputs = []
            for given in inputs:
                # New tensors each time, since a layer may keep what a run has made of one.
                leaves = [x.detach() if isinstance(x, Tensor) else x for x in given]
                outputs.append(self._leaves_of(leaves, structure, kept, widens))
                kept.given = Counter()
            both = [(a, b) for a, b in zip(*outputs, strict=True) if a.dim() > 1 and a.shape[1] == length]
            if all(a.shape == b.shape and torch.equal(a[:, 1:-1], b[:, 1:-1]) for a, b in both):
                return
        if any(a.shape != b.shape or _differ(a[:, 1:-1], b[:, 1:-1]) for a, b in both):
            mode = "in training " if self._layer.training else ""
            raise self._refusal(
                f"{mode}lets tokens change each other outside of attention: it gives other values"
            )

    def _refusal(self, what: str) -> ConfigError:
        kind = next(
            k.__name__ for k in type(self._layer).__mro__ if not k.__module__.startswith("penstock.stage")
        )
        return ConfigError(
            f"layer {self._name} ({kind}) {what} if the tokens of its samples are divided (cp). It may only use other "
            "tokens in scaled_dot_product_attention, positions from penstock.sequence_positions(length), and random numbers "
            "from torch; leave cp at 1"
        )

    def _leaves_of(
        self, leaves: list[Any], structure: Any, exchange: PartExchange | None, widens: bool = True
    ) -> list[Any]:
        """Return the leaves of the layer's output; for whole samples if there is no exchange."""
        args, kwargs = _pytree.tree_unflatten([widened(x) for x in leaves] if widens else leaves, structure)
        context = Context(dict(kwargs), {}, frozenset(names_given(self._layer)))
        divides = nullcontext() if exchange is None else self._dividing(args, exchange)
        before = _python_draws()
        try:
            with (
                within(context),
                isolated_rng(0, 0, 0, self._name),
                _own_tensors(self._layer, widens),
                divides,
            ):
                out = self._forward(*args, **kwargs)
        except Exception as error:  # of attention by matrix products, which has other shapes than it expects
            if exchange is None or isinstance(error, PenstockError):
                raise
            raise self._refusal(f"fails with {describe_error(error)}") from error
        if _python_draws() != before:
            raise self._refusal("draws from random or numpy.random, which differ in the processes, and so")
        if context.losses:
            raise ConfigError(
                f"layer {self._name} adds a loss ({', '.join(context.losses)}), which with cp would be that of one "
                "process's tokens; leave it out, or leave cp at 1"
            )
        return [_own(x) for x in _pytree.tree_leaves(out) if isinstance(x, Tensor)]


class KeptExchange:
    """An exchange whose tensors are gathered in a first run, and are the same in later ones.

    Attributes:
        given: number of tensors of each shape that the present run has had; None in the first run.
    """

    def __init__(self, exchange: PartExchange) -> None:
        self.masks, self.microbatches = exchange.masks, exchange.microbatches
        self.start_sum = exchange.start_sum
        self.given: Counter[Hashable] | None = None
        self._exchange = exchange
        self._kept: defaultdict[Hashable, list[Tensor]] = defaultdict(list)

    def start_gather(self, part: Tensor) -> Finish:
        """Gather the tensors of all processes, or return those of the first run, in the part's dtype."""
        key = tuple(part.shape), part.is_floating_point()
        if self.given is None:
            self._kept[key].append(self._exchange.start_gather(part)())
            return lambda: self._kept[key][-1]
        self.given[key] += 1
        return partial(self._kept[key][self.given[key] - 1].to, part.dtype)


def _own(output: Tensor) -> Tensor:
    """Return this process's values of a layer's output, summed where they are partial, and the head's input for logits."""
    output = output.hidden if isinstance(output, PostponedLogits) else output
    if is_dtensor(output):
        from torch.distributed.tensor import Replicate

        placements = [Replicate() if p.is_partial() else p for p in output.placements]
        output = output.redistribute(placements=placements)
    return local(output)


def _python_draws() -> tuple[object, ...]:
    """Return the states of generators that are not torch's."""
    state: Any = numpy.random.get_state(legacy=False)
    return random.getstate(), state["state"]["key"].tobytes(), state["state"]["pos"]


def _other_ends(leaf: Tensor) -> Tensor:
    """Return a tensor of shape (rows, tokens, ...) with another first and last token."""
    own = local(leaf.detach())
    if not own.is_floating_point() and not own.is_complex():
        return _other_named_ends(leaf)
    changed = own.clone()
    changed[:, [0, -1]] = own[:, [0, -1]].flip(-1) + 1
    return placed_like(leaf, changed)


def _other_named_ends(leaf: Tensor) -> Tensor:
    """Return a tensor of shape (rows, tokens, ...) with a first and last token of other values that a mask may have."""
    own = local(leaf.detach())
    if own.is_complex():
        return leaf
    changed, ends = own.clone(), own[:, [0, -1]]
    if own.dtype == torch.bool:
        changed[:, [0, -1]] = ~ends
    else:  # numbers that are there are allowed; of a mask that is the same everywhere, 0 is
        least, most = own.min(), own.max()
        other = most == 0 if own.is_floating_point() else torch.zeros_like(most)
        least = torch.where(least == most, other.to(own.dtype), least)
        changed[:, [0, -1]] = torch.where(ends == most, least, most)
    return placed_like(leaf, changed)


@contextmanager
def _own_tensors(layer: nn.Module, widens: bool) -> Iterator[None]:
    """Return a context in which a layer has `opened` parameters, writes into copies of its buffers, and may use float32.

    The rounding of bf16 would hide what a state changes.
    """
    tables = [
        (p, table) for p, module in layer.named_modules() for table in (module._parameters, module._buffers)
    ]
    own: list[tuple[dict[str, Any], str, str, Tensor]] = [
        (table, path, name, value)
        for path, table in tables
        for name, value in table.items()
        if value is not None
    ]
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if widens else precision)
    casts = [not widens and torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")]
    try:
        for table, path, name, value in own:
            trained = isinstance(value, nn.Parameter)
            copied = opened(f"{path}.{name}", value) if trained else value.clone()
            table[name] = widened(copied.detach()) if widens else copied
        with torch.autocast("cpu", enabled=casts[0]), torch.autocast("cuda", enabled=casts[1]):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for table, _, name, value in own:
            table[name] = value


def _main(args: Any) -> Tensor | None:
    """Return the tensor of shape (rows, tokens, ...) among arguments: the largest, as others may be tables without rows."""
    tensors = [x for x in _pytree.tree_leaves(args) if isinstance(x, Tensor) and x.dim() > 1]
    return max(tensors, key=Tensor.numel, default=None)


def _token_dim(leaf: Any, main: Tensor, exchange: PartExchange) -> int | None:
    """Return the dimension of a tensor that is the tokens; None for other values.

    Other dimensions than 1 have the length by chance, as rows do, unless the processes have different values.
    """
    dims = dims_of(leaf)
    if leaf is not main and dims and (leaf.shape[0] not in (1, len(main)) or leaf.dim() == 2):
        dims = dims[::-1] if leaf.is_floating_point() or leaf.is_complex() else dims
    lengths = [dim for dim in dims if leaf.shape[dim] == main.shape[1]]
    return next(
        (d for d in lengths if d == 1 or bool((every := gathered(leaf, exchange)).ne(every[0]).any())), None
    )


def _differ(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point():
        return not torch.equal(one, other)
    odd = ~one.isfinite()  # attention of padding to nothing
    if not torch.equal(odd, ~other.isfinite()):
        return True
    one, other = one.masked_fill(odd, 0), other.masked_fill(odd, 0)
    bound = _NEAR[one.dtype.itemsize] * one.abs().max()
    return bool((one - other).abs().max() > bound)
