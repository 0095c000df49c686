"""The layers of one stage as a module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from penstock.base.errors import PenstockError, SplitError
from penstock.stage.layers import Layer, inner_name, require_initialized, whole_name
from penstock.stage.named import Context, IsolatedCall, names_given, names_taken, within
from penstock.stage.rng.initial import build_seeded


class StageModule(nn.Module):
    """The layers of one stage, run one after the other as in ``nn.Sequential``.

    Attributes:
        takes: named values that each layer takes: name → whether it is required.
        compiled_layers: module that runs the layers as one compiled call; None if they are not compiled.
        before: functions to call before each layer, which wait for the layer's parameters; empty if there are none.
        after: function to call with each layer's number and what it returned; None for none.
        released: function that tells of a tensor whether it is in the memory of weights that may be gone while W runs; None
            if no weights go.
    """

    def __init__(self, layers: Sequence[Layer], device: torch.device | None = None, seed: int = 0) -> None:
        super().__init__()
        self.names = tuple(layer.name for layer in layers)
        self.layers = nn.ModuleList()
        for layer in layers:
            built = layer.module is not None
            module = layer.module if built else build_seeded(layer.build, seed, layer.name)
            if not isinstance(module, nn.Module):
                raise SplitError(
                    f"layer {layer.name!r}: its builder returned a {type(module).__name__}, not an nn.Module; a builder "
                    "needs no argument, and a function that is itself the layer needs one, the value"
                )
            require_initialized(layer.name, module)
            self.layers.append(module.to(device) if device is not None else module)
        self.takes = tuple(names_taken(layer) for layer in self.layers)
        self.compiled_layers: _CompiledLayers | None = None
        self.before: list[Callable[[], None]] = []
        self.after: Callable[[int, Any], None] | None = None
        self.released: Callable[[torch.Tensor], bool] | None = None
        self.gives_by_layer = tuple(names_given(layer) for layer in self.layers)
        self.gives = frozenset(name for names in self.gives_by_layer for name in names)

    def forward(self, value: Any, /, **named: Any) -> Any:
        """Run all layers, with the named values they take; auxiliary losses are ignored."""
        with within(Context(dict(named), {}, self.gives)) as context:
            return self.run(value, context, 0, len(self.layers))

    def run(self, value: Any, context: Context, start: int, stop: int) -> Any:
        """Run layers `start` to `stop` - 1; `context` must be this thread's current one."""
        named, isolated_call = context.named, context.isolated_call
        if self.compiled_layers is not None:
            for wait in self.before:
                wait()
            return _call(
                isolated_call, "all layers", self.compiled_layers, partial(self.compiled_layers, value, named)
            )
        rng_free = context.rng_free
        for n, layer in enumerate(self.layers):
            if not start <= n < stop:
                continue
            if self.before:
                self.before[n]()
            takes, name = self.takes[n], self.names[n]
            context.layer = name
            kwargs = {k: named[k] for k in takes if k in named} if takes and named else {}
            call = partial(layer, value, **kwargs)
            value = call() if name in rng_free else _call(isolated_call, name, layer, call)
            if self.after is not None:
                self.after(n, value)
        return value

    def compile_run(self) -> None:
        """Compile the layers as one with ``torch.compile``; from then on `run` runs all of them."""
        self.compiled_layers = _CompiledLayers(self.layers, self.takes)
        self.compiled_layers.compile()

    def named_layers(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield (name in the whole model, layer) pairs."""
        yield from zip(self.names, self.layers, strict=True)

    @cached_property
    def compiled(self) -> str | None:
        """Name of a compiled module in the stage; None if there is none."""
        for name, module in self.named_modules():
            if is_compiled(module):
                return str(name)
        return None

    @property
    def modes(self) -> tuple[bool, ...]:
        """Modes of all modules in the layers, in order."""
        return modes_of(self.layers)

    @property
    def trains_any(self) -> bool:
        """True if any parameter requires a gradient now."""
        return any(p.requires_grad for p in self.parameters())

    def whole_model_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name in the whole model, parameter) pairs."""
        for name, layer in self.named_layers():
            for inner, parameter in layer.named_parameters():
                yield whole_name(name, inner), parameter

    def whole_model_state(self) -> dict[str, Any]:
        """Return parameters and buffers by their names in the whole model."""
        state: dict[str, Any] = {}
        for name, layer in self.named_layers():
            state |= {whole: value for _, whole, value in layer_state(name, layer)}
        return state

    def has(self, name: str) -> bool:
        """Return whether a parameter of this stage has the name in the whole model, alone or among others."""
        return self._owner(name) is not None

    def find(self, name: str) -> tuple[nn.Module, str]:
        """Return the module that owns a parameter, by its name in the whole model, and the parameter's name in it."""
        owner = self._owner(name)
        if owner is None:
            raise PenstockError(f"no layer of this stage has a parameter {name!r}")
        return owner

    def _owner(self, name: str) -> tuple[nn.Module, str] | None:
        for prefix, layer in self.named_layers():
            inner = inner_name(prefix, name)
            if inner is not None and inner in dict(layer.named_parameters(remove_duplicate=False)):
                path, _, last = inner.rpartition(".")
                return layer.get_submodule(path), last
        return None


def modes_of(modules: Iterable[nn.Module]) -> tuple[bool, ...]:
    """Return the modes of modules and of all within them: True in training."""
    return tuple([module.training for top in modules for module in top.modules()])


def layer_state(name: str, layer: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Yield (name in the layer, name in the whole model, value) of a layer's parameters and buffers."""
    parameters = {inner for inner, _ in layer.named_parameters(remove_duplicate=False)}
    for inner, value in layer.state_dict().items():
        yield inner, whole_name(name, inner, inner in parameters), value


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``torch.compile`` runs a module, so that the modules within it are not called."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


class _CompiledLayers(nn.Module):
    """All layers of a stage as one call, for ``torch.compile``."""

    def __init__(self, layers: nn.ModuleList, takes: Sequence[dict[str, bool]]) -> None:
        super().__init__()
        self.layers = layers
        self.takes = takes

    def forward(self, value: Any, named: dict[str, Any]) -> Any:
        for layer, takes in zip(self.layers, self.takes, strict=True):
            value = layer(value, **{k: named[k] for k in takes if k in named})
        return value


def _call(isolated_call: IsolatedCall | None, name: str, layer: nn.Module, call: Callable[[], Any]) -> Any:
    return call() if isolated_call is None else isolated_call(name, layer, call)
