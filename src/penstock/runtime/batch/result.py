"""Result of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.runtime.batch.work import Work
from penstock.runtime.consensus import Losses


class Ends(NamedTuple):
    """Ranks that hold the ends of a pipeline."""

    local: Sequence[int]
    first: Sequence[int]
    last: Sequence[int]


@dataclass(frozen=True)
class StepResult:
    """Result of a step.

    Attributes:
        loss: 0-d tensor, the microbatches' losses reduced by the pipeline's `reduction` (default mean); the same number on
            every rank. None from an evaluation without targets.
        losses: shape (microbatches,), by microbatch id; the same on every rank.
        parts: the terms of `loss` by name, reduced in the same way: ``"loss"`` if `loss_fn` returns one tensor, its own
            names if it returns several, and the names given to `add_loss` in layers.
    """

    loss: Tensor | None
    losses: Tensor | None
    parts: Mapping[str, Tensor]
    _outputs: tuple[Any, ...] | str = field(repr=False)
    _input_grads: tuple[Any, ...] | str = field(repr=False)

    @property
    def outputs(self) -> tuple[Any, ...]:
        """Outputs of the last stage by microbatch id, on the ranks that hold it (``pipe.holds_last``).

        Raises:
            ConfigError: if they were not asked for, or are on other ranks; says on which.
        """
        return _held(self._outputs)

    @property
    def input_grads(self) -> tuple[Any, ...]:
        """Gradients of the inputs by microbatch id, on the ranks that hold the first stage (``pipe.holds_first``).

        Each is a tensor, or a tuple with one for each floating-point leaf of the input.

        Raises:
            ConfigError: if they were not asked for, or are on other ranks; says on which.
        """
        return _held(self._input_grads)


def _held(values: tuple[Any, ...] | str) -> tuple[Any, ...]:
    """Return values; raise if a text says why there are none."""
    if isinstance(values, str):
        raise ConfigError(values)
    return values


def _or_reason(
    name: str,
    values: Sequence[Any],
    asked: bool,
    trains: bool,
    local: Sequence[int],
    end: str,
    ranks: Sequence[int],
) -> tuple[Any, ...] | str:
    """Return values that some ranks have, or the text that says why this process has none."""
    if not asked:
        call = "step" if trains else "evaluate"
        return f"result.{name} was not asked for; call pipe.{call}(..., {name}=True)"
    if not set(local) & set(ranks):
        holds = (
            f"rank {ranks[0]}, which holds"
            if len(ranks) == 1
            else f"ranks {', '.join(map(str, ranks))}, which hold"
        )
        return (
            f"result.{name} is on {holds} the {end} stage, and this is rank {local[0]}; read it there only, as in "
            f"`if pipe.holds_{end}:`"
        )
    return tuple(values)


def step_result(works: Sequence[Work], microbatches: int, ends: Ends) -> StepResult:
    """Join the work of this process's ranks to the result of a step."""
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
    options = works[0].options
    by_id = [outputs[n] for n in sorted(outputs)]
    leaves = [g[0] if len(g := grads[n].leaves) == 1 else g for n in sorted(grads)]
    return StepResult(
        total,
        values,
        parts,
        _or_reason("outputs", by_id, options.outputs, options.trains, ends.local, "last", ends.last),
        _or_reason(
            "input_grads", leaves, options.input_grads, options.trains, ends.local, "first", ends.first
        ),
    )


def reduced(losses: Tensor, weights: Sequence[float]) -> Tensor:
    """Return the weighted sum of the microbatches' losses, without those of weight 0, which may be NaN."""
    if len(set(weights)) == 1:
        return losses.sum() if weights[0] == 1.0 else losses.mean()
    terms = (losses[n] * weight for n, weight in enumerate(weights) if weight)
    return sum(terms, losses.new_zeros(()))
