"""The public interface is the recorded one, `__all__` is right everywhere, and everything public is documented."""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import re
from functools import cache, cached_property
from pathlib import Path
from types import FunctionType

import pytest
from tools.interface import MODULES, interface, public_objects
from tools.public_api import Change, changes, last_release, may_break, recorded, report, write

import penstock

SOURCE = Path(penstock.__file__).parent
DOCS = Path(__file__).parents[2] / "docs"


def test_the_public_interface_is_as_recorded():
    now = interface()
    assert not (text := report(changes(recorded(), now), last_release())), text
    assert recorded() == now, "the record is written differently: run `make api`"


def test_all_names_exist_once_and_are_sorted():
    for name in MODULES:
        module = importlib.import_module(name)
        assert list(module.__all__) == sorted(set(module.__all__))
        for public in module.__all__:
            assert getattr(module, public) is not None


def test_pages_import_public_names_only():
    """Users copy what the pages import, so that it is public whatever they say."""
    for page in (*DOCS.glob("*.md"), DOCS.parent / "README.md"):
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock"):
                    names = {alias.name for alias in node.names}
                    assert node.module in MODULES, f"{page.name}: from {node.module} import ..."
                    assert names <= set(importlib.import_module(node.module).__all__), (page.name, names)
                elif isinstance(node, ast.Import):
                    names = {alias.name for alias in node.names if alias.name.startswith("penstock")}
                    assert names <= set(MODULES), (page.name, names)


@cache
def documented() -> dict[str, tuple[object, str]]:
    """Functions, classes and properties with their docstrings, or those of the methods that they replace."""
    things: dict[str, tuple[object, str]] = {}
    owners: dict[str, type] = {}
    for name, thing in public_objects():
        owner, _, last = name.rpartition(".")
        function = thing.__func__ if isinstance(thing, classmethod | staticmethod) else thing
        if inspect.isclass(function):
            owners[name] = function
        elif not isinstance(function, FunctionType | property | cached_property) or last.startswith("__"):
            continue
        inherited = [vars(base).get(last) for base in owners[owner].__mro__] if owner in owners else []
        texts = [inspect.getdoc(one) for one in (function, *inherited) if one is not None]
        things[name] = function, next((text for text in texts if text), "")
    return things


def test_everything_public_has_a_docstring():
    made = {name for name, (thing, text) in documented().items() if text.startswith(f"{name[9:]}(")}
    assert {name for name, (_, text) in documented().items() if not text} | made == set()


def test_docstrings_name_every_parameter():
    unnamed = []
    for name, (thing, text) in documented().items():
        if isinstance(thing, property | cached_property) or (
            inspect.isclass(thing) and issubclass(thing, enum.Enum)
        ):
            continue
        _, owner_text = documented().get(name.rpartition(".")[0], (None, ""))
        try:
            parameters = inspect.signature(thing).parameters
        except ValueError:  # a class without an __init__ of its own
            continue
        text += owner_text + (inspect.getdoc(thing.__init__) or "" if inspect.isclass(thing) else "")
        unnamed += [
            f"{name}: {parameter}"
            for parameter in parameters
            if parameter not in ("self", "cls") and not re.search(rf"\b{parameter}\b", text)
        ]
    assert not unnamed


CLASS = {"is": "class", "bases": ["PenstockError"], "parameters": [["x", "either", None]]}
OPTION = {"is": "option", "takes": "text", "choices": ["a"], "default": "", "required": False}
KEY = {"is": "config key", "default": "1", "allowed": "`a`, `b`"}


def function(*parameters: list[str | None]) -> dict[str, object]:
    return {"is": "function", "parameters": list(parameters)}


@pytest.mark.parametrize(
    ("old", "new", "what", "breaks"),
    [
        (CLASS, None, "was removed", True),
        (None, CLASS, "is new", False),
        (CLASS, {"is": "value"}, "was a class and is a value", True),
        (CLASS, CLASS | {"bases": []}, "is no longer a PenstockError", True),
        (CLASS, CLASS | {"bases": ["PenstockError", "ValueError"]}, "is now also a ValueError", False),
        (function(["x", "either", None]), function(), "has no parameter 'x' any more", True),
        (function(), function(["x", "keyword", None]), "has a new required parameter 'x'", True),
        (function(), function(["x", "keyword", "1"]), "has a new parameter 'x'", False),
        (function(), function(["x", "**", None]), "has a new parameter 'x'", False),
        (function(["x", "either", "1"]), function(["x", "keyword", "1"]), "takes parameter 'x' by keyword, was either",
         True),
        (function(["x", "either", "1"]), function(["x", "either", "2"]), "has default 2 for 'x', was 1", True),
        (function(["x", "either", "1"]), function(["x", "either", None]), "has no default for 'x', was 1", True),
        (function(["x", "either", None]), function(["x", "either", "1"]), "has default 1 for 'x', was required", False),
        (
            function(["x", "either", "1"], ["y", "either", "1"]),
            function(["y", "either", "1"], ["x", "either", "1"]),
            "takes its positional parameters in another order",
            True,
        ),
        (OPTION, OPTION | {"choices": ["a", "b"]}, "now takes 'b'", False),
        (OPTION, OPTION | {"choices": []}, "no longer takes 'a'", True),
        (OPTION, OPTION | {"required": True}, "is now required", True),
        (OPTION, OPTION | {"takes": "integer"}, "has takes 'integer', was 'text'", True),
        (KEY, KEY | {"default": "2"}, "has default '2', was '1'", True),
        (KEY, KEY | {"allowed": "`a`, `b`, `c`"}, "allows `a`, `b`, `c`, was `a`, `b`", False),
        (KEY, KEY | {"allowed": "`a`"}, "allows `a`, was `a`, `b`", True),
    ],
)  # fmt: skip
def test_a_change_is_named_and_judged(old, new, what, breaks):
    as_table = lambda entry: {} if entry is None else {"penstock.X": entry}  # noqa: E731
    assert changes(as_table(old), as_table(new)) == [Change("penstock.X", what, breaks)]


@pytest.mark.parametrize(
    ("here", "last", "allowed"),
    [
        ("0.1.0", None, True),
        ("0.1.1", "0.1.0", False),
        ("0.2.0", "0.1.5", True),
        ("1.0.0", "0.9.0", True),
        ("1.1.0", "1.0.0", False),
        ("2.0.0", "1.9.9", True),
    ],
)
def test_which_versions_may_break(here, last, allowed):
    assert may_break(here, last) is allowed


def test_a_removed_name_is_reported_with_what_to_do():
    removed = [Change("penstock.split", "was removed", True)]
    assert "penstock.split was removed" in report(removed, "1.2.0")
    assert "deprecate it first (docs/stability.md)" in report(removed, "1.2.0")
    assert "make api ACCEPT=penstock.split" in report(removed, "1.2.0")
    assert "nothing has been released" in report(removed, None)
    assert "make api" in report([Change("penstock.X", "is new", False)], "1.2.0")


def test_the_record_is_written_as_it_is_read(tmp_path, monkeypatch):
    before = recorded()
    monkeypatch.setattr("tools.public_api.RECORD", tmp_path / "record.json")
    write(before)
    assert recorded() == before
