"""Comparison of a model's layers with the model itself on one microbatch, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from penstock.base.errors import SplitError
from penstock.forward.loss_piece import loss_in
from penstock.recordings.in_memory import Closeness, Run, Seen, first_difference, first_other, watched
from penstock.stage.layers import Layer, is_joint, named_modules_of, plain_attributes, read_instead
from penstock.stage.module import StageModule
from penstock.stage.named import Context, within
from penstock.stage.rng.random_state import cuda_generators, cuda_in_use
from penstock.stage.values import Message, flatten, leaves_of, pack, unpack

SEED = 0
_NO_STATE = (nn.Module, Tensor, type, ModuleType, FunctionType, MethodType)
M = TypeVar("M")


def check_sample(
    model: nn.Module,
    layers: Sequence[Layer],
    loss_fn: Callable[[Any, Any], Any] | None,
    sample: Sequence[Any],
    named: Mapping[str, Any],
    *,
    own_loss: bool = True,
    loss_reads: Collection[str] = (),
    stages: Sequence[int] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    autocast: torch.dtype | None = None,
) -> None:
    """Run a model and its layers on a sample, each stage on a copy of its own, and compare output, loss and gradients.

    The copies share the parameters' memory, except of those that are all zero, such as gates that are to open in training:
    behind them all gradients would be equal, and so they get random numbers. Results on a CPU are compared bit for bit,
    except gradients that are sums of another order; on a GPU, whose kernels may sum in any order, up to rounding.

    Args:
        own_loss: whether the model takes the target.
        loss_fn: loss that the model computes, of the last layer's output and the target; None to compare the output, and
            the gradients of random numbers at it. A loss function of the user's own is not called: it may count its calls.
        loss_reads: names of attributes that a loss function of the user's own reads in the model (default none).
        tensors: values of parameters and buffers by their names in the model (default: its own).
    """
    check = _Check(
        model,
        layers,
        loss_fn,
        sample,
        named,
        own_loss=own_loss,
        stages=stages,
        tensors=tensors,
        autocast=autocast,
    )
    other = first_other(check.model(loss_reads), check.layers(), check.close)
    if other is not None:
        place = first_difference(lambda seen: check.model(seen=seen), check.layers)
        raise SplitError(check.why(other) + place)


def without_values(model: nn.Module, layers: Sequence[Layer]) -> tuple[nn.Module, list[Layer]]:
    """Return copies of a model and of its layers on the meta device, for a check with values that are given to it."""
    memo: dict[int, Any] = {}
    copies = _Copies(model, {}, keeps_values=False)
    structure = copies.of(model, "", memo)
    read_instead(memo, {id(module): memo[id(module)] for module in model.modules()})
    return structure, [
        replace(layer, module=copies.of(layer.module, start, memo))
        for layer, start in zip(layers, _starts(layers), strict=True)
    ]


def _starts(layers: Sequence[Layer]) -> list[str]:
    """Return what stands before the names within each layer in the whole model."""
    return ["" if is_joint(layer.name) else f"{layer.name}." for layer in layers]


class _Check:
    """Runs of a model and of its layers on the same sample, each on copies; see `check_sample`."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        loss_fn: Callable[[Any, Any], Any] | None,
        sample: Sequence[Any],
        named: Mapping[str, Any],
        *,
        own_loss: bool,
        stages: Sequence[int] | None,
        tensors: Mapping[str, Tensor] | None,
        autocast: torch.dtype | None,
    ) -> None:
        self._model, self._layers, self._loss_fn = model, layers, loss_fn
        self._sample, self._named, self._own_loss = tuple(sample), dict(named), own_loss
        self._stages = stages or range(len(layers))
        self._copies = _Copies(model, tensors or {})
        leaves = (leaf for leaf in leaves_of(self._sample) if isinstance(leaf, Tensor))
        device = next((leaf.device for leaf in leaves), torch.device("cpu"))
        self.close = Closeness(device.type == "cpu", autocast)
        self._casting: AbstractContextManager[Any] = nullcontext()
        if autocast is not None:
            self._casting = torch.autocast(device.type, dtype=autocast)
        # A parameter that is tied has several names in the model; gradients are compared by the first.
        first: dict[int, str] = {}
        self._first_names = {
            name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)
        }

    def model(self, loss_reads: Collection[str] = (), seen: Seen | None = None) -> Run:
        """Run the model.

        Raises:
            SplitError: if the forward leaves values for other layers where these cannot see them.
        """
        memo: dict[int, Any] = {}
        reference = self._copies.of(self._model, "", memo)

        def run() -> Any:
            inputs, named_inputs = _cloned(self._sample), _cloned(self._named)
            with self._casting:
                result = reference(*(inputs if self._own_loss else inputs[:1]), **named_inputs)
                return result if self._loss_fn is None else loss_in(result)

        with (
            _same_draws(),
            _constant(self._model),
            watched(seen, {m: n for n, m in reference.named_modules()}),
        ):
            expected = run()
            _backward(expected)
        _require_unset(self._model, reference, loss_reads)
        _require_no_shared_state(self._layers, memo, run)
        return Run(_detached(expected), {name: _dense(p.grad) for name, p in reference.named_parameters()})

    def layers(self, seen: Seen | None = None) -> Run:
        """Run the layers; the gradient of a parameter is the sum of those of its copies."""
        # Layers read attributes in this one, so that what a forward changes in them is not changed in the model.
        twin = self._copies.of(self._model, "", {})
        instead = {id(m): t for m, t in zip(self._model.modules(), twin.modules(), strict=True)}
        starts = _starts(self._layers)
        memos: dict[int, dict[int, Any]] = {}
        for s in set(self._stages):
            read_instead(memos.setdefault(s, {}), instead)
        alone = [
            StageModule(
                [Layer(layer.name, layer.build, module=self._copies.of(layer.module, start, memos[s]))]
            )
            for layer, start, s in zip(self._layers, starts, self._stages, strict=True)
        ]
        names: dict[nn.Module, str] = {}
        for layer in alone:
            for name, module in named_modules_of(layer.names[0], layer.layers[0]):
                names.setdefault(module, name)
        with _same_draws(), _constant(self._model), watched(seen, names):
            inputs, named_inputs = _cloned(self._sample), _cloned(self._named)
            with self._casting:
                second = _Second(inputs[0], named_inputs, seen)
                result = _through(alone, inputs[0], named_inputs, self._stages, second)
                if self._loss_fn is not None:
                    result = self._loss_fn(result, *inputs[1:])
            _backward(result)
        # Of each parameter, the copies of the layers that use it, one for each stage.
        uses: dict[str, list[nn.Parameter]] = {}
        for layer, start in zip(alone, starts, strict=True):
            for inner, p in layer.layers[0].named_parameters():
                if p.grad is not None:
                    uses.setdefault(self._first_names[start + inner], []).append(p)
        # Each of several may be a sum itself, of uses within a layer, which the model adds up in the order of all.
        terms = {name: 2 * len(parts) - 1 for name, parts in uses.items()}
        return Run(_detached(result), {name: _sum_of(parts) for name, parts in uses.items()}, terms)

    def why(self, other: int | str) -> str:
        """Return why the layers are refused whose result, by number, or gradient, by name, is not the model's."""
        name = type(self._model).__name__
        if isinstance(other, str):
            return (
                f"the layers give {other} a different gradient from the model's on the same input, so it is not split: a "
                "value may reach a layer in a way other than through the forward's variables. Give the layers yourself, "
                "as docs/models.md shows under 'Layers by hand'"
            )
        return (
            f"the layers of {name} give a different result from {name} itself on the same input, so it is not split: its "
            "modules may leave values for each other in attributes, lists or global variables. Pass such values on as "
            "arguments, or give the layers yourself, as docs/models.md shows under 'Layers by hand'"
        )


class _Copies:
    """Copies of modules of a model.

    Args:
        tensors: values of parameters and buffers by their names in the model, in place of its own.
        keeps_values: whether other tensors have the model's values; they are on the meta device otherwise (default True).
    """

    def __init__(self, model: nn.Module, tensors: Mapping[str, Tensor], *, keeps_values: bool = True) -> None:
        self._tensors, self._keeps_values = tensors, keeps_values
        self._noise: dict[tuple[int, torch.Size], Tensor] = {}
        generator = torch.Generator().manual_seed(SEED)
        for name, p in model.named_parameters(remove_duplicate=False):
            value = tensors.get(name, p).detach()
            trains = p.requires_grad and p.is_floating_point()
            if trains and keeps_values and _place(value) not in self._noise and not value.any():
                # 0.02 is a usual scale of initial weights: activations stay small.
                noise = torch.empty(value.shape).normal_(0.0, 0.02, generator=generator)
                self._noise[_place(value)] = noise.to(value.device, value.dtype)

    def of(self, module: M, start: str, memo: dict[int, Any]) -> M:
        """Return a copy with gradients and buffers of its own."""
        if not isinstance(module, nn.Module):
            return module
        for name, p in module.named_parameters(remove_duplicate=False):
            value = self._value(start + name, p)
            value = self._noise.get(_place(value), value)
            memo.setdefault(id(p), nn.Parameter(value.detach(), requires_grad=p.requires_grad))
        for name, buffer in module.named_buffers(remove_duplicate=False):
            memo.setdefault(id(buffer), self._value(start + name, buffer).detach().clone())
        for inner in module.modules():
            # What hooks before a forward have computed (pruning, the older weight_norm); the copy's hooks do it again.
            for attribute in vars(inner).values():
                if isinstance(attribute, Tensor) and not attribute.is_leaf:
                    memo.setdefault(id(attribute), attribute.detach())
        return copy.deepcopy(module, memo)

    def _value(self, name: str, tensor: Tensor) -> Tensor:
        value = self._tensors.get(name, tensor)
        return value if self._keeps_values else value.detach().to("meta")


def _place(tensor: Tensor) -> tuple[int, torch.Size]:
    """Return what all objects of one weight have in common: tied parameters, and copies on several ranks."""
    return tensor.data_ptr(), tensor.shape


@contextmanager
def _same_draws() -> Iterator[None]:
    """Return a context in which torch draws from the same seed each time; its generators are as before afterwards."""
    devices = range(torch.cuda.device_count()) if cuda_in_use() else ()
    # A forward may call penstock.add_loss.
    with within(Context({}, {})), torch.random.fork_rng(devices), torch.enable_grad():
        for generator in (torch.default_generator, *cuda_generators()):
            generator.manual_seed(SEED)
        yield


@contextmanager
def _constant(model: nn.Module) -> Iterator[None]:
    """Return a context in which a model's own parameters require no gradients.

    A forward that was replaced from outside may compute with them even in a copy; their gradients are not the check's.
    """
    trained = [p for p in model.parameters() if p.requires_grad and p.is_leaf]
    for p in trained:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in trained:
            p.requires_grad_(True)


def _require_unset(model: nn.Module, reference: nn.Module, names: Collection[str]) -> None:
    """Check that a forward does not set attributes that the loss function reads."""
    for (path, module), copied in zip(model.named_modules(), reference.modules(), strict=True):
        for name in vars(copied).keys() & set(names):
            before, after = vars(module).get(name), vars(copied)[name]
            if isinstance(after, int | float | Tensor) and (
                before is None or _changed({name: before}, {name: after})
            ):
                raise SplitError(
                    f"the loss function reads {name!r}, which the forward of {path or type(model).__name__} sets: in a "
                    "pipeline it would be another microbatch's, or be on another rank. Return it from the model's "
                    "forward, or call penstock.add_loss(name, value) there for a term of the loss"
                )


def _require_no_shared_state(
    layers: Sequence[Layer], memo: Mapping[int, Any], run: Callable[[], Any]
) -> None:
    """Check that the forward changes no object that modules of several layers hold, such as a context that counts.

    Args:
        run: function that runs the forward with the copies again. What only the first run changes is a cache.
    """
    found: dict[int, tuple[str, Any, set[int]]] = {}
    for number, layer in enumerate(layers):
        for inner, module in () if layer.module is None else layer.module.named_modules():
            for name, value in plain_attributes(module):
                if hasattr(value, "__dict__") and not isinstance(value, _NO_STATE):
                    where = ".".join(part for part in (layer.name, inner, name) if part)
                    found.setdefault(id(value), (where, value, set()))[2].add(number)
    shared = {
        where: (value, memo[key])
        for key, (where, value, numbers) in found.items()
        if len(numbers) > 1 and key in memo and memo[key] is not value
    }
    changed = {w: name for w, (one, other) in shared.items() if (name := _changed(vars(one), vars(other)))}
    if not changed:
        return
    before = {where: dict(vars(shared[where][1])) for where in changed}
    with _same_draws(), torch.no_grad():
        run()
    for where in changed:
        if name := _changed(before[where], vars(shared[where][1])):
            raise SplitError(
                f"{where} is one {type(shared[where][0]).__name__} that several layers have, and the forward changes its "
                f"{name!r}; layers on other ranks would not see that. Pass the value on as an argument and a result, or "
                "call penstock.add_loss(name, value) for a term of the loss"
            )


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return the name of a number or tensor that has another value; empty if there is none."""
    for name, value in before.items():
        other = after.get(name)
        if isinstance(value, Tensor) and isinstance(other, Tensor) and value.shape == other.shape:
            if value.is_meta or torch.equal(value.detach(), other.detach()):
                continue
        elif not isinstance(value, int | float | Tensor) or (type(value) is type(other) and value == other):
            continue
        return name
    return ""


def _cloned(value: Any) -> Any:
    leaves, structure = flatten(value)
    return unpack(
        Message(
            tuple(x.detach().clone() if isinstance(x, Tensor) else x for x in leaves),
            structure,
            (False,) * len(leaves),
        )
    )


def _detached(value: Any) -> list[Any]:
    return [x.detach() if isinstance(x, Tensor) else x for x in flatten(value)[0]]


def _dense(gradient: Any) -> Any:
    return gradient.to_dense() if gradient is not None and gradient.layout is not torch.strided else gradient


class _Second:
    """Another microbatch, which each stage runs after the first one, as the ranks of a pipeline do.

    What layers of several stages exchange in another way than through their values, such as a global variable, then comes
    from this one, and shows in the result of the first.
    """

    def __init__(self, value: Any, named: Mapping[str, Any], seen: Seen | None) -> None:
        leaves, structure = flatten(value)
        flipped = tuple(_reversed(x) if isinstance(x, Tensor) else x for x in leaves)
        self._value = unpack(Message(flipped, structure, (False,) * len(leaves)))
        self._named, self._seen, self._context = named, seen, Context({}, {})
        self._generators = (torch.default_generator, *cuda_generators())
        self._states = [generator.get_state() for generator in self._generators]
        self._ended = False

    def run(self, layers: Sequence[StageModule]) -> None:
        """Run the layers of a stage. A forward that fails with this microbatch ends it: the values are made up."""
        if self._ended:
            return
        kept = [generator.get_state() for generator in self._generators]
        self._set(self._states)
        try:
            with (
                within(self._context),
                torch.no_grad(),
                nullcontext() if self._seen is None else self._seen.paused(),
            ):
                for layer in layers:
                    self._value = _called(layer, self._value, self._named)
        except Exception:  # of the user's code, which may refuse values that are made up
            self._ended = True
        self._states = [generator.get_state() for generator in self._generators]
        self._set(kept)

    def _set(self, states: Sequence[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


def _reversed(value: Tensor) -> Tensor:
    """Return a tensor with the rows in the opposite order, or, of one row, the values of the next dimension."""
    dim = next((d for d, size in enumerate(value.shape) if size > 1), None)
    return value.detach().clone() if dim is None else value.detach().flip(dim)


def _through(
    layers: Sequence[StageModule],
    value: Any,
    named: Mapping[str, Any],
    stages: Sequence[int],
    second: _Second,
) -> Any:
    for number, layer in enumerate(layers):
        value = _called(layer, value, named)
        if number + 1 < len(layers):
            pack(value)  # refuses what cannot travel
            if stages[number + 1] != stages[number]:
                second.run([each for each, s in zip(layers, stages, strict=True) if s == stages[number]])
    return value


def _called(layer: StageModule, value: Any, named: Mapping[str, Any]) -> Any:
    return layer(value, **{k: v for k, v in named.items() if k in layer.takes[0]})


def _backward(value: Any) -> None:
    """Run the backward of a loss, or of outputs with the same random gradients each time: gradients of ones may cancel."""
    leaves = [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
    generator = torch.Generator().manual_seed(SEED)
    if leaves:
        random = [torch.randn(leaf.shape, generator=generator).to(leaf) for leaf in leaves]
        torch.autograd.backward(
            leaves,
            [g if leaf.dim() else torch.ones_like(leaf) for g, leaf in zip(random, leaves, strict=True)],
        )


def _sum_of(uses: Sequence[nn.Parameter]) -> Any:
    parts = [_dense(p.grad) for p in {id(p): p for p in uses}.values()]
    return sum(parts[1:], parts[0])
