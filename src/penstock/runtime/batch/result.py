"""What a step gives back."""

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
    """What a step gives back.

    Attributes:
        loss: 0-d tensor, the microbatches' losses reduced as the pipeline was told (by default their mean); the same
            number on every rank. None from an evaluation without targets.
        losses: shape (microbatches,), by microbatch id; the same on every rank.
        parts: the losses that `loss` is the sum of, by name, reduced in the same way: ``"loss"`` for a `loss_fn` that
            returns one tensor, what it called them if it returned several, and what layers added with `add_loss`.
        outputs: the last stage's outputs by microbatch id, if asked for and this process holds the last stage.
        input_grads: the gradients of the inputs by microbatch id, if asked for and this process holds the first
            stage: a tensor, or a tuple with one for each floating-point leaf of the input.
    """

    loss: Tensor | None
    losses: Tensor | None
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    outputs: tuple[Any, ...] | None = None
    input_grads: tuple[Any, ...] | None = None


def step_result(works: Sequence[Work], microbatches: int) -> StepResult:
    """Join what the ranks of this process have made of a step.

    Args:
        works: by rank.
        microbatches: of the global batch, whose losses are known.
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
        for name in sorted({name for part in losses.parts.values() for name in part}):
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
    """The weighed sum of the microbatches' losses; one that weighs 0 is left out, whatever it is."""
    if len(set(weights)) == 1:
        return losses.sum() if weights[0] == 1.0 else losses.mean()
    counting = [n for n, weight in enumerate(weights) if weight]
    return sum((losses[n] * weights[n] for n in counting), losses.new_zeros(()))
