"""The rules of the house: imports run one way, planning needs no torch, the public names are what is exported."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import penstock
from tests.support.plan_inputs import GPT2, write_inputs

SOURCE = Path(penstock.__file__).parent
ROOT = SOURCE.parents[1]
FLOORS = [
    {"base"},
    {"schedule", "stage", "trace", "recordings"},
    {"parallel", "simulate", "forward", "profile"},
    {"show"},
    {"runtime"},
    {"plan"},
    {"verify", "huggingface", "measure"},
    {"checkpoint"},
    {"train"},
    {"doctor"},
    {"cli"},
    {"__main__"},
]
RUNTIME = [
    {"clocks", "health", "routing"},
    {"batch", "options", "start", "transport"},
    {"failure_report", "op_compiler", "workers"},
    {"consensus", "validation"},
    {"executor", "gradient_scale", "weights"},
    {"gather_trace", "local_stages"},
    {"copies"},
    {"engine"},
    {"model"},
    {"first_step", "loop_report"},
    {"construction"},
    {"pipeline"},
    {"kept_traces", "optim"},
]
WITHOUT_TORCH = ["schedule", "trace", "simulate", "show", "plan"]


class Facts(NamedTuple):
    """What the rules ask of a file, found in one walk through its tree.

    Attributes:
        imports: names that it imports anywhere.
        private: names with a leading underscore that its classes and functions define.
        attributes: expressions such as ``value._name``.
        classes: definitions of its classes.
    """

    imports: set[str]
    private: set[str]
    attributes: list[ast.Attribute]
    classes: list[ast.ClassDef]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@cache
def facts(path: Path) -> Facts:
    found = Facts(set(), set(), [], [])
    defined = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            if is_private(node.attr):
                found.attributes.append(node)
                if (
                    isinstance(node.ctx, ast.Store)
                    and isinstance(node.value, ast.Name)
                    and node.value.id == "self"
                ):
                    defined.add(node.attr)
        elif isinstance(node, ast.Import):
            found.imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.imports.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
            if isinstance(node, ast.ClassDef):
                found.classes.append(node)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            defined.add(node.target.id)
    found.private.update(filter(is_private, defined))
    return found


def rooms() -> list[tuple[str, Path]]:
    return [
        (path.relative_to(SOURCE).parts[0].removesuffix(".py"), path)
        for path in sorted(SOURCE.rglob("*.py"))
        if path.relative_to(SOURCE).parts[0] != "__init__.py"
    ]


def arrows_up(package: str, floors: Sequence[set[str]]) -> set[str]:
    """Return imports, by file and room, of rooms that do not stand on a floor below the file's own."""
    root, floor = (
        SOURCE.parent.joinpath(*package.split(".")),
        {room: n for n, rooms in enumerate(floors) for room in rooms},
    )
    found = set()
    for path in root.rglob("*.py"):
        room = path.relative_to(root).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        for name in facts(path).imports:
            if name == package:  # its public names lead anywhere
                found.add(f"{path.relative_to(SOURCE)} imports {package}")
            elif name.startswith(f"{package}."):
                used = name.removeprefix(f"{package}.").partition(".")[0]
                if used != room and floor[used] >= floor[room]:
                    found.add(f"{path.relative_to(SOURCE)} imports {package}.{used}")
    return found


def test_a_room_uses_only_the_floors_below_it():
    assert not arrows_up("penstock", FLOORS)


def test_a_room_of_the_runtime_uses_only_the_floors_below_it():
    assert not arrows_up("penstock.runtime", RUNTIME)


def module_graph() -> dict[str, set[str]]:
    names = {}
    for path in SOURCE.rglob("*.py"):
        dotted = ".".join(("penstock", *path.relative_to(SOURCE).with_suffix("").parts))
        names[dotted.removesuffix(".__init__")] = path
    graph = {}
    for name, path in names.items():
        graph[name] = {used for used in facts(path).imports if used in names and used != name}
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


@pytest.mark.slow
def test_planning_the_command_and_its_help_import_no_torch(tmp_path: Path):
    write_inputs(tmp_path, gpt2=GPT2)
    modules = [
        ".".join(("penstock", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
        for room, path in rooms()
        if room in WITHOUT_TORCH
    ]
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom penstock.cli import COMMANDS, group\n"
        "for name in COMMANDS:\n"
        "    result = CliRunner().invoke(group, [name, '--help'])\n"
        "    assert result.exit_code == 0, (name, result.output)\n"
        "    assert 'xample' in result.output, name\n"
        "result = CliRunner().invoke(group, ['plan', 'gpt2', '-c', 'cluster.toml', '-s', '64', '--html', 'p.html'])\n"
        "assert result.exit_code == 0, result.output\n"
        f"import penstock, {', '.join(modules)}\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=300)


def test_no_class_reaches_into_another_module():
    paths = list(SOURCE.rglob("*.py"))
    ours = set().union(*(facts(path).private for path in paths))
    # nn.Module, tensors, hooks and named tuples have private names of their own.
    ours -= set(dir(torch.nn.Module())) | set(dir(torch.Tensor)) | {"_replace", "_backward_hooks"}
    for path in paths:
        foreign = ours - facts(path).private
        for node in facts(path).attributes:
            if node.attr in foreign:
                own = isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}
                used = ast.unparse(node)
                assert own or used.startswith("torch."), f"{path.relative_to(SOURCE)}: {used}"


def test_all_is_exactly_what_is_exported():
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None
    assert set(penstock.__all__) == set(penstock._HOME) | {"__version__"}
    typed = set()
    for node in ast.parse((SOURCE / "__init__.py").read_text()).body:
        if isinstance(node, ast.If):
            typed |= {n.asname for one in node.body if isinstance(one, ast.ImportFrom) for n in one.names}
    assert typed == set(penstock._HOME)


def test_dataclasses_of_more_than_six_fields_take_keywords_only():
    wide = []
    for folder in ("src", "tests", "bench", "tools", "examples", "recipes"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in facts(path).classes if "@dataclass" in path.read_text() else ():
                lines = [line.annotation for line in node.body if isinstance(line, ast.AnnAssign)]
                decorators = [d for d in map(ast.unparse, node.decorator_list) if "dataclass" in d]
                if not decorators or len(lines) <= 6 or "kw_only=True" in decorators[0]:
                    continue
                fields = [line for line in lines if "ClassVar" not in ast.unparse(line)]
                if len(fields) > 6:
                    wide.append(f"{path.relative_to(ROOT)}: {node.name} has {len(fields)} fields")
    assert not wide
