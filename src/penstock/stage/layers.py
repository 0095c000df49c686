"""A model as an ordered list of named layers, built only where they are needed.

Every model that a user passes (an ``nn.Sequential``, a list of modules, functions or builders, named or not) becomes a list
of `Layer`; the rest of Penstock sees only these. A parameter's name is the layer's name, a dot, and its name within the
layer, whatever the split. A function becomes a module without weights (`FunctionLayer`); `live_copy` makes a layer that
reads its mode and attributes from a module of the user.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial, wraps
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from penstock.base.errors import PenstockError, SplitError
from penstock.stage.converters import converter_of
from penstock.stage.values import flatten

Role = Literal["embedding", "block", "head"]


@dataclass(frozen=True)
class BatchNames:
    """Names under which a batch has what a model takes, if it is given as a mapping, and the model's loss of the target.

    Attributes:
        target: name of the target; None for the name of the loss function's second parameter.
        loss: loss function, and function from a microbatch's target to its weight; None if the model has none of its own.
    """

    first: str
    target: str | None
    others: frozenset[str]
    loss: tuple[Callable[[Any, Any], Any], Callable[[Any], Any]] | None = None


@dataclass(frozen=True)
class Layer:
    """One layer of a model.

    Attributes:
        name: unique prefix of its parameters' names. Dots are allowed, as in ``blocks.3``.
        build: function that makes the module; called once, and only in a process that holds the layer.
        role: role in an even split, which counts blocks; an embedding goes with the first block and a head with the
            last (default "block").
        tied: ties with parameters of earlier layers: parameter name within this layer → name in the whole model.
        module: result of `build`, if it exists already.
        batch: names of the arguments of the model whose first layer this is; None if a batch has no names.
    """

    name: str
    build: Callable[[], nn.Module]
    role: Role = "block"
    tied: Mapping[str, str] = field(default_factory=dict)
    module: nn.Module | None = None
    batch: BatchNames | None = None


JOINT = "+"
"""Joins the names of several modules to the name of the one layer which has them; see `whole_name`."""


def is_joint(layer: str) -> bool:
    """Return whether a layer has modules of several places of the model; their names in it are those in the model."""
    return JOINT in layer


def joint_name(paths: Sequence[str], number: int) -> str:
    """Return the name of a layer that has modules, parameters or buffers of several places of the model."""
    return (
        f"code:{number}{JOINT}"
        if not paths
        else JOINT.join(paths)
        if len(paths) > 1
        else f"{paths[0]}{JOINT}"
    )


def prefixes(layer: str) -> list[str]:
    """Return the beginnings of the names of a layer's parameters and buffers in the whole model."""
    return [layer, *(path for path in layer.split(JOINT) if path)] if is_joint(layer) else [layer]


def whole_name(layer: str, inner: str, parameter: bool = True) -> str:
    """Return the name in the whole model of a parameter or buffer of a layer.

    Args:
        parameter: whether it is a parameter: one that an earlier layer has, too, gets a second name (default True).
    """
    if is_joint(layer) and (not parameter or begins_in(inner, prefixes(layer)[1:])):
        return inner
    return f"{layer}.{inner}" if inner else layer


def named_modules_of(layer: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module of a layer that is one of the model, after its name in the whole model."""
    joint = is_joint(layer)
    for inner, each in module.named_modules():
        if inner or not joint:
            yield whole_name(layer, inner, parameter=not joint), each


def is_second_name(name: str) -> bool:
    """Return whether a name in the whole model means a parameter which an earlier layer has by its own name."""
    return JOINT in name


def inner_name(layer: str, name: str) -> str | None:
    """Return the name within a layer of a parameter, by its name in the whole model; None if the layer does not have it."""
    if name.startswith(f"{layer}."):
        return name[len(layer) + 1 :]
    return name if is_joint(layer) and begins_in(name, prefixes(layer)[1:]) else None


def begins_in(name: str, starts: Collection[str]) -> bool:
    """Return whether a name is one of some names, or of something within them."""
    return name in starts or any(name[:at] in starts for at, letter in enumerate(name) if letter == ".")


def as_layers(model: object) -> list[Layer]:
    """Return the layers of a user's model.

    Args:
        model: an ``nn.Sequential`` or ``nn.ModuleList``; or a list of modules, of functions of the value, of builders
            (callables that need no argument and return a module), of ``(name, one of these)`` pairs, or of `Layer`.
    """
    if isinstance(model, nn.Sequential | nn.ModuleList):
        _require_plain(model)
        # named_children would leave out a layer that appears twice.
        everything = model.named_modules(remove_duplicate=False)
        layers = [_layer(name, module) for name, module in everything if name and "." not in name]
    elif isinstance(model, Sequence) and not isinstance(model, str | bytes):
        layers = [_element(n, item) for n, item in enumerate(model)]
    else:
        raise SplitError(f"cannot cut a {type(model).__name__} into stages; {_instead(model)}")
    if not layers:
        raise SplitError("the model has no layers")
    names = [layer.name for layer in layers]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SplitError(f"layer names must be unique; given more than once: {', '.join(twice)}")
    return layers


class Container:
    """The module whose children are a model's layers; later changes in it do not reach the pipeline."""

    def __init__(self, model: object) -> None:
        self._model = model if isinstance(model, nn.Sequential | nn.ModuleList) else None
        self.record()

    def record(self) -> None:
        """Take the model's present layers as the pipeline's."""
        self._layers = self._children()

    def _children(self) -> list[tuple[str, int]]:
        return [] if self._model is None else [(n, id(m)) for n, m in self._model._modules.items()]

    def require_unchanged(self) -> None:
        """Check that no layer of the model was added, replaced or removed."""
        now = self._children()
        if now != self._layers:
            differs = next((n for n, _ in {*now} ^ {*self._layers}), "?")
            raise SplitError(
                f"layer {differs!r} of the model was added, replaced or removed after the pipeline was built; close it and "
                "build a new one"
            )


def _require_plain(model: nn.Module) -> None:
    """Check that a container only holds layers; anything else in it would be lost in the split."""
    base = nn.Sequential if isinstance(model, nn.Sequential) else nn.ModuleList
    extras = [
        *(["a forward"] if type(model).forward is not base.forward or "forward" in vars(model) else []),
        *(["a __call__"] if type(model).__call__ is not nn.Module.__call__ else []),
        *(["hooks"] if has_forward_hooks(model) else []),
        *(f"parameter {name}" for name, _ in model.named_parameters(recurse=False)),
        *(f"buffer {name}" for name, _ in model.named_buffers(recurse=False)),
    ]
    if extras:
        raise SplitError(
            f"the {type(model).__name__} that holds the layers also has {', '.join(extras)}, which would be lost when it "
            "is split; put that into a layer, or give list(model) to leave it out"
        )


_CALL_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether a call of a module runs hooks."""
    return any(hook is not require_weights for kind in _CALL_HOOKS for hook in vars(module)[kind].values())


def require_weights(model: nn.Module, inputs: object) -> None:
    """Refuse a call of a model some of whose weights other processes have; a hook before its forward."""
    if any(p.is_meta for p in model.parameters()):
        raise PenstockError(
            f"this process has only the weights of its own stages of the {type(model).__name__}: call pipe.step or "
            "pipe.evaluate, or get the model back with pipe.full_state_dict() and load_state_dict(state, assign=True)"
        )


def _instead(model: object) -> str:
    if (converter := converter_of(model)) is not None:
        return f"give a model of {converter.library} as Pipeline({converter.name}(model), ...)"
    if isinstance(model, nn.Module):
        return "a model with a forward of its own becomes layers by penstock.split(model)"
    return (
        "give an nn.Sequential or nn.ModuleList, or a list of layers, of functions that build them, or of (name, layer) "
        "pairs"
    )


def _element(position: int, item: object) -> Layer:
    if isinstance(item, Layer):
        return item
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
        return _layer(*item)
    return _layer(str(position), item)


def _layer(name: str, item: object) -> Layer:
    if is_joint(name):
        raise SplitError(f"layer name {name!r} must not contain {JOINT!r}; give the layer another name")
    if isinstance(item, nn.Module):
        require_initialized(name, item)
        return Layer(name, lambda: item, module=item)
    if inspect.isclass(item) and takes_a_value(item):
        raise SplitError(
            f"layer {name!r} is the class {item.__name__}, which needs arguments; give an instance, or a function without "
            "arguments that makes one"
        )
    if callable(item):
        return Layer(name, partial(FunctionLayer, name, item) if takes_a_value(item) else item)
    raise SplitError(
        f"layer {name!r} is a {type(item).__name__}; a layer is an nn.Module, a function of the value, or a function "
        "without arguments that builds a module"
    )


def require_initialized(name: str, module: nn.Module) -> None:
    """Check that all parameters and buffers of a layer have a shape."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    if lazy := [inner for inner, tensor in tensors if is_lazy(tensor)]:
        raise SplitError(
            f"layer {name!r} ({type(module).__name__}) has parameters without a shape yet: {', '.join(lazy)}; run one batch "
            "through the model before it is split, as in model(x[:1]), or use modules that are told their sizes"
        )


def require_values(named: Iterable[tuple[str, nn.Module]]) -> None:
    """Check that the parameters and buffers of modules have values, which on the meta device they have not."""
    for name, module in named:
        tensors = (*module.named_parameters(), *module.named_buffers())
        if on_meta := [inner for inner, tensor in tensors if tensor.is_meta]:
            first = whole_name(name, on_meta[0]) if name else on_meta[0]
            raise SplitError(
                f"{first} is on the meta device, where it has no values (so are {len(on_meta)} of {len(tensors)} tensors). "
                "If it was loaded within penstock.own_stages, give that the options of this pipeline. If an earlier "
                "Pipeline trained the model in several processes, call state = pipe.full_state_dict() on every rank, close "
                "it, and call model.load_state_dict(state, assign=True). Otherwise call "
                "model.to_empty(device='cpu') and load the weights"
            )


INTERNAL = frozenset(vars(nn.Module()))
"""Attributes that every module has."""


class _Source:
    """The other module; a deep copy of the one that reads it, for another thread, reads the same.

    `read_instead` gives the memo of a deep copy other modules to read.
    """

    __slots__ = ("module",)

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __deepcopy__(self, memo: dict[int, Any]) -> _Source:
        instead: dict[int, nn.Module] = memo.get(id(_Source), {})
        return _Source(instead[id(self.module)]) if id(self.module) in instead else self


def read_instead(memo: dict[int, Any], modules: Mapping[int, nn.Module]) -> None:
    """Let deep copies with a memo read other modules: `modules` has them by the id of the one that is read now."""
    memo[id(_Source)] = modules


class Live:
    """Mode of a module that is another module's."""

    @property
    def training(self) -> bool:
        """Mode of the other module, to read and to set."""
        return source_of(self).training

    @training.setter
    def training(self, mode: bool) -> None:
        source_of(self).training = mode


def follow(module: Live, other: nn.Module) -> None:
    """Give a module the mode of another one; called before the module's own ``__init__``."""
    module.__dict__["_source"] = _Source(other)


def live_copy(
    module: nn.Module,
    attributes: Iterable[str],
    bases: tuple[type, ...] = (),
    forward: Callable[..., Any] | None = None,
) -> Any:
    """Return an empty module of a module's class that reads its mode and some of its attributes."""
    every, names = (Live, *bases, type(module)), frozenset(attributes)
    kind = _shared_class(every, names) if forward is None else _new_class(every, names, {"forward": forward})
    copied = kind.__new__(kind)
    copied.__dict__["_source"] = _Source(module)
    return copied


def source_of(module: Any) -> nn.Module:
    """Return the module whose mode and attributes a module has: itself, unless `live_copy` made it."""
    source = module.__dict__.get("_source")
    return source.module if isinstance(source, _Source) else module


def plain_attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """Return (name, value) of a module's attributes that are not torch's; of those that it reads elsewhere, as well."""
    if (source := source_of(module)) is module:
        return [(name, value) for name, value in vars(module).items() if name not in INTERNAL]
    names = [name for name, value in vars(type(module)).items() if isinstance(value, property)]
    return [(name, getattr(source, name)) for name in names if hasattr(source, name)]


def _new_class(
    bases: tuple[type, ...], attributes: frozenset[str], members: dict[str, Any]
) -> type[nn.Module]:
    own = {"__module__": bases[1].__module__, "__doc__": bases[1].__doc__, **members}
    return type(bases[-1].__name__, bases, {name: _attribute(name) for name in attributes} | own)


@cache
def _shared_class(bases: tuple[type, ...], attributes: frozenset[str]) -> type[nn.Module]:
    """Return a class; blocks of one kind have one class, so that ``torch.compile`` compiles them once."""
    return _new_class(bases, attributes, {})


def _attribute(name: str) -> property:
    return property(
        lambda module: getattr(source_of(module), name),
        lambda module, value: setattr(source_of(module), name, value),
    )


def takes_a_value(function: Callable[..., Any]) -> bool:
    """Return whether a callable requires an argument: then it is a layer; otherwise it builds one.

    C functions without a signature, such as ``torch.relu``, are layers; a class never is.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return not inspect.isclass(function)
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(p.default is p.empty and p.kind in positional for p in parameters)


class FunctionLayer(nn.Module):
    """A layer that calls a function of the value; the function's other parameters take named values."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function
        self._checked = False

        @wraps(function)
        def forward(*args: Any, **named: Any) -> Any:
            if self._checked or torch.compiler.is_compiling():
                return function(*args, **named)
            with _NoWeights(name, (args, named)):
                result = function(*args, **named)
            self._checked = True
            return result

        self.forward = forward  # with the signature of the function, which lists the named values it takes

    def extra_repr(self) -> str:
        return getattr(self._function, "__name__", repr(self._function))


class _NoWeights(TorchFunctionMode):
    """Mode that raises for a use of a trained tensor that is not an input."""

    def __init__(self, name: str, inputs: object) -> None:
        super().__init__()
        self._name = name
        self._inputs = {id(leaf) for leaf in flatten(inputs)[0]}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for leaf in flatten((args, kwargs))[0]:
            if isinstance(leaf, nn.Parameter) or (
                isinstance(leaf, Tensor) and leaf.is_leaf and leaf.requires_grad
            ):
                if id(leaf) in self._inputs:
                    continue
                raise SplitError(
                    f"layer {self._name!r} is a function that uses a weight of shape {tuple(leaf.shape)}; a pipeline trains "
                    "the weights of modules only, so give the nn.Module itself, or write one that holds the weight"
                )
        return func(*args, **(kwargs or {}))
