"""Structures of values (pytree specs) as text, and back: classes travel as names, which are looked up, not imported.

Stages may send the same values between threads as between processes: tuples, lists, dicts and their kin in `collections`;
named tuples; and every class that is registered as a pytree node. A class must be reachable by its name in its module,
since another process looks it up by that name.
"""

from __future__ import annotations

import json
import sys
from collections import namedtuple
from enum import Enum
from typing import Any, NamedTuple

from torch.utils import _pytree

from penstock.base.errors import StageShapeError, TransportError

_LEAF = _pytree.tree_flatten(0)[1]
_PLAIN = (type(None), bool, int, float, str)
_portable: set[object] = {tuple, list}


class Shared(NamedTuple):
    """Structure of a message with leaves that share memory.

    Attributes:
        order: for each leaf of the value, the index of the message's leaf: one tensor at two places is sent once.
        groups: for each of the message's leaves, its group as `penstock.stage.memory_groups.groups_of` numbers them.
    """

    structure: Any
    order: tuple[int, ...]
    groups: tuple[int, ...]


def require_portable(structure: Any) -> None:
    """Check that another process can assemble values of a structure."""
    kind = structure.type
    if kind is dict:
        for key in structure.context:
            if type(key) not in _PLAIN:
                _encode(key)
    elif kind not in _portable:
        kinds = (kind, structure.context) if kind is namedtuple else kind
        if kinds not in _portable:
            _encode(kind)
            _encode(structure.context)
            # A context may differ from value to value; a named tuple's is its class.
            if kind is namedtuple:
                _portable.add(kinds)
    for child in _children(structure):
        if child.type is not None:
            require_portable(child)


def dumps(structure: Any) -> str:
    """Return a structure as JSON text."""
    if isinstance(structure, Shared):
        inner = [] if structure.structure is None else [_node(structure.structure)]
        return json.dumps({"structure": inner, "order": structure.order, "groups": structure.groups})
    return json.dumps(_node(structure))


def loads(text: str) -> Any:
    """Return the structure of a JSON text."""
    node = json.loads(text)
    if isinstance(node, dict):
        inner = node["structure"]
        order, groups = tuple(node["order"]), tuple(node["groups"])
        return Shared(_structure(inner[0]) if inner else None, order, groups)
    return _structure(node)


def _node(structure: Any) -> Any:
    if structure.type is None:
        return None
    return [
        _encode(structure.type),
        _encode(structure.context),
        [_node(child) for child in _children(structure)],
    ]


def _structure(node: Any) -> Any:
    if node is None:
        return _LEAF
    kind, context, children = _decode(node[0]), _decode(node[1]), node[2]
    known = kind in _pytree.SUPPORTED_NODES
    if not known or (kind is namedtuple and not _pytree.is_namedtuple_class(context)):
        raise TransportError(
            f"a value is made of {node[0]!r:.200}, which is not registered as a pytree node here; register it on every rank"
        )
    return _pytree.TreeSpec(kind, context, [_structure(child) for child in children])


def _children(structure: Any) -> list[Any]:
    # Older PyTorch has only the attribute, which newer versions deprecate.
    children: list[Any] = structure.children() if hasattr(structure, "children") else structure.children_specs
    return children


def _encode(value: Any) -> Any:
    """Encode a class, a key or a node's options: plain values unchanged, others as a list that begins with the kind."""
    if type(value) in _PLAIN:
        return value
    if type(value) in (list, tuple):
        return [type(value).__name__, *map(_encode, value)]
    if type(value) is dict:
        return ["dict", *([_encode(key), _encode(item)] for key, item in value.items())]
    if isinstance(value, Enum):
        return ["enum", _name_of(type(value)), value.name]
    if isinstance(value, type) or value is namedtuple:
        return ["class", _name_of(value)]
    raise StageShapeError(
        f"a value between stages has a {type(value).__name__} for a key or an option of a container: {value!r:.80}; keys "
        "are None, bool, int, float, str, members of an Enum, or tuples of these"
    )


def _decode(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, *rest = value
    match kind:
        case "list":
            return [_decode(item) for item in rest]
        case "tuple":
            return tuple(_decode(item) for item in rest)
        case "dict":
            return {_decode(key): _decode(item) for key, item in rest}
        case "enum":
            cls = _look_up(rest[0])
            if isinstance(cls, type) and issubclass(cls, Enum) and rest[1] in cls.__members__:
                return cls[rest[1]]
        case "class":
            cls = _look_up(rest[0])
            if isinstance(cls, type) or cls is namedtuple:
                return cls
    raise TransportError(
        f"a value has {value!r:.200} in it, which is not found here; the ranks run different code"
    )


def _name_of(kind: Any) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    module = sys.modules.get(kind.__module__)
    if module is None or _attribute(module, kind.__qualname__) is not kind:
        raise StageShapeError(
            f"a value between stages is made of {kind.__qualname__}, which another process could not find by that name in "
            f"the module {kind.__module__}; define the class at the top of a module, or hand over a tuple or a dict"
        )
    return name


def _look_up(name: str) -> Any:
    module, _, path = name.partition(":")
    if module not in sys.modules:
        raise TransportError(
            f"a value has the module {module!r:.80} in it, which is not loaded here; import it on every rank"
        )
    return _attribute(sys.modules[module], path)


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module
