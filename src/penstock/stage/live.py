"""Modules with another module's mode and plain attributes: they read them there, and keep no copy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from torch import nn

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
