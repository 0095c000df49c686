"""The reference of the API lists every public name once."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, get_args, get_type_hints

import penstock
import penstock.plan
from tests.support.documentation import DOCS

REFERENCE = DOCS / "reference"
MODULE = re.compile(
    r"^\.\. currentmodule:: (\S+)$|^\.\. auto(?:class|exception|function|data):: (\w+)$", re.M
)
ENTRY = re.compile(r"^\.\. currentmodule:: (\S+)$|^\.\. auto(?:class|exception|function):: (\S+)$", re.M)


def listed() -> Counter[str]:
    """Full names of the entries of all pages of the reference that a module exports."""
    names: Counter[str] = Counter()
    for page in REFERENCE.glob("*.md"):
        module = ""
        for found, name in MODULE.findall(page.read_text()):
            module = found or module
            if name:
                names[f"{module}.{name}"] += 1
    return names


def test_every_public_name_is_listed_once_and_nothing_else():
    public = {f"{module.__name__}.{name}" for module in (penstock, penstock.plan) for name in module.__all__}
    assert listed() == Counter(public - {"penstock.__version__"})


def test_every_page_of_the_reference_is_in_its_index():
    index = (REFERENCE / "index.md").read_text()
    for page in REFERENCE.glob("*.md"):
        assert page.stem == "index" or f"]({page.name})" in index


def entries() -> dict[str, Any]:
    """Classes and functions with an entry, by the name that the entry has; without those that import transformers."""
    found: dict[str, Any] = {}
    for page in DOCS.rglob("*.md"):
        if page.name == "huggingface.md":
            continue
        module = ""
        for current, name in ENTRY.findall(page.read_text()):
            module = current or module
            if name:
                found[name] = named(name if "." in name else f"{module}.{name}")
    return found


def named(name: str) -> Any:
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        with suppress(ImportError):
            found: Any = __import__(".".join(parts[:count]), fromlist=["a name"])
            for part in parts[count:]:
                found = getattr(found, part)
            return found
    raise AssertionError(f"no module of {name} can be imported")


def classes_in(hint: object) -> Iterator[type]:
    if isinstance(hint, type):
        yield hint
    for part in get_args(hint):
        yield from classes_in(part)


def types_of(entry: Any) -> Iterator[type]:
    """Yield the classes in the types of a function, or of a class's public attributes and methods."""
    parts = [entry]
    if inspect.isclass(entry):
        parts += [entry.__init__, *(value for name, value in vars(entry).items() if name[0] != "_")]
    for part in parts:
        part = getattr(part, "fget", None) or getattr(part, "func", None) or getattr(part, "__func__", part)
        if callable(part):
            with suppress(NameError):  # one that is imported for type checkers alone
                for hint in get_type_hints(inspect.unwrap(part)).values():
                    yield from classes_in(hint)


def test_every_class_in_a_type_of_an_entry_has_an_entry():
    conf = ast.parse((DOCS / "conf.py").read_text())
    (internal,) = (
        ast.literal_eval(node.value)
        for node in conf.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "nitpick_ignore_regex"
    )
    found = entries()
    known = {id(entry) for entry in found.values()}
    missing = {
        f"{of.__module__}.{of.__qualname__} of {name}"
        for name, entry in found.items()
        for of in types_of(entry)
        if of.__module__.partition(".")[0] == "penstock" and id(of) not in known
    }
    for _, pattern in internal:
        missing = {text for text in missing if not re.search(rf"\b{pattern} of ", text)}
    assert not missing
