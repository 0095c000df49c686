"""Private names of other libraries stand in one place, with what each is used for."""

from __future__ import annotations

import ast
import re
from pathlib import Path

SOURCE = Path("src/penstock")
OF_PYTHON = {"_asdict", "_exit", "_getframe", "_replace"}
"""Public, in spite of the underscore: those of named tuples, os and sys."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(tree: ast.AST) -> set[str]:
    """Return the names that a file gives to classes, functions, variables and attributes."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            of_self = isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls")
            found.update([node.attr] if of_self else [node.id] if isinstance(node, ast.Name) else [])
    return found


def private_names(tree: ast.AST, own: set[str]) -> set[str]:
    """Return private modules and names that a file imports from torch, and private attributes that are not our own."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            for alias in node.names:
                parts = f"{node.module}.{alias.name}".split(".")
                if any(map(is_private, parts)):
                    found.add(".".join(parts))
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            name = node.args[1]
            found.update([name.value] if isinstance(name, ast.Constant) else [])
    return {name for name in found if "." in name or (is_private(name) and name not in own | OF_PYTHON)}


def test_private_names_of_other_libraries_are_listed_with_their_use():
    trees = [ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")]
    own = set().union(*map(own_names, trees))
    used = set().union(*(private_names(tree, own) for tree in trees))
    rows = re.findall(r"^\| (`.*?`) \|", (SOURCE / "PRIVATE_NAMES.md").read_text(), re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`([\w.]+)`", row)}
    # A module's row is that of all its names, but for those with a row of their own.
    modules = {name for name in listed if "." in name}
    within = {name for name in used if name not in listed and any(name.startswith(f"{m}.") for m in modules)}
    assert used - within - listed == set()
    assert listed - used - {m for m in modules if any(name.startswith(f"{m}.") for name in within)} == set()
