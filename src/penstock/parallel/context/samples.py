"""Layers that have a part of each sample's tokens (context parallelism), and the check that they may be divided.

`penstock.parallel.context.tokens` cuts the tokens.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree

from penstock.base.errors import ConfigError, PenstockError, describe_error
from penstock.parallel.context.attention import Division, Finish, PartExchange, SequencePart, dividing
from penstock.parallel.dtensor import is_dtensor, local
from penstock.parallel.opened import opened
from penstock.stage.compute.postponed_logits import PostponedLogits
from penstock.stage.module import modes_of
from penstock.stage.named import Context, names_given, within
from penstock.stage.rng.isolated_rng import isolated_rng, set_random_keys

_PROBED = 8
"""Most tokens of each chunk that are compared with those of whole samples."""
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
        size = 2 * _probed(length)
        few = [_few(x, dim) for x, dim in zip(leaves, dims, strict=True)]
        try:
            expected = self._leaves_of(self._joined(few, dims), structure, None)
        except PenstockError:
            raise
        except Exception as error:
            # Few tokens do not have all keys of a mask; the layer may also take those keys that its few tokens have.
            shorter = [_few_keys(x, length * self._part.parts, 2 * self._part.parts) for x in few]
            if all(x is y for x, y in zip(few, shorter, strict=True)):
                raise
            few = shorter
            try:
                expected = self._leaves_of(self._joined(few, dims), structure, None)
            except Exception:
                raise self._refusal(f"fails with {describe_error(error)}") from error
        divided = self._leaves_of(few, structure, self._exchange)
        for one, other in zip(expected, divided, strict=True):
            for dim in _dims(other):
                if (other.shape[dim], *one.shape[dim : dim + 1]) == (size, size * self._part.parts):
                    one = self._part.cut(one, dim)
                    if one.shape != other.shape or _differ(one, other):
                        raise self._refusal("gives other values")
                    break

    def _joined(self, few: list[Any], dims: list[int | None]) -> list[Any]:
        return [_whole(x, dim, self._part, self._exchange) for x, dim in zip(few, dims, strict=True)]

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
        args, kwargs = _pytree.tree_unflatten([_widened(x) for x in leaves] if widens else leaves, structure)
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


class DividedLoss:
    """A loss function of a part of each sample's tokens; called as the function itself.

    The first call whose few tokens have a loss also computes it and its gradient for all processes' tokens together. A
    function that gives other values then uses other tokens, as one that shifts its targets does, counts others than are
    known, or weighs samples alike whose tokens do not count equally often. So that it counts some of one part of some
    samples alone, values that the targets have are also put in the place of others.

    Args:
        weight: function from a target to its weight; None for a sum.
    """

    def __init__(
        self,
        function: Callable[[Any, Any], Any],
        part: SequencePart,
        exchange: PartExchange,
        weight: Callable[[Any], object] | None,
    ) -> None:
        self._function, self._part, self._exchange = function, part, exchange
        self._weight = weight
        self._checked: set[bool] = set()  # whether samples were several: one is not weighed against others

    def __call__(self, output: Any, target: Any) -> Any:
        """Return the loss of this process's tokens."""
        if True not in self._checked:
            self._check_once(output, target)
        return self._function(output, target)

    def _check_once(self, output: Any, target: Any) -> None:
        """Check the loss, unless it was checked with as many samples: one, or several."""
        shapes = [
            x.shape for x in _pytree.tree_leaves((output, target)) if isinstance(x, Tensor) and x.dim() > 1
        ]
        several = bool(shapes) and shapes[0][0] > 1
        if several not in self._checked:
            with torch.no_grad(), torch.random.fork_rng([]):
                if not shapes or self._check(output, target, shapes[0][1]):
                    self._checked |= {several, False}

    def _check(self, output: Any, target: Any, length: int) -> bool:
        """Compare losses; return whether there was one, which there is not without a target that counts."""
        leaves, structure = _pytree.tree_flatten((output, target))
        dims = [1 if 1 in _dims(x) and x.shape[1] == length else None for x in leaves]
        few = [_few(x, dim) for x, dim in zip(leaves, dims, strict=True)]
        targets = len(leaves) - len(_pytree.tree_leaves(target))
        few[:targets] = [_unequal(x) for x in few[:targets]]
        whole = [_whole(x, dim, self._part, self._exchange) for x, dim in zip(few, dims, strict=True)]
        found = self._compare(few, whole, structure, targets)
        for n in range(targets, len(leaves)):
            for value in self._values_in(leaves[n]) if dims[n] else ():
                filled = few[n].clone()
                if self._part.index == 0:
                    filled[::2, 1:] = value
                others = [*few[:n], filled, *few[n + 1 :]]
                joined = _whole(filled, 1, self._part, self._exchange)
                self._compare(others, [*whole[:n], joined, *whole[n + 1 :]], structure, targets)
        return found

    def _values_in(self, target: Tensor) -> list[float]:
        """Return values that are likely not to count: 0, and the least, the most frequent and the last of each part."""
        if target.is_complex():
            return []
        values = local(target).double() if target.is_floating_point() else local(target).long()
        picks = torch.stack([values.min(), values.flatten().mode().values, values[-1, -1].flatten()[-1]])
        every = self._exchange.start_gather(picks)()
        return sorted({0, *every.flatten().tolist()})

    def _compare(self, few: list[Any], whole: list[Any], structure: Any, outputs: int) -> bool:
        """Compare the loss of whole samples with that of parts; return whether there is one."""
        (expected, counted, grads), (loss, weight, parts) = (
            self._value(x, structure, outputs) for x in (whole, few)
        )
        every = self._exchange.start_gather(torch.stack([loss, weight])[None])()[:, 0]
        divisor = 1.0 if self._weight is None else every[:, 1].sum()
        total = (every[:, 0] * every[:, 1]).nansum() / divisor
        if not bool(expected.isfinite()) or not bool(counted):
            return False
        # Of a policy's loss in its first step, which is the same whatever its outputs are, only the gradient tells.
        differ = [
            self._differs(one, other, weight / divisor) for one, other in zip(grads, parts, strict=True)
        ]
        if any(differ) or bool((total - expected).abs() > 1e-4 * expected.abs().clamp(min=1e-3)):
            raise ConfigError(
                "the loss function gives another value if the tokens of a sample are divided (cp): it may not shift its "
                "targets, use other tokens, or take a mean of each sample before that of all; and what it counts must be "
                "known: the ignore_index and class weights that it has as a module or a partial, or the reduction "
                "(reduction='valid' counts all that are not ignored, penstock.valid_tokens those of a loss that shifts, and "
                "a function returns the weight of a target). Give shifted targets, or such a function; or leave cp at 1"
            )
        return True

    def _differs(self, whole: Tensor, own: Tensor, share: Tensor) -> bool:
        """Compare a gradient of whole samples with that of this part, which has a share of the loss."""
        if whole.shape == own.shape:  # an output without tokens, whose gradients the parts add up
            return False
        one = self._part.cut(whole)
        other = own * share.to(own) if bool(share) else torch.zeros_like(own)
        return bool(((one - other).abs() > 0.01 * one.abs().max()).any())

    def _value(self, leaves: list[Any], structure: Any, outputs: int) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return the loss of some tokens and its weight, as float64, and its gradients by the outputs."""
        trained = [x.detach().requires_grad_() for x in leaves[:outputs] if _trains(x)]
        # Hooks of a stage that recomputes its layers save nothing for a backward.
        with torch.enable_grad(), saved_tensors_hooks(_same, _same):
            copies = iter(trained)
            given = [next(copies).clone() if _trains(x) else x for x in leaves[:outputs]]
            values = _pytree.tree_unflatten([*given, *leaves[outputs:]], structure)
            returned = self._function(*values)
            loss = torch.as_tensor(sum(returned.values()) if isinstance(returned, Mapping) else returned)
        grads = [torch.zeros_like(x) for x in trained]
        if trained and loss.requires_grad:
            grads = [*torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)]
        weight: Any = 1.0 if self._weight is None else self._weight(values[1])
        loss = loss.detach().double().cpu()
        return loss, torch.as_tensor(weight).double().cpu(), [local(x) for x in grads]


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
    return _like(leaf, changed)


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
    return _like(leaf, changed)


def _unequal(output: Any) -> Any:
    """Return the output of a few tokens, varied if all are equal, as of a head of zeros, so that their losses differ."""
    varies = 1 not in _dims(output) or not output.is_floating_point() or bool((output != output[:, :1]).any())
    generator = torch.Generator().manual_seed(0)
    return output if varies else output + 0.05 * torch.rand(output.shape, generator=generator).to(output)


def _same(saved: Tensor) -> Tensor:
    return saved


def _trains(output: Any) -> bool:
    return isinstance(output, Tensor) and output.is_floating_point()


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
            table[name] = _widened(copied.detach()) if widens else copied
        with torch.autocast("cpu", enabled=casts[0]), torch.autocast("cuda", enabled=casts[1]):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for table, _, name, value in own:
            table[name] = value


def _widened(value: Any) -> Any:
    """Return a tensor of half precision in float32, and other values as they are."""
    halves = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if halves and (type(value) is Tensor or is_dtensor(value)) else value


def _probed(length: int) -> int:
    """Return the number of tokens of each chunk that are compared with whole samples, of a part's `length` tokens."""
    return min(_PROBED, length // 2)


def _main(args: Any) -> Tensor | None:
    """Return the tensor of shape (rows, tokens, ...) among arguments: the largest, as others may be tables without rows."""
    tensors = [x for x in _pytree.tree_leaves(args) if isinstance(x, Tensor) and x.dim() > 1]
    return max(tensors, key=Tensor.numel, default=None)


def _dims(leaf: object) -> list[int]:
    """Return the dimensions of a tensor that may be its tokens: 1, or the first of a table that all rows share."""
    if not isinstance(leaf, Tensor):
        return []
    first = next((d for d, size in enumerate(leaf.shape) if size != 1), 0)
    return [d for d in dict.fromkeys((1, first)) if d < leaf.dim()]


def _token_dim(leaf: Any, main: Tensor, exchange: PartExchange) -> int | None:
    """Return the dimension of a tensor that is the tokens; None for other values.

    Other dimensions than 1 have the length by chance, as rows do, unless the processes have different values.
    """
    dims = _dims(leaf)
    if leaf is not main and dims and (leaf.shape[0] not in (1, len(main)) or leaf.dim() == 2):
        dims = dims[::-1] if leaf.is_floating_point() or leaf.is_complex() else dims
    lengths = [dim for dim in dims if leaf.shape[dim] == main.shape[1]]
    return next(
        (d for d in lengths if d == 1 or bool((every := _gathered(leaf, exchange)).ne(every[0]).any())), None
    )


def _gathered(part: Tensor, exchange: PartExchange) -> Tensor:
    """Return a tensor of all parts along a new dimension 0."""
    own = local(part.detach())
    if own.is_complex():
        return torch.view_as_complex(exchange.start_gather(torch.view_as_real(own))())
    return exchange.start_gather(own)()


def _whole(few: Any, dim: int | None, part: SequencePart, exchange: PartExchange) -> Any:
    """Return the tokens of all parts, of a tensor with those of one; other values as they are."""
    return few if dim is None else _like(few, part.join(_gathered(few, exchange), dim))


def _like(model: Tensor, values: Tensor) -> Tensor:
    """Return values, as a DTensor if `model` is one, as the inputs of a sharded layer are."""
    if not is_dtensor(model):
        return values
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(values, model.device_mesh, model.placements, run_check=False)


def _few(leaf: Any, dim: int | None) -> Any:
    """Return the first tokens of each chunk of a tensor in float32; other values as they are.

    All rows have them, as a mask may leave some of them as they are.
    """
    if dim is None:
        return leaf
    own = local(leaf.detach())
    chunks = [chunk.narrow(dim, 0, _probed(own.shape[dim])) for chunk in own.chunk(2, dim)]
    return _widened(_like(leaf, torch.cat(chunks, dim).contiguous()))


def _few_keys(leaf: Any, keys: int, chunks: int) -> Any:
    """Return a mask of so many keys with those of the first tokens of each chunk; other values as they are."""
    if not isinstance(leaf, Tensor) or is_dtensor(leaf) or leaf.dim() < 2 or leaf.shape[-1] != keys:
        return leaf
    return torch.cat([chunk[..., :_PROBED] for chunk in leaf.chunk(chunks, -1)], -1)


def _differ(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point():
        return not torch.equal(one, other)
    odd = ~one.isfinite()  # attention of padding to nothing
    if not torch.equal(odd, ~other.isfinite()):
        return True
    one, other = one.masked_fill(odd, 0), other.masked_fill(odd, 0)
    bound = _NEAR[one.dtype.itemsize] * one.abs().max()
    return bool((one - other).abs().max() > bound)
