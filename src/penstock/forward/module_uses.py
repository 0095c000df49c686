"""Modules, weights and attributes of a model that statements of its forward use."""

from __future__ import annotations

import ast
import builtins
import enum
import functools
import inspect
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from penstock.base.errors import SplitError
from penstock.forward.forward_source import ForwardSource, read_source

CONTAINERS = nn.ModuleList | nn.Sequential | nn.ModuleDict
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, range)
_CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, enum.Enum)
_READING = {"get", "index", "count", "items", "keys", "values", "copy"}
Steps = tuple[str | tuple[int | str] | None, ...]
"""Way from a module to a value: an attribute's name, (key,) of an item, or None for the length."""
_HIDDEN = {"locals", "vars", "eval", "exec", "super", "globals"}


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One forward that runs: the model's, or a forward or a method within it which has blocks.

    Attributes:
        prefix: beginning of its variables' names among the variables of all frames; empty for the outermost one.
        shared: parameters that are a variable of the frame which calls it, with that variable's name among all frames.
        decided: values of attributes by which a test or a loop was decided, by (name of the module, steps to it from there);
            see `value_at`.
    """

    source: ForwardSource
    module: nn.Module
    path: str
    self_name: str
    names: frozenset[str]
    prefix: str = ""
    shared: dict[str, str] = field(default_factory=dict, compare=False)
    decided: dict[tuple[str, Steps], Any] = field(default_factory=dict, compare=False)

    def key(self, name: str) -> str:
        """Return the name of a variable among the variables of all frames."""
        return self.shared.get(name) or (f"{self.prefix}.{name}" if self.prefix else name)

    def is_builtin(self, name: str) -> bool:
        """Return whether a name means Python's own function."""
        code, scope = self.source.function, self.source.function.__globals__
        hidden = name in self.names or name in code.__code__.co_freevars or name in scope
        return not hidden and hasattr(builtins, name)


@dataclass
class Uses:
    """Modules, weights and attributes of a model that some statements use.

    Attributes:
        methods: methods and properties of a model's own, by (name of the module, name): what its class has under the name.
        objects: attributes among them that are objects with a state, by id, with the expression.
        members: names of modules whose attributes or methods they use, with the expression.
    """

    paths: set[str] = field(default_factory=set)
    attributes: set[tuple[str, str]] = field(default_factory=set)
    methods: dict[tuple[str, str], Any] = field(default_factory=dict)
    objects: dict[int, tuple[str, ast.AST]] = field(default_factory=dict)
    members: dict[str, ast.AST] = field(default_factory=dict)


class Link(NamedTuple):
    """Meaning of a chain of attributes that begins with the model.

    Attributes:
        kind: "module", "tensor" (a parameter or a buffer), "plain" (another attribute), "method", or "" for anything else.
        path: name in the model; for a method, the name of its module.
    """

    node: ast.expr
    kind: str
    value: Any = None
    path: str = ""
    owner: nn.Module | None = None


def analyse(frame: Frame, statements: list[ast.stmt]) -> tuple[list[ast.stmt], Uses]:
    """Return statements in the form in which a layer runs them, and their uses of the model.

    A layer has only the modules that it uses. So items of a container, as in ``self.blocks[3]``, become attributes, and the
    length of a container becomes a number.
    """
    uses = Uses()
    chains = _Chains(frame, uses, frame.source)
    return [chains.visit(statement) for statement in statements], uses


def resolve(frame: Frame, node: ast.expr) -> Link | None:
    """Return what an expression such as ``self.blocks`` means; None if it does not begin with the model."""
    uses = Uses()
    chains = _Chains(frame, uses, frame.source, names_only=True)
    link = chains.walk(node) if isinstance(node, ast.Attribute | ast.Subscript) else None
    if link is not None and link.kind == "plain" and isinstance(link.value, bool | int | float | str | None):
        frame.decided[frame.path, _steps(node)] = link.value
    return link


def resolve_module(frame: Frame, node: ast.expr) -> tuple[nn.Module, str] | None:
    """Return the module that an expression such as ``self.blocks`` means, and its name; None if it means anything else."""
    link = resolve(frame, node)
    return (
        (link.value, link.path)
        if link is not None and link.kind == "module" and link.value is not None
        else None
    )


def is_plain_container(module: object) -> bool:
    """Return whether a module is a container whose items are its modules, in their order."""
    base = next((b for b in (*get_args(CONTAINERS), nn.ParameterList) if isinstance(module, b)), None)
    members = "__iter__", "__len__", "__getitem__", "values", "items"
    return base is not None and all(getattr(type(module), n, None) is getattr(base, n, None) for n in members)


def calls_its_forward(module: nn.Module) -> bool:
    """Return whether a call of a module runs the forward of its class, apart from hooks."""
    return type(module).__call__ is nn.Module.__call__ and "forward" not in vars(module)


def _steps(node: ast.expr) -> Steps:
    match node:
        case ast.Attribute(value, name):
            return (*_steps(value), name)
        case ast.Subscript(value, key):
            constant = _constant(key)
            assert constant is not None
            return (*_steps(value), (constant,))
    return ()


def value_at(module: nn.Module, steps: Steps) -> Any:
    """Return the value that some steps from a module lead to now."""
    value: Any = module
    for step in steps:
        value = (
            getattr(value, step) if isinstance(step, str) else len(value) if step is None else value[step[0]]
        )
    return value


class _Chains(ast.NodeTransformer):
    """Resolves chains of attributes that begin with the model."""

    def __init__(
        self,
        frame: Frame,
        uses: Uses,
        source: ForwardSource,
        methods: frozenset[str] = frozenset(),
        names_only: bool = False,
    ) -> None:
        self.frame, self.uses, self.source, self.methods = frame, uses, source, methods
        self.names_only = names_only  # methods are found, and not read
        self.verbatim = bool(methods)  # a method of the model runs as it is written
        self.self_name = source.tree.args.args[0].arg

    def walk(self, node: ast.expr) -> Link | None:
        """Resolve a chain; None if it does not begin with the model."""
        if isinstance(node, ast.Name):
            found = node.id == self.self_name
            return Link(node, "module", self.frame.module, self.frame.path) if found else None
        if not isinstance(node, ast.Attribute | ast.Subscript):
            return None
        link = self.walk(node.value)
        if link is None:
            return None
        if isinstance(node, ast.Attribute):
            return self._attribute(node, link)
        return self._item(node, link)

    def _attribute(self, node: ast.Attribute, link: Link) -> Link:
        new = ast.copy_location(ast.Attribute(link.node, node.attr, node.ctx), node)
        if link.kind == "plain":
            missing = object()
            value = getattr(link.value, node.attr, missing)
            return Link(new, "" if value is missing else "plain", value, link.path)
        if link.kind != "module" or link.value is None:
            return Link(new, "")
        module, name = link.value, node.attr
        path = f"{link.path}.{name}" if link.path else name
        place = self._place(module, name, node)
        if place == "_modules":
            return Link(new, "module", module._modules[name], path)
        if place in ("_parameters", "_buffers"):
            self.uses.paths.add(path)
            return Link(new, "tensor", getattr(module, name), path)
        if module is self.frame.module:
            return self._own_attribute(new, name, module, link.path, place)
        if name in getattr(module, "__constants__", ()) and isinstance(
            getattr(module, name), int | float | str
        ):
            self.frame.decided[self.frame.path, _steps(node)] = getattr(module, name)
            return Link(ast.copy_location(ast.Constant(getattr(module, name)), node), "constant")
        self._use(link, node)
        self.uses.members[link.path] = node
        member = _class_member(type(module), name)
        if place == "class" and isinstance(member, types.FunctionType):
            return Link(new, "method", member, link.path, module)
        return Link(new, "")

    def _place(self, module: nn.Module, name: str, node: ast.AST) -> str:
        """Return where Python finds an attribute of a module: "class", "instance", or a dictionary of the module."""
        kind = type(module)
        member = _class_member(kind, name)
        places = [p for p in ("_parameters", "_buffers", "_modules") if name in vars(module)[p]]
        if member is not None or name in vars(module):
            if places:
                raise self._refuse(
                    node,
                    f"uses {name!r} of a {kind.__name__}, where an attribute hides the module or weight",
                    "give the attribute another name",
                )
            return "instance" if name in vars(module) and not hasattr(type(member), "__set__") else "class"
        own = kind.__getattr__ is not nn.Module.__getattr__ and not kind.__module__.startswith("torch.")
        if own and (not places or getattr(module, name, None) is not vars(module)[places[0]][name]):
            raise self._refuse(
                node,
                f"uses {name!r} of a {kind.__name__}, which a __getattr__ of its own gives",
                "write where it comes from, as self.NAME.ATTRIBUTE",
            )
        return places[0] if places else "class"

    def _own_attribute(
        self, node: ast.Attribute, name: str, module: nn.Module, path: str, place: str
    ) -> Link:
        # A layer's copy of the model has the model's own mode, so the statement may read it.
        if name == "training":
            return Link(node, "")
        owner = next((c for c in type(module).__mro__ if name in vars(c)), None)
        if place == "instance":
            if owner is nn.Module:
                raise self._refuse(node, f"replaces nn.Module's {name}", "name it otherwise")
            self.uses.attributes.add((path, name))
            return Link(node, "plain", vars(module)[name], f"{path}.{name}")
        if owner is None:
            raise self._refuse(node, f"uses self.{name}, which the model does not have", "set it in __init__")
        if owner is nn.Module or name == "forward":
            raise self._refuse(node, f"calls self.{name}, which needs the whole model", "do without it")
        member = vars(owner)[name]
        if isinstance(member, property | types.FunctionType):
            self.uses.methods[path, name] = member
        if isinstance(member, property):
            self._method(member.fget, f"{type(module).__name__}.{name}", is_property=True)
            return Link(node, "")
        if isinstance(member, types.FunctionType):
            self._method(member, f"{type(module).__name__}.{name}")
            return Link(node, "method", member, path, module)
        if hasattr(type(member), "__get__"):
            if isinstance(member, staticmethod | classmethod | types.BuiltinFunctionType):
                return Link(node, "")
            raise self._refuse(
                node, f"uses self.{name}, a {type(member).__name__}", "write a property or a method"
            )
        self.uses.attributes.add((path, name))
        return Link(node, "plain", member, f"{path}.{name}")

    def _method(self, function: Any, owner: str, is_property: bool = False) -> None:
        if owner in self.methods or self.names_only:
            return
        source = read_source(function, owner, is_property)
        require_unwritten_defaults(source)
        inner = _Chains(self.frame, self.uses, source, self.methods | {owner})
        for statement in source.tree.body:
            inner.visit(statement)

    def _item(self, node: ast.Subscript, link: Link) -> Link:
        key = _constant(node.slice)
        if link.kind == "module" and is_plain_container(link.value) and not self.verbatim:
            name = _child_name(link.value, key)
            if name is not None:
                inner = ast.copy_location(ast.Attribute(link.node, name, ast.Load()), node)
                return self._attribute(inner, link)
        if link.kind == "plain" and key is not None and isinstance(link.value, list | tuple | Mapping):
            new = ast.copy_location(ast.Subscript(link.node, node.slice, node.ctx), node)
            try:
                # A key of the wrong kind raises, as the index of the running forward would.
                return Link(new, "plain", link.value[key], link.path)  # type: ignore[index]
            except (LookupError, TypeError):
                return Link(new, "")
        self._use(link, node.value)
        return Link(ast.copy_location(ast.Subscript(link.node, self.visit(node.slice), node.ctx), node), "")

    def _use(self, link: Link, node: ast.AST) -> None:
        """Record the use of the value at the end of a chain."""
        if link.kind == "module":
            if link.value is self.frame.module:
                raise self._refuse(node, "hands on the model itself", "use its modules by name (self.NAME)")
            if link.value is not None:
                self.uses.paths.add(link.path)
        elif link.kind == "plain":
            self._plain(link.value, link.path.lstrip("."), node)

    def _plain(self, value: object, path: str, node: ast.AST) -> None:
        if not isinstance(value, list | tuple | dict | set) and (held := _held_module(value)) is not None:
            raise self._refuse(
                node,
                f"uses self.{path}, which holds a {type(held).__name__} that layers on other ranks would not train",
                "call modules by their names in the model, as self.NAME(x)",
            )
        if isinstance(value, (*_PLAIN, *_CODE)) or (
            isinstance(value, list | tuple | dict) and is_constant(value)
        ):
            return
        if isinstance(value, Tensor):
            raise self._refuse(
                node,
                f"uses the tensor self.{path}, which is neither a parameter nor a buffer",
                f'write self.register_buffer("{path}", ..., persistent=False) in __init__',
            )
        if isinstance(value, list | tuple | dict | set):
            raise self._refuse(
                node,
                f"uses self.{path}, a {type(value).__name__} that layers on other ranks could not share",
                "hold modules in an nn.ModuleList, and pass values on in variables of the forward",
            )
        self.uses.objects[id(value)] = (path, node)

    def _refuse(self, node: ast.AST, problem: str, fix: str) -> SplitError:
        return self.source.refusal(node, f"it {problem}", fix)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if not isinstance(node.ctx, ast.Load) and self._begins_with_model(node):
            raise self._refuse(
                node,
                f"sets {ast.unparse(node)}, which a layer on another rank would not see",
                "use a variable",
            )
        if isinstance(node.value, ast.Name) and node.attr == "random":
            self._require_no_random(node, self._global(node.value.id), "numpy")
        link = self.walk(node)
        if link is None:
            self.generic_visit(node)
            return node
        self._use(link, node)
        return link.node

    def _begins_with_model(self, node: ast.expr) -> bool:
        while isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        return isinstance(node, ast.Name) and node.id == self.self_name

    def _global(self, name: str) -> Any:
        """Return the value of a global or free variable; None for another name."""
        function = self.source.function
        free = function.__code__.co_freevars
        if name in free and function.__closure__ is not None:
            return function.__closure__[free.index(name)].cell_contents
        return None if name in self.source.local_names else function.__globals__.get(name)

    def _require_no_random(self, node: ast.AST, value: Any, library: str) -> None:
        if isinstance(value, types.ModuleType) and value.__name__ == library:
            raise self._refuse(
                node,
                f"draws from the generator of {library}, in an order that ranks do not share",
                "use torch.rand(())",
            )

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        link = self.walk(node) if isinstance(node.ctx, ast.Load) else None
        if link is None:
            self.generic_visit(node)
            return node
        self._use(link, node)
        return link.node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id == self.self_name:
            raise self._refuse(node, "hands on the model itself", "use its modules by name (self.NAME)")
        value = self._global(node.id)
        self._require_no_random(node, value, "random")
        if isinstance(value, list | dict | set) and not is_constant(value):
            raise self._refuse(
                node,
                f"uses {node.id}, a {type(value).__name__} outside of it that layers on other ranks could not share",
                "pass values on in variables of the forward",
            )
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if (
            isinstance(node.func, ast.Name)
            and node.func.id in _HIDDEN
            and self.frame.is_builtin(node.func.id)
        ):
            raise self._refuse(node, f"calls {node.func.id}()", "use variables by name")
        if (length := container_length(self.frame, node)) is not None and not self.verbatim:
            return ast.copy_location(ast.Constant(length), node)
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr") and node.args:
            owner = self.walk(node.args[0])
            if owner is not None and owner.kind == "module" and owner.value is not self.frame.module:
                self.uses.members[owner.path] = node  # as self.NAME.ATTRIBUTE does
        if isinstance(node.func, ast.Attribute):
            receiver = self.walk(node.func.value)
            if receiver is not None and receiver.kind == "plain" and node.func.attr not in _READING:
                if isinstance(receiver.value, list | dict | set):
                    raise self._refuse(
                        node,
                        f"changes {ast.unparse(node.func.value)}, an attribute of the model",
                        "use a variable",
                    )
                if not isinstance(receiver.value, (*_PLAIN, *_CODE)):
                    self._use(receiver, node)
        self.generic_visit(node)
        return node


def container_length(frame: Frame, node: ast.AST) -> int | None:
    """Return the value of ``len(self.blocks)``; None if a node is anything else."""
    match node:
        case ast.Call(ast.Name("len"), [argument], []) if frame.is_builtin("len"):
            known = resolve_module(frame, argument)
            if known is not None and is_plain_container(known[0]):
                length = len(known[0])  # type: ignore[arg-type]  # a container has one
                frame.decided[frame.path, (*_steps(argument), None)] = length
                return length
    return None


def _class_member(kind: type, name: str) -> Any:
    return next((vars(c)[name] for c in kind.__mro__ if name in vars(c)), None)


def _held_module(value: Any, depth: int = 4) -> nn.Module | nn.Parameter | None:
    """Return a weight, or a module with weights, that an object has in it: closures, bound methods, attributes."""
    if isinstance(value, nn.Parameter):
        return value
    if isinstance(value, nn.Module):
        return value if any(True for _ in (*value.parameters(), *value.buffers())) else None
    # Objects may refer to each other in circles, so the depth is bounded.
    if depth == 0 or isinstance(value, (*_PLAIN, type, types.ModuleType, Tensor)):
        return None
    parts: list[Any] = []
    if isinstance(value, types.FunctionType):
        parts = [c.cell_contents for c in value.__closure__ or () if _is_filled(c)]
        parts += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    elif isinstance(value, types.MethodType):
        parts = [value.__self__, value.__func__]
    elif isinstance(value, functools.partial):
        parts = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, list | tuple | set):
        parts = [*value]
    elif isinstance(value, dict):
        parts = [*value.values()]
    elif hasattr(value, "__dict__"):
        parts = [*vars(value).values()]
    return next((m for part in parts if (m := _held_module(part, depth - 1)) is not None), None)


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    # The variable of the outer function has no value yet.
    except ValueError:
        return False


def require_unwritten_defaults(source: ForwardSource) -> None:
    """Check that a method does not write into a default argument, which microbatches in flight would share.

    It may iterate over it, take items, compare it, test it, and give it to Python's own functions. All else may write.
    """
    parameters = inspect.signature(source.function).parameters.values()
    mutable = {p.name for p in parameters if p.default is not p.empty and not _never_changes(p.default)}
    if not mutable:
        return
    readers: set[int] = set()
    for node in ast.walk(source.tree):
        match node:
            case ast.Attribute(value, attr) if isinstance(node.ctx, ast.Load) and attr in _READING:
                readers.add(id(value))
            case ast.Subscript(value) if isinstance(node.ctx, ast.Load):
                readers.add(id(value))
            case ast.Compare(left, _, others):
                readers.update(map(id, (left, *others)))
            case ast.For(_, value) | ast.comprehension(_, value) | ast.UnaryOp(ast.Not(), value):
                readers.add(id(value))
            case ast.If(test) | ast.IfExp(test):
                readers.add(id(test))
            case ast.Call(ast.Name(name), arguments) if name in _READERS and name not in source.local_names:
                readers.update(map(id, arguments))
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Name) and node.id in mutable and id(node) not in readers:
            raise source.refusal(
                node,
                f"it writes into {node.id}, or hands it on: its default is one object for all microbatches, which are in "
                "flight together",
                f"write `{node.id}=None` and make a new one if it is None, or give a tuple if it never changes",
            )


_COUNTERS = {"len", "sum", "min", "max", "range", "any", "all", "isinstance"}
_READERS = _COUNTERS | {"list", "tuple", "dict", "set", "sorted", "enumerate", "zip", "reversed"}


def _never_changes(value: Any) -> bool:
    if isinstance(value, tuple | frozenset):
        return all(map(_never_changes, value))
    return isinstance(value, (*_PLAIN, *_CODE)) or callable(value)


def _constant(node: ast.expr) -> int | str | None:
    match node:
        case ast.Constant(int() | str() as value):
            return value
        case ast.UnaryOp(ast.USub(), ast.Constant(int() as value)):
            return -value
    return None


def _child_name(container: nn.Module, key: int | str | None) -> str | None:
    names = [*container._modules, *container._parameters]
    if isinstance(key, str):
        return key if key in names and isinstance(container, nn.ModuleDict) else None
    if key is None or isinstance(container, nn.ModuleDict) or not -len(names) <= key < len(names):
        return None
    return names[key]


def is_constant(value: Any) -> bool:
    """Return whether a container has something in it, and only values that never change."""
    if isinstance(value, set):
        value = list(value)
    items = [*value.keys(), *value.values()] if isinstance(value, dict) else [*value]
    return bool(items) and all(
        is_constant(i) if isinstance(i, list | tuple | dict) else isinstance(i, (*_PLAIN, *_CODE))
        for i in items
    )
