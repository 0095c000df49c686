"""The rules of the house: imports run one way, planning needs no torch, the public names are what is exported."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import torch

import penstock

SOURCE = Path(penstock.__file__).parent
ROOT = SOURCE.parents[1]
FLOORS = [
    {"base"},
    {"schedule", "stage", "parallel", "trace"},
    {"simulate", "forward"},
    {"plan"},
    {"profile", "show"},
    {"runtime"},
    {"verify", "huggingface", "measure"},
    {"checkpoint"},
    {"train"},
    {"doctor"},
    {"cli"},
    {"__main__"},
]
FLOOR = {room: n for n, rooms in enumerate(FLOORS) for room in rooms}
WITHOUT_TORCH = ["schedule", "trace", "simulate", "show", "plan"]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def rooms() -> list[tuple[str, Path]]:
    return [
        (path.relative_to(SOURCE).parts[0].removesuffix(".py"), path)
        for path in sorted(SOURCE.rglob("*.py"))
        if path.relative_to(SOURCE).parts[0] != "__init__.py"
    ]


def test_a_room_uses_only_the_floors_below_it():
    offenders = []
    for room, path in rooms():
        for name in imports(path):
            parts = name.split(".")
            if parts[0] != "penstock" or len(parts) == 1 or parts[1] in (room, "__version__"):
                continue
            if FLOOR[parts[1]] >= FLOOR[room]:
                offenders.append(f"{path.relative_to(SOURCE)} imports {name}")
    assert not offenders


def module_graph() -> dict[str, set[str]]:
    names = {}
    for path in SOURCE.rglob("*.py"):
        dotted = ".".join(("penstock", *path.relative_to(SOURCE).with_suffix("").parts))
        names[dotted.removesuffix(".__init__")] = path
    graph = {}
    for name, path in names.items():
        # Imports of penstock itself are of its lazy public names, which lead anywhere.
        graph[name] = {used for used in imports(path) if used in names and used not in (name, "penstock")}
    return graph


def test_no_imports_run_in_a_circle():
    """Imports within functions and under TYPE_CHECKING included."""
    graph, done = module_graph(), set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for used in graph[name]:
                visit(used, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_planning_imports_no_torch():
    modules = [
        ".".join(("penstock", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
        for room, path in rooms()
        if room in WITHOUT_TORCH
    ]
    lines = [
        "import sys",
        "import penstock",
        *(f"import {m}" for m in modules),
        "assert not {'torch', 'pydantic'} & set(sys.modules)",
    ]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, timeout=300)


def test_the_command_and_its_help_import_no_torch():
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom penstock.cli import COMMANDS, group\n"
        "for name in COMMANDS:\n"
        "    result = CliRunner().invoke(group, [name, '--help'])\n"
        "    assert result.exit_code == 0, (name, result.output)\n"
        "    assert 'xample' in result.output, name\n"
        "assert not {'torch', 'pydantic'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@cache
def private_names(path: Path) -> set[str]:
    """Names with a leading underscore that the classes of a module define."""
    tree = tree_of(path)
    names = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    names |= {
        n.target.id for n in ast.walk(tree) if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }
    names |= {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def test_no_class_reaches_into_another_module():
    paths = list(SOURCE.rglob("*.py"))
    ours = set().union(*map(private_names, paths))
    # nn.Module, tensors, hooks and named tuples have private names of their own.
    ours -= set(dir(torch.nn.Module())) | set(dir(torch.Tensor)) | {"_replace", "_backward_hooks"}
    for path in paths:
        foreign = ours - private_names(path)
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and node.attr in foreign:
                own = isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}
                used = ast.unparse(node)
                assert own or used.startswith("torch."), f"{path.relative_to(SOURCE)}: {used}"


def test_all_is_exactly_what_is_exported():
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None
    assert set(penstock.__all__) == set(penstock._HOME) | {"__version__"}
    typed = set()
    for node in ast.walk(ast.parse((SOURCE / "__init__.py").read_text())):
        if isinstance(node, ast.If):
            typed |= {
                n.asname for inner in node.body if isinstance(inner, ast.ImportFrom) for n in inner.names
            }
    assert typed == set(penstock._HOME)


def _wide_dataclasses() -> list[str]:
    """Return the dataclasses of more than six fields whose values may be given by position."""
    found = []
    for folder in ("src", "tests", "bench", "tools", "examples", "recipes"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(tree_of(path)):
                if not isinstance(node, ast.ClassDef):
                    continue
                decorators = [d for d in map(ast.unparse, node.decorator_list) if "dataclass" in d]
                fields = [
                    line
                    for line in node.body
                    if isinstance(line, ast.AnnAssign) and "ClassVar" not in ast.unparse(line.annotation)
                ]
                if decorators and len(fields) > 6 and "kw_only=True" not in decorators[0]:
                    found.append(f"{path.relative_to(ROOT)}: {node.name} has {len(fields)} fields")
    return found


def test_dataclasses_of_more_than_six_fields_take_keywords_only():
    assert not _wide_dataclasses()
