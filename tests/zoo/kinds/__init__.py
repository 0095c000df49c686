"""The kinds of layers, by what they have in common; importing this fills `tests.zoo.kind.KINDS`."""

from __future__ import annotations

from tests.zoo.kinds import (
    attention,
    basic,
    buffers,
    checkpointed,
    convolution,
    dtypes,
    frozen,
    functions,
    hooks,
    inner,
    inplace,
    parametrized,
    recurrent,
    rows,
    sharing,
    skips,
    tables,
    uses,
    values,
)

__all__ = [
    "attention",
    "basic",
    "buffers",
    "checkpointed",
    "convolution",
    "dtypes",
    "frozen",
    "functions",
    "hooks",
    "inner",
    "inplace",
    "parametrized",
    "recurrent",
    "rows",
    "sharing",
    "skips",
    "tables",
    "uses",
    "values",
]
