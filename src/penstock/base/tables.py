"""Tables from files, checked by pydantic against the dataclasses that they become."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from pydantic import ConfigDict, Field, ValidationError

# Strict: without it pydantic would take "128" for 128 and 1 for true.
Count = Annotated[int, Field(strict=True, ge=1, lt=2**31)]
NotNegative = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Flag = Annotated[bool, Field(strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class Table:
    """Base of a dataclass whose tables may have no other keys."""

    __pydantic_config__ = ConfigDict(extra="forbid")


def explain(
    error: ValidationError, hint: Callable[[str], str] = lambda name: "", depth: int | None = None
) -> str:
    """Return one of pydantic's errors as a line: an unknown key, which may be the one that is missing, or the first.

    Args:
        hint: function of an unknown key's name that returns what to say about it.
        depth: number of keys that name a value; by default all up to the value itself.
    """
    found = error.errors(include_url=False)
    first = next((one for one in found if one["type"] == "unexpected_keyword_argument"), found[0])
    name = ".".join(str(key) for key in first["loc"][:depth] if key != "[key]")
    if first["type"] == "unexpected_keyword_argument":
        return f"no key {name}{hint(name)}"
    if first["type"] == "missing":
        return f"{name} is missing"
    if first["type"] in ("dataclass_type", "dict_type"):
        allowed = "be a table"
    else:
        allowed = first["msg"].partition(" should ")[2] or first["msg"].removeprefix("Value error, ")
    try:
        value = repr(first["input"])
    except ValueError:
        value = "a number of too many digits"
    return f"{name} must {allowed}, got {value:.200}"
