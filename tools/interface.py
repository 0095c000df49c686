"""The public interface of Penstock, as plain values: names, signatures, options, keys, exit codes, families, formats."""

from __future__ import annotations

import enum
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

import click

MODULES = ("penstock", "penstock.plan", "penstock.verify")
"""Public modules: their ``__all__`` is public, and no name of another module is."""

Entry = dict[str, Any]
_MACHINERY = ("abc", "typing")
_OPERATORS = ("__call__", "__contains__", "__enter__", "__exit__", "__getitem__", "__iter__", "__len__")
_KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "positional",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "either",
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
    inspect.Parameter.VAR_KEYWORD: "**",
}


def interface() -> dict[str, Entry]:
    """Return an entry for everything that is public, by its name."""
    entries: dict[str, Entry] = {}
    for name, thing in public_objects():
        entries[name] = _entry(name, thing)
    entries.update(_command_line())
    entries.update(_config())
    entries.update(_codes())
    return dict(sorted(entries.items()))


def public_objects() -> Iterator[tuple[str, object]]:
    """Yield every public object of `MODULES` with its name, each before its members."""
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in module.__all__:
            thing = getattr(module, name)
            yield f"{module_name}.{name}", thing
            if inspect.isclass(thing):
                yield from _members(f"{module_name}.{name}", thing)


def attributes(docstring: str | None) -> list[str]:
    """Return the names that a docstring lists below ``Attributes:``."""
    names: list[str] = []
    inside = False
    for line in inspect.cleandoc(docstring or "").splitlines():
        if line and not line.startswith(" "):
            inside = line == "Attributes:"
        elif inside and (match := re.match(r"    (\w+(?:, \w+)*):", line)):
            names += match[1].split(", ")
    return names


def _members(owner: str, kind: type) -> Iterator[tuple[str, object]]:
    members: dict[str, object] = {}
    for one in reversed(kind.__mro__):
        if _ours(one):
            members |= dict.fromkeys(inspect.get_annotations(one), None)
            members |= dict.fromkeys(attributes(one.__doc__), None)
            members |= vars(one)
    for name, member in members.items():
        if name in _OPERATORS or not name.startswith("_"):
            yield f"{owner}.{name}", member


def _entry(name: str, thing: object) -> Entry:
    if inspect.isclass(thing):
        bases = [
            one.__name__
            for one in thing.__mro__[1:]
            if one.__module__ not in _MACHINERY and one is not object
        ]
        entry: Entry = {"is": "class", "bases": bases}
        # How other classes make instances differs between versions of Python.
        if any({"__init__", "__new__"} & vars(one).keys() for one in thing.__mro__ if _ours(one)):
            entry["parameters"] = [] if issubclass(thing, enum.Enum) else _parameters(thing)
        return entry
    if isinstance(thing, enum.Enum):
        return {"is": "member", "value": repr(thing.value)}
    if isinstance(thing, classmethod | staticmethod):
        return {"is": "function", "parameters": _parameters(thing.__func__)}
    if isinstance(thing, FunctionType):
        return {"is": "function", "parameters": _parameters(thing)}
    return {"is": "value"}


def _ours(kind: type) -> bool:
    return kind.__module__.startswith("penstock")


def _parameters(thing: Any) -> list[list[str | None]]:
    return [
        [p.name, _KINDS[p.kind], None if p.default is p.empty else _stable(p.default)]
        for p in inspect.signature(thing).parameters.values()
        if p.name not in ("self", "cls")
    ]


def _stable(value: object) -> str:
    """Return a default as text that is the same in every process and version of Python."""
    if inspect.isclass(value) or inspect.isroutine(value):
        return value.__name__
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _command_line() -> dict[str, Entry]:
    from penstock.cli import COMMANDS, group

    entries: dict[str, Entry] = {}

    def add(path: str, command: click.Command) -> None:
        entries[path] = {"is": "command"}
        for parameter in command.params:
            if getattr(parameter, "hidden", False):
                continue
            option = isinstance(parameter, click.Option)
            spelled = [*parameter.opts, *parameter.secondary_opts] if option else [parameter.name or ""]
            default = parameter.default
            for spelling in spelled:
                entries[f"{path} {spelling}"] = {
                    "is": "option" if option else "argument",
                    "takes": "nothing" if getattr(parameter, "is_flag", False) else parameter.type.name,
                    "choices": list(getattr(parameter.type, "choices", ())),
                    "default": str(default)
                    if default is not False and isinstance(default, str | int | float)
                    else "",
                    "required": parameter.required,
                }
        if isinstance(command, click.Group):
            for name in command.list_commands(click.Context(command)):
                inner = command.get_command(click.Context(command), name)
                assert inner is not None
                add(f"{path} {name}", inner)

    assert set(COMMANDS) == set(group.list_commands(click.Context(group)))
    add("penstock", group)
    return entries


def _config() -> dict[str, Entry]:
    from penstock.train.config.help.config_keys import config_keys

    return {
        f"config {section}.{key.key}": {"is": "config key", "default": key.default, "allowed": key.allowed}
        for section, (_, keys) in config_keys().items()
        for key in keys
    }


def _codes() -> dict[str, Entry]:
    from penstock.checkpoint.format.manifest import VERSION
    from penstock.launch.exit_codes import ExitCode
    from penstock.profile.model_profile import FORMAT as PROFILE
    from penstock.schedule.families import FAMILIES
    from penstock.trace.events import FORMAT as TRACE

    formats: Mapping[str, int] = {"checkpoint": VERSION, "profile": PROFILE, "trace": TRACE}
    return (
        {f"exit code {code.value}": {"is": "exit code", "value": code.name} for code in ExitCode}
        | {f"format {name}": {"is": "format", "value": str(number)} for name, number in formats.items()}
        | {f"schedule {name}": {"is": "family"} for name in FAMILIES}
    )
