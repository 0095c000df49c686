"""A pickle's opcodes read as data: numbers, text and containers come out; nothing is imported, called or set.

A pickle is a program. Unpickling runs it, and whoever wrote it chooses what it calls. Here its opcodes (as the standard
library's `pickletools` takes them apart) are followed on a stack, and where they would call or import something they leave
a note of what it would have been: `Named` for an import, `Made` for a call. What reads the notes decides what they mean.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any, NamedTuple

from penstock.errors import DataError


class Named(NamedTuple):
    """What would have been imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Made:
    """What would have been called, and what its result would have been given.

    Attributes:
        what: the function or class; of a stored reference (a persistent id) None.
        args: of the call.
        state: what ``__setstate__`` would have got; None if nothing.
        items: keys and values put into it, as a dictionary's.
    """

    __slots__ = ("args", "items", "state", "what")

    def __init__(self, what: Named | None, args: tuple[Any, ...]) -> None:
        self.what = what
        self.args = args
        self.state: Any = None
        self.items: dict[Any, Any] = {}


def parse(data: bytes, where: object) -> Any:
    """Follow a pickle's opcodes up to its end.

    Args:
        data: the pickle, and anything after it.
        where: it is from, for the message.

    Raises:
        DataError: it is no pickle, or has opcodes that what is read here has no use for.
    """
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(data):
            machine.run(opcode.name, argument)
        return machine.pop()
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, MemoryError) as error:
        raise DataError(f"{where} is no pickle of plain values: {type(error).__name__}: {error}") from error


class _Machine:
    """A stack, marks on it, and what has been memorised."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, name: str, argument: Any) -> None:
        if name in _LITERALS:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name]())
        elif name in _ACTIONS:
            _ACTIONS[name](self, argument)
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise ValueError(f"opcode {name}")

    def pop(self) -> Any:
        return self.stack.pop()

    def since_mark(self) -> list[Any]:
        at = self.marks.pop()
        found = self.stack[at:]
        del self.stack[at:]
        return found

    def mark(self, _: Any) -> None:
        self.marks.append(len(self.stack))

    def memorise(self, number: Any) -> None:
        self.memo[len(self.memo) if number is None else number] = self.stack[-1]

    def recall(self, number: Any) -> None:
        self.stack.append(self.memo[int(number)])

    def take_tuple(self, count: int | None) -> None:
        found = self.since_mark() if count is None else [self.pop() for _ in range(count)][::-1]
        self.stack.append(tuple(found))

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise TypeError(f"items for a {type(target).__name__}")
        target.extend(items)

    def add(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not set:
            raise TypeError(f"items for a {type(target).__name__}")
        target.update(_keys(items))

    def put(self, items: list[Any]) -> None:
        target = self.stack[-1]
        table = target.items if isinstance(target, Made) else target
        if type(table) is not dict:
            raise TypeError(f"keys for a {type(target).__name__}")
        table.update(zip(_keys(items[::2]), items[1::2], strict=True))

    def import_(self, found: tuple[Any, Any]) -> None:
        module, name = found
        if not (isinstance(module, str) and isinstance(name, str)):
            raise TypeError("a name that is no text")
        self.stack.append(Named(module, name))

    def call(self, _: Any) -> None:
        args, what = self.pop(), self.pop()
        if not (isinstance(what, Named) and isinstance(args, tuple)):
            raise TypeError("a call of what has no name")
        self.stack.append(Made(what, args))

    def build(self, _: Any) -> None:
        state = self.pop()
        if not isinstance(self.stack[-1], Made):
            raise TypeError(f"a state for a {type(self.stack[-1]).__name__}")
        self.stack[-1].state = state

    def refer(self, _: Any) -> None:
        self.stack.append(Made(None, (self.pop(),)))


def _keys(items: list[Any]) -> list[Any]:
    """What may be looked up: no tuples, of which few bytes can make one that takes for ever to hash."""
    for item in items:
        if not isinstance(item, str | int | float | bytes | None | Made):
            raise TypeError(f"a {type(item).__name__} as a key")
    return items


_LITERALS = {
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "LONG", "BINFLOAT", "FLOAT", "BINUNICODE", "SHORT_BINUNICODE",
    "BINUNICODE8", "UNICODE", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
}  # fmt: skip
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": set,
}
_ACTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": _Machine.mark,
    "POP": lambda machine, _: (machine.pop(), None)[1],
    "MEMOIZE": _Machine.memorise,
    "BINPUT": _Machine.memorise,
    "LONG_BINPUT": _Machine.memorise,
    "PUT": _Machine.memorise,
    "BINGET": _Machine.recall,
    "LONG_BINGET": _Machine.recall,
    "GET": _Machine.recall,
    "TUPLE": lambda machine, _: machine.take_tuple(None),
    "TUPLE1": lambda machine, _: machine.take_tuple(1),
    "TUPLE2": lambda machine, _: machine.take_tuple(2),
    "TUPLE3": lambda machine, _: machine.take_tuple(3),
    "APPEND": lambda machine, _: machine.extend([machine.pop()]),
    "APPENDS": lambda machine, _: machine.extend(machine.since_mark()),
    "ADDITEMS": lambda machine, _: machine.add(machine.since_mark()),
    "SETITEM": lambda machine, _: machine.put([machine.pop(), machine.pop()][::-1]),
    "SETITEMS": lambda machine, _: machine.put(machine.since_mark()),
    "GLOBAL": lambda machine, words: machine.import_(tuple(words.split(" ", 1))),
    "STACK_GLOBAL": lambda machine, _: machine.import_((machine.pop(), machine.pop())[::-1]),
    "REDUCE": _Machine.call,
    "NEWOBJ": _Machine.call,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.refer,
}
