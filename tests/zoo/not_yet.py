"""What is known to fail and is left out until it is mended; this list is to become empty."""

from __future__ import annotations

from collections.abc import Callable

from tests.zoo.case import Case, draw
from tests.zoo.kind import KINDS

NOT_YET: dict[str, str] = {
    "func_jacobian": "torch.func.jvp in a layer: the first step's measuring asks for the storage of a tensor that has none",
}
"""Kinds, with the reason."""

OTHER_DTYPES = frozenset(name for name, kind in KINDS.items() if kind.group == "dtypes")
STRIDES = frozenset(["transposed", "strided"])

TOGETHER: list[tuple[str, Callable[[Case], bool]]] = [
    ("clipping of other dtypes than float32", lambda c: c.clip > 0 and bool(OTHER_DTYPES & {*c.kinds})),
    ("clipping in float64", lambda c: c.clip > 0 and c.habit == "double"),
    ("strides between processes", lambda c: c.transport == "processes" and bool(STRIDES & {*c.kinds})),
    (
        "the layout of a gradient where the model is cut or recomputed",
        lambda c: (c.stages > 1 or c.recompute != "none") and "fourier" in c.kinds,
    ),
    (
        "bfloat16: the audit computes nn.Bilinear in float32",
        lambda c: c.autocast and "bilinear_layer" in c.kinds,
    ),
    (
        "a hook on a layer's input under recompute runs twice",
        lambda c: c.recompute != "none" and "tensor_hook" in c.kinds,
    ),
    (
        "a tied weight in the state that is loaded, in processes",
        lambda c: c.transport == "processes" and c.habit == "reload" and any(k.bounded for k in c.entries),
    ),
    (
        "a tied weight when the model is turned to float64",
        lambda c: c.habit == "double" and any(k.bounded for k in c.entries),
    ),
    (
        "a module at three places, on more than two ranks: deadlock at the step's end",
        lambda c: c.ranks > 2 and "module_at_three_places" in c.kinds,
    ),
    (
        "a forward that writes into its weights under dp or two copies: the copies differ",
        lambda c: c.copies and any(k.writes for k in c.entries),
    ),
]
"""What fails in company, with the reason."""


def known(case: Case) -> str:
    """Why a case is left out; empty if it is not."""
    for name in case.kinds:
        if name in NOT_YET:
            return NOT_YET[name]
    return next((why for why, together in TOGETHER if together(case)), "")


def ready() -> tuple[str, ...]:
    """The kinds that cases are drawn from."""
    return tuple(name for name in KINDS if name not in NOT_YET)


def drawn(first: int, count: int, transport: str) -> list[Case]:
    """So many cases, of the seeds from `first` on that are not left out."""
    found: list[Case] = []
    seed = first
    while len(found) < count:
        case = draw(seed, ready(), transport)
        if not known(case):
            found.append(case)
        seed += 1
    return found
