"""A parser for pickles that imports nothing and calls nothing.

A pickle is a program: its author chooses what unpickling imports and calls. This parser follows the opcodes, as the
standard library's `pickletools` decodes them, on its own stack. An import becomes a `GlobalStub` and a call an
`ObjectStub`; the reader of the stubs decides what they mean.

``pickle.Unpickler`` with its own ``find_class`` cannot replace it: it still hashes the keys that the file chooses. A
key that is a tuple of the same tuple twice, and so on, keeps it busy forever, and one nested a million deep crashes the
process; both happen in C, where no signal handler can interrupt them.
"""

from __future__ import annotations

import pickletools
from typing import Any, NamedTuple

from penstock.errors import DataError


class GlobalStub(NamedTuple):
    """A function or class that unpickling would have imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class ObjectStub:
    """An object that unpickling would have made.

    Attributes:
        factory: the function or class called; None for a persistent id.
        args: arguments of the call.
        state: argument of ``__setstate__``; None if there is none.
        items: keys and values assigned to the object, as to a dictionary.
    """

    __slots__ = ("args", "factory", "items", "state")

    def __init__(self, factory: GlobalStub | None, args: tuple[Any, ...]) -> None:
        self.factory = factory
        self.args = args
        self.state: Any = None
        self.items: dict[Any, Any] = {}


def parse(data: bytes, where: object) -> Any:
    """Return the value of a pickle, with stubs in place of imports and calls.

    Args:
        data: bytes that begin with a pickle; anything behind it is ignored.
        where: origin of the bytes, for the error message.

    Raises:
        DataError: if the bytes are no pickle, or have opcodes that plain values and tensors do not need.
    """
    machine = _StackMachine()
    try:
        for opcode, argument, _ in pickletools.genops(data):
            machine.execute(opcode.name, argument)
        return machine.stack.pop()
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, MemoryError) as error:
        raise DataError(
            f"{where} is not a pickle of plain values: {type(error).__name__}: {error}"
        ) from error


_LITERALS = {
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "LONG", "BINFLOAT", "FLOAT", "BINUNICODE", "SHORT_BINUNICODE",
    "BINUNICODE8", "UNICODE", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
}  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_CONTAINERS: dict[str, type] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_SET": set}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _StackMachine:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}  # a dictionary: the file chooses the numbers, up to 2^32

    def execute(self, opcode: str, argument: Any) -> None:
        stack = self.stack
        if opcode in _LITERALS:
            stack.append(argument)
            return
        if opcode in _CONSTANTS:
            stack.append(_CONSTANTS[opcode])
            return
        if opcode in _CONTAINERS:
            stack.append(_CONTAINERS[opcode]())
            return
        if opcode in _TUPLES:
            stack.append(tuple(self._pop(_TUPLES[opcode])))
            return
        match opcode:
            case "PROTO" | "FRAME" | "STOP":
                pass
            case "MARK":
                self.marks.append(len(stack))
            case "POP":
                stack.pop()
            case "MEMOIZE":
                self.memo[len(self.memo)] = stack[-1]
            case "BINPUT" | "LONG_BINPUT" | "PUT":
                self.memo[int(argument)] = stack[-1]
            case "BINGET" | "LONG_BINGET" | "GET":
                stack.append(self.memo[int(argument)])
            case "TUPLE":
                stack.append(tuple(self._pop_to_mark()))
            case "APPEND":
                self._extend(self._pop(1))
            case "APPENDS":
                self._extend(self._pop_to_mark())
            case "ADDITEMS":
                self._add(self._pop_to_mark())
            case "SETITEM":
                self._set_items(self._pop(2))
            case "SETITEMS":
                self._set_items(self._pop_to_mark())
            case "GLOBAL":
                stack.append(GlobalStub(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                module, name = self._pop(2)
                if not (isinstance(module, str) and isinstance(name, str)):
                    raise TypeError("a global whose name is not a text")
                stack.append(GlobalStub(module, name))
            case "REDUCE" | "NEWOBJ":
                factory, args = self._pop(2)
                if not (isinstance(factory, GlobalStub) and isinstance(args, tuple)):
                    raise TypeError("a call of something that has no name")
                stack.append(ObjectStub(factory, args))
            case "BUILD":
                state = stack.pop()
                if not isinstance(stack[-1], ObjectStub):
                    raise TypeError(f"a state for a {type(stack[-1]).__name__}")
                stack[-1].state = state
            case "BINPERSID":
                stack.append(ObjectStub(None, (stack.pop(),)))
            case _:
                raise ValueError(f"opcode {opcode}")

    def _pop(self, count: int) -> list[Any]:
        if count > len(self.stack):
            raise IndexError("pop from an empty stack")
        values = self.stack[-count:]
        del self.stack[-count:]
        return values

    def _pop_to_mark(self) -> list[Any]:
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def _extend(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise TypeError(f"items for a {type(target).__name__}")
        target.extend(values)

    def _add(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not set:
            raise TypeError(f"items for a {type(target).__name__}")
        target.update(map(_require_key, values))

    def _set_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        table = target.items if isinstance(target, ObjectStub) else target
        if type(table) is not dict:
            raise TypeError(f"keys for a {type(target).__name__}")
        table.update(zip(map(_require_key, values[::2]), values[1::2], strict=True))


def _require_key(value: Any) -> Any:
    """Refuse tuples as keys: a few bytes can make one that takes forever to hash."""
    if not isinstance(value, str | int | float | bytes | None | ObjectStub):
        raise TypeError(f"a {type(value).__name__} as a key")
    return value
