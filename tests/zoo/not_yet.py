"""What is known to fail and is left out until it is mended; this list is to become empty."""

from __future__ import annotations

from collections.abc import Callable

from tests.zoo.case import Case, draw
from tests.zoo.kind import KINDS

MODULES = "one module or weight at several places, in threads: both ranks write into one gradient"
CHECKPOINT = "torch.utils.checkpoint under a split backward"
INNER = "torch.autograd.grad in a forward, under a split backward or recompute"
FUNC = "torch.func in a layer meets the saved-tensor hooks of the first step"
LAST_BIT = "split backward and a weight used in several ways: the first step differs in the last bit"
HOOK = "a user's hook on a linear's output comes after the split backward's"
COMPLEX = "complex weights under a split backward"

NOT_YET: dict[str, str] = {
    "module_twice_in_a_row": MODULES,
    "module_at_two_places": MODULES,
    "module_at_three_places": MODULES,
    "tied_normalisation": MODULES,
    "checkpoint": CHECKPOINT,
    "checkpoint_of_alinear": CHECKPOINT,
    "checkpoint_of_rows_by_rows": CHECKPOINT,
    "checkpoint_nested": CHECKPOINT,
    "checkpoint_of_apart": CHECKPOINT,
    "checkpoint_sequential": CHECKPOINT,
    "gradient_penalty": INNER,
    "forces": INNER,
    "inner_steps": INNER,
    "inner_gradient_without_graph": INNER,
    "func_grad": FUNC,
    "func_jacobian": FUNC,
    "complex_linear": COMPLEX,
    "complex_conv": COMPLEX,
    "complex_between": COMPLEX,
    "tensor_hook": HOOK,
    "gradient_reversal": HOOK,
    "own_function_and_linear": LAST_BIT,
    "weight_in_two_ways": LAST_BIT,
    "addmm": LAST_BIT,
    "cat_and_linear": LAST_BIT,
    "weight_as_another_bias": LAST_BIT,
    "weight_norm_in_the_loss": LAST_BIT,
}
"""Kinds, with the reason."""

OTHER_DTYPES = frozenset(["double_layer", "double_between", "mixed_dtypes", "bfloat_layer", "fourier"])
STRIDES = frozenset(["transposed", "strided"])

TOGETHER: list[tuple[str, Callable[[Case], bool]]] = [
    (
        "a tied weight in the state that is loaded, in processes",
        lambda c: c.transport == "processes" and c.habit == "reload" and any(k.bounded for k in c.entries),
    ),
    ("clipping of other dtypes than float32", lambda c: c.clip > 0 and bool(OTHER_DTYPES & {*c.kinds})),
    ("clipping in float64", lambda c: c.clip > 0 and c.habit == "double"),
    ("hooks on parameters under dp or two copies", lambda c: c.copies and "parameter_hook" in c.kinds),
    ("copies of a layer with a tensor that is no leaf", lambda c: c.copies and "pruned" in c.kinds),
    ("the layout of a gradient where the model is cut", lambda c: c.stages > 1 and "fourier" in c.kinds),
    ("strides between processes", lambda c: c.transport == "processes" and bool(STRIDES & {*c.kinds})),
    ("bfloat16: a stage's input is cast once, not at each use", lambda c: c.autocast and c.stages > 1),
    (
        "bfloat16: the audit computes nn.Bilinear in float32",
        lambda c: c.autocast and "bilinear_layer" in c.kinds,
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
