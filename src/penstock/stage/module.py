"""The layers of one stage as a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from penstock.errors import PenstockError, SplitError
from penstock.stage.layers import Layer, require_initialized
from penstock.stage.named import Context, Draw, enter, names_given, names_taken
from penstock.stage.rng.initial import build_seeded


class StageModule(nn.Module):
    """The layers of one stage, run one after the other, as ``nn.Sequential`` does.

    Attributes:
        names: the layers' names in the whole model.
        takes: for each layer the named values it takes: name → whether it must have it.
        gives_by_layer: for each layer the named values it gives.
        gives: those of all layers.
        together: the layers compiled as one, if they are.
        before: for each layer what is called before it runs, if anything is: it waits for the layer's parameters.
    """

    def __init__(self, layers: Sequence[Layer], device: torch.device | None = None, seed: int = 0) -> None:
        super().__init__()
        self.names = tuple(layer.name for layer in layers)
        self.layers = nn.ModuleList()
        for layer in layers:
            there = layer.module is not None
            module = layer.module if there else build_seeded(layer.build, seed, layer.name)
            if not isinstance(module, nn.Module):
                raise SplitError(
                    f"layer {layer.name!r}: its builder returned a {type(module).__name__}, not an nn.Module; a builder "
                    "needs no argument, and a function that is itself the layer needs one, the value"
                )
            require_initialized(layer.name, module)
            self.layers.append(module.to(device) if device is not None else module)
        self.takes = tuple(names_taken(layer) for layer in self.layers)
        self.together: _Together | None = None
        self.before: list[Callable[[], None]] = []
        self.gives_by_layer = tuple(names_given(layer) for layer in self.layers)
        self.gives = frozenset(name for names in self.gives_by_layer for name in names)

    def forward(self, value: Any, **named: Any) -> Any:
        """All layers, with the named values they take; auxiliary losses are not looked at."""
        context = Context(dict(named), {}, self.gives)
        before = enter(context)
        try:
            return self.run(value, context, 0, len(self.layers))
        finally:
            enter(before)

    def run(self, value: Any, context: Context, start: int, stop: int) -> Any:
        """Layers `start` to `stop` - 1, in a context that has been entered."""
        named, draw = context.named, context.draw
        if self.together is not None:
            for wait in self.before:
                wait()
            return _drawing(draw, "all layers", self.together, partial(self.together, value, named))
        quiet = context.quiet
        for n, layer in enumerate(self.layers):
            if not start <= n < stop:
                continue
            if self.before:
                self.before[n]()
            takes, name = self.takes[n], self.names[n]
            given = {k: named[k] for k in takes if k in named} if takes and named else {}
            call = partial(layer, value, **given)
            value = call() if name in quiet else _drawing(draw, name, layer, call)
        return value

    def compile_run(self) -> None:
        """Give the layers to ``torch.compile`` as one; from then on `run` runs all of them."""
        self.together = _Together(self.layers, self.takes)
        self.together.compile()

    def named_layers(self) -> Iterator[tuple[str, nn.Module]]:
        """(name in the whole model, layer)."""
        yield from zip(self.names, self.layers, strict=True)

    @cached_property
    def compiled(self) -> str | None:
        """The name of a module that ``torch.compile`` made; None if there is none."""
        for name, module in self.named_modules():
            if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
                return str(name)
        return None

    @property
    def trains_any(self) -> bool:
        """Whether any parameter requires a gradient now."""
        return any(p.requires_grad for p in self.parameters())

    def whole_model_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name in the whole model, parameter)."""
        for name, layer in self.named_layers():
            for inner, parameter in layer.named_parameters():
                yield f"{name}.{inner}" if inner else name, parameter

    def whole_model_state(self) -> dict[str, Any]:
        """Parameters and buffers by their names in the whole model."""
        state: dict[str, Any] = {}
        for name, layer in self.named_layers():
            state.update(layer.state_dict(prefix=f"{name}."))
        return state

    def has(self, name: str) -> bool:
        """Whether a parameter has this name in the whole model, as its only or as one of its names."""
        return self._owner(name) is not None

    def find(self, name: str) -> tuple[nn.Module, str]:
        """The module that owns the parameter of this name in the whole model, and the parameter's name there.

        Raises:
            PenstockError: no layer here has it.
        """
        owner = self._owner(name)
        if owner is None:
            raise PenstockError(f"no layer of this stage has a parameter {name!r}")
        return owner

    def _owner(self, name: str) -> tuple[nn.Module, str] | None:
        for prefix, layer in self.named_layers():
            inner = name.removeprefix(f"{prefix}.")
            if inner != name and inner in dict(layer.named_parameters(remove_duplicate=False)):
                path, _, last = inner.rpartition(".")
                return layer.get_submodule(path), last
        return None


class _Together(nn.Module):
    """A stage's layers as one call, for ``torch.compile``."""

    def __init__(self, layers: nn.ModuleList, takes: Sequence[dict[str, bool]]) -> None:
        super().__init__()
        self.layers = layers
        self.takes = takes

    def forward(self, value: Any, named: dict[str, Any]) -> Any:
        for layer, takes in zip(self.layers, self.takes, strict=True):
            value = layer(value, **{k: named[k] for k in takes if k in named})
        return value


def _drawing(draw: Draw | None, name: str, layer: nn.Module, call: Callable[[], Any]) -> Any:
    return call() if draw is None else draw(name, layer, call)


def kept_buffers(module: nn.Module) -> Callable[[], None]:
    """Return a function that puts a module's buffers back as they are now, so that its forward can run again."""
    buffers = [
        (owner, name, buffer, buffer.clone())
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False)
    ]

    def put_back() -> None:
        with torch.no_grad():
            for owner, name, buffer, value in buffers:
                setattr(owner, name, buffer)
                buffer.copy_(value)

    return put_back
