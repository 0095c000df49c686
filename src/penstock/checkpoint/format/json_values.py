"""Encoding as JSON of the values in states of optimizers and schedules.

JSON has no tuples, no NaN and only text as keys, so these are written as objects with one key that begins with ``$``. A
tensor becomes ``{"$tensor": NAME}`` and is stored in a file. Decoding gives only plain values, whatever the JSON.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor

from penstock.base.errors import ConfigError, DataError

_NONFINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def encode(value: Any, name: str, put: Callable[[str, Tensor], None]) -> Any:
    """Encode a value for JSON; each tensor within it goes to `put`, with a name made of `name` and its place."""
    if isinstance(value, Tensor):
        put(name, value)
        return {"$tensor": name}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(float(value))}
    # Before the numbers: a bool is an int, and would become one.
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        # Of subclasses, as NumPy's float64 is, the plain number.
        return float(value) if isinstance(value, float) else int(value)
    if isinstance(value, tuple | list):
        items = [encode(item, f"{name}/{n}", put) for n, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, dict):
        pairs = [
            [encode(key, f"{name}/key", put), encode(item, f"{name}/{key}", put)]
            for key, item in value.items()
        ]
        if isinstance(value, Counter):
            return {"$counter": pairs}
        if any(not isinstance(key, str) or key.startswith("$") for key in value):
            return {"$dict": pairs}
        return dict(pairs)
    raise ConfigError(
        f"{name} is a {type(value).__name__}, which a checkpoint cannot keep; it keeps numbers, text, None, lists, "
        "tuples, dictionaries and tensors, so that loading cannot run code"
    )


def decode(value: Any, read: Callable[[str], Tensor]) -> Any:
    """Decode a value that `encode` made."""
    if isinstance(value, list):
        return [decode(item, read) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    if not kind.startswith("$"):
        return {key: decode(item, read) for key, item in value.items()}
    inner = value[kind]
    if kind == "$tensor" and isinstance(inner, str):
        return read(inner)
    if kind == "$float" and isinstance(inner, str) and inner in _NONFINITE:
        return _NONFINITE[inner]
    if kind == "$tuple" and isinstance(inner, list):
        return tuple(decode(item, read) for item in inner)
    if kind in ("$dict", "$counter") and isinstance(inner, list):
        return _pairs(kind, inner, read)
    raise DataError(f"{value!r:.80} is not a value of a checkpoint")


def _pairs(kind: str, pairs: list[Any], read: Callable[[str], Tensor]) -> dict[Any, Any]:
    table: dict[Any, Any] = Counter() if kind == "$counter" else {}
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise DataError(f"{pair!r:.80} is not a key with its value")
        key = decode(pair[0], read)
        if not isinstance(key, str | int | float | bool | None):
            raise DataError(f"{key!r:.80} is not a key of a checkpoint's dictionary")
        table[key] = decode(pair[1], read)
    return table
