"""Result of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.runtime.batch.work import Work
from penstock.runtime.consensus import Losses


@dataclass(frozen=True)
class StepResult:
    """Result of a step.

    Attributes:
        loss: 0-d tensor, the microbatches' losses reduced by the pipeline's `reduction` (default mean); the same number on
            every rank. None from an evaluation without targets.
        losses: shape (microbatches,), by microbatch id; the same on every rank.
        parts: the terms of `loss` by name, reduced in the same way: ``"loss"`` if `loss_fn` returns one tensor, its own
            names if it returns several, and the names given to `add_loss` in layers.
        outputs: outputs of the last stage by microbatch id, if asked for and this process holds the last stage.
        input_grads: gradients of the inputs by microbatch id, if asked for and this process holds the first stage: a
            tensor, or a tuple with one for each floating-point leaf of the input.
    """

    loss: Tensor | None
    losses: Tensor | None
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    outputs: tuple[Any, ...] | None = None
    input_grads: tuple[Any, ...] | None = None


def step_result(works: Sequence[Work], microbatches: int) -> StepResult:
    """Join the work of this process's ranks to the result of a step.

    Args:
        works: work of each rank, done.
        microbatches: number of microbatches in the global batch.
    """
    losses = Losses()
    outputs: dict[int, object] = {}
    grads: dict[int, Any] = {}
    for work in works:
        losses.update(work.losses)
        outputs.update(work.outputs)
        grads.update(work.grads)
    order = range(microbatches)
    total: Tensor | None = None
    values: Tensor | None = None
    parts: dict[str, Tensor] = {}
    if losses.total:
        values = torch.stack([losses.total[n] for n in order])
        weights = [losses.weights[n] for n in order]
        total = reduced(values, weights)
        for name in sorted({name for terms in losses.parts.values() for name in terms}):
            column = torch.stack([losses.parts[n].get(name, values.new_zeros(())) for n in order])
            parts[name] = reduced(column, weights)
    return StepResult(
        total,
        values,
        parts,
        tuple(outputs[n] for n in sorted(outputs)) if outputs else None,
        tuple(g[0] if len(g := grads[n].leaves) == 1 else g for n in sorted(grads)) if grads else None,
    )


def reduced(losses: Tensor, weights: Sequence[float]) -> Tensor:
    """Return the weighted sum of the microbatches' losses, without those of weight 0, which may be NaN."""
    if len(set(weights)) == 1:
        return losses.sum() if weights[0] == 1.0 else losses.mean()
    terms = (losses[n] * weight for n, weight in enumerate(weights) if weight)
    return sum(terms, losses.new_zeros(()))
