"""Weights of the losses of microbatches: what a loss function counts in them, and how a reduction joins them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from penstock.base.errors import BatchError, ConfigError
from penstock.forward.loss_reach import modules_called, parts_of, passed_numbers
from penstock.runtime.batch.work import class_targets
from penstock.stage.compute.runner import LossWeight

Reduction = str | Callable[[Any], object]
"""``"mean"``, ``"sum"``, ``"valid"``, or a function from a microbatch's target to its weight."""


def require_reduction(reduction: object) -> Reduction:
    """Return a valid `reduction`."""
    if callable(reduction) or (isinstance(reduction, str) and reduction in ("mean", "sum", "valid")):
        return reduction
    raise ConfigError(
        "reduction must be 'mean', 'sum', 'valid' or a function that returns the weight of a microbatch's target, got "
        f"{reduction!r}"
    )


def ignore_index_of(loss_fn: object, reduction: object) -> int:
    """Return the target that a loss function ignores, or -100 as in torch.

    It is the ``ignore_index`` of the function, of a partial's arguments, of a module that it calls, or a number that its
    source passes on by that keyword.
    """
    found: set[int | None] = set()
    for part in (*parts_of(loss_fn), *(inner for m in modules_called(loss_fn) for inner in m.modules())):
        index = part.keywords.get("ignore_index") if isinstance(part, partial) else None
        index = getattr(part, "ignore_index", None) if index is None else index
        if isinstance(index, int):
            found.add(index)
        if (
            reduction == "valid"
            and isinstance(part, nn.CrossEntropyLoss | nn.NLLLoss)
            and part.weight is not None
        ):
            raise ConfigError(
                "reduction='valid' counts targets, and the loss function weighs classes; give reduction a function from a "
                "microbatch's target to the sum of its targets' weights"
            )
    found = found or passed_numbers(loss_fn, "ignore_index") or {-100}
    if len(found) == 1 and (only := next(iter(found))) is not None:
        return only
    problem = (
        "the loss function passes an ignore_index on in its code, where its value is not seen"
        if found == {None}
        else f"the loss function has {len(found)} different values of ignore_index"
    )
    remedy = (
        "give it an attribute ignore_index (loss_fn.ignore_index = ...), or reduction a function from a microbatch's target "
        "to the number of its targets that count"
    )
    if reduction == "valid":
        raise ConfigError(f"{problem}, so reduction='valid' cannot count the targets; {remedy}")
    if reduction == "mean":
        warnings.warn(
            f"{problem}. Where microbatches have different numbers of targets that count, the mean of their losses is not "
            f"the loss of the batch; {remedy}",
            RuntimeWarning,
            stacklevel=3,
        )
    return -100


def counted_by(loss_fn: object, ignore_index: int) -> Callable[[object], float]:
    """Return a function from a target to what a mean of a loss function divides by, as far as it is known.

    It is the number of targets that are not ignored, or the sum of their classes' weights, which a module or a partial has.
    Targets without one tensor of integers all count 1.
    """
    parts = [*parts_of(loss_fn), *(inner for m in modules_called(loss_fn) for inner in m.modules())]
    found = [part.weight for part in parts if isinstance(part, nn.CrossEntropyLoss | nn.NLLLoss)]
    found += [part.keywords.get("weight") for part in parts if isinstance(part, partial)]
    weights = [weight for weight in found if isinstance(weight, Tensor) and weight.dim() == 1]

    def count(target: object) -> float:
        tensors = class_targets(target)
        if len(tensors) != 1:
            return 1.0
        counting = tensors[0][tensors[0] != ignore_index]
        return (
            float(weights[0].to(counting.device)[counting].sum())
            if len(weights) == 1
            else float(counting.numel())
        )

    return count


def count_valid(ignore_index: int, target: object) -> int:
    """Return the number of a target's entries that are not ignored."""
    tensors = class_targets(target)
    if len(tensors) != 1:
        raise BatchError(
            f"reduction='valid' counts the entries of one tensor of integers that are not {ignore_index}, and the target y "
            f"has {len(tensors)} such tensors; give reduction a function from a microbatch's target to its weight"
        )
    return int((tensors[0] != ignore_index).sum())


def known_rows(rows: Sequence[int | None]) -> list[int]:
    """Return the rows of microbatches, which must be known, as where losses are weighed by them."""
    if None in rows:
        raise BatchError(
            f"the microbatches have {list(rows)} rows (None where their tensors have no common number), by which "
            "reduction='mean' weighs their losses; give the Pipeline reduction='sum', or a function that returns the weight "
            "of a microbatch's target"
        )
    return [n for n in rows if n is not None]


def loss_weights(
    targets: Sequence[object], given_rows: Sequence[int | None], reduction: Reduction, scale: float = 1.0
) -> list[LossWeight]:
    """Return the weights of the microbatches' losses."""
    count = len(targets)
    if reduction == "sum":
        return [LossWeight(scale=scale)] * count
    if reduction == "mean":
        rows = known_rows(given_rows)
        if len(set(rows)) == 1:
            return [LossWeight(divisor=count, scale=scale)] * count
        return [LossWeight(n / sum(rows), scale=scale) for n in rows]
    assert callable(reduction)
    counts = [_number(reduction(target)) for target in targets]
    total = sum(counts)
    if not all(math.isfinite(n) and n >= 0 for n in counts) or total == 0:
        raise BatchError(
            f"reduction counted {counts} for the microbatches; it must return numbers of at least 0, not all 0. If the "
            "whole batch has no target that counts, leave it out"
        )
    if len(set(counts)) == 1:
        return [LossWeight(divisor=count, scale=scale)] * count  # with the bits of the mean
    return [LossWeight(n / total, scale=scale) for n in counts]


def _number(count: object) -> float:
    if isinstance(count, Tensor):
        return float(count.item()) if count.numel() == 1 else math.nan
    return float(count) if isinstance(count, int | float) else math.nan
