"""Arguments of a step: x, y and keyword inputs from what a user gives, and the dimensions that they are split along."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.base.errors import BatchError, ConfigError
from penstock.runtime.routing import ValueRoutes
from penstock.stage.compute.shifted_loss import next_targets
from penstock.stage.layers import BatchNames
from penstock.stage.microbatches import Dims
from penstock.stage.values import leaves_of


def require_no_graph(values: Iterable[tuple[str, object]]) -> None:
    """Raise if arguments of a step require a gradient, since gradients do not leave the pipeline."""
    for name, value in values:
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves_of(value)):
            raise BatchError(
                f"{name} requires a gradient, which the pipeline would not pass on; detach it, or, for x, ask for "
                "input_grads=True and give the gradients in the result to torch.autograd.backward(x, ...)"
            )


Arguments = tuple[object, object, Mapping[str, object]]
"""x, y and the keyword inputs of a step."""


def arguments_of(
    names: BatchNames | None, loss_fn: object, x: object, y: object, named: Mapping[str, object]
) -> Arguments:
    """Return x, y and the keyword inputs of a step, where the batch may be a mapping, or some of it be given by its names.

    Args:
        names: names of the model's arguments; None if it has none, so that a mapping is a value like any other.
    """
    if names is None:
        return x, y, named
    target = names.target
    if target is None and (target := _second_parameter(loss_fn)) in (names.first, *names.others):
        target = None  # the model's own argument has the name
    if y is None and isinstance(x, Mapping) and names.first in x:
        known = sorted({names.first, *names.others, *([] if target is None else [target])})
        if strange := [key for key in x if key not in known]:
            raise BatchError(
                f"the batch has {strange[0]!r}, which is neither an argument of the model nor the target; its keys may be "
                f"{', '.join(map(repr, known))}. The target has the name of the loss function's second parameter, unless "
                "that is an argument of the model; otherwise call pipe.step(x, y, NAME=...)"
            )
        if twice := sorted(x.keys() & named.keys()):
            raise BatchError(
                f"{twice[0]} is given twice: in the batch, and as a keyword input; leave one out"
            )
        named = {**x, **named}
        x = None
    others = dict(named)
    if x is None:
        x = others.pop(names.first, None)
    if y is None and target is not None:
        y = others.pop(target, None)
    return x, y, others


def classes_of(x: object, y: object, own_target: object, loss_fn: object, own_loss: object) -> object:
    """Return the classes at the positions of the output for `Pipeline.log_probs`, or None on a rank without them.

    Args:
        own_target: target that is given with the model's arguments, by its name.
        loss_fn, own_loss: loss function of the pipeline, and the model's own; None if it has none.
    """
    shifts, own_shifts = (getattr(loss, "without_shift", None) is not None for loss in (loss_fn, own_loss))
    if own_target is not None and (y is not None or not shifts):
        raise BatchError(
            "log_probs takes y, the class at each position of the output, in place of the loss function's target, which the "
            "loss may shift; leave the target out of the batch, log_probs(batch, y)"
        )
    y = own_target if y is None else y
    if y is None or (isinstance(y, Tensor) and y.dtype == torch.int64 and y.dim() == 2):
        if own_target is not None:
            return next_targets(y, -100)
        if (shifts or own_shifts) and isinstance(x, Tensor) and y is not None and x.shape == y.shape:
            counts = y != -100
            if counts.any() and torch.equal(x[counts], y[counts]):
                raise BatchError(
                    "y equals the tokens x, so each would be judged at its own position, and this model's output predicts "
                    "the next one; call log_probs(ids[:, :-1], ids[:, 1:]), or log_probs({'input_ids': ids, 'labels': ids}) "
                    "with the model's own loss, which shifts the labels"
                )
        return y
    got = f"{y.dtype} of shape {tuple(y.shape)}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
    raise BatchError(f"y must be an int64 tensor of shape (batch, tokens) for log_probs, got {got}")


def _second_parameter(function: object) -> str | None:
    try:
        parameters = [*inspect.signature(function).parameters.values()]  # type: ignore[arg-type]  # raises
    except (TypeError, ValueError):  # a function written in C
        return None
    return (
        parameters[1].name
        if len(parameters) > 1 and parameters[1].kind is parameters[1].POSITIONAL_OR_KEYWORD
        else None
    )


@dataclass(frozen=True)
class BatchDims:
    """Dimensions along which the values of a batch are split.

    Attributes:
        named: those of keyword inputs; dimension 0 where a name is missing.
    """

    x: Dims = 0
    y: Dims = 0
    named: Mapping[str, Dims] = field(default_factory=dict)

    @staticmethod
    def given(dims: Mapping[str, Dims] | None, names: BatchNames | None, routes: ValueRoutes) -> BatchDims:
        """Return the dimensions that a user gave by name: "x", "y", or the names of the model's arguments."""
        if dims is None:
            return BatchDims()
        first, target = (None, None) if names is None else (names.first, names.target)
        if not isinstance(dims, Mapping) or not all(isinstance(name, str) for name in dims):
            raise ConfigError(f"dims must be a mapping such as {{'x': 1, 'y': 1}}, got {dims!r}")
        known = {"x", "y", *routes.inputs, *filter(None, (first, target))}
        if strange := sorted(dims.keys() - known):
            raise ConfigError(
                f"dims has {strange[0]!r}, and the model has no input of that name; there may be {', '.join(sorted(known))}"
            )
        x, y = dims.get("x", dims.get(first or "x", 0)), dims.get("y", dims.get(target or "y", 0))
        if x is None or y is None:
            raise ConfigError(
                "dims must be a dimension for x and y, which are split; None is for keyword inputs"
            )
        return BatchDims(x, y, {n: dim for n, dim in dims.items() if n in routes.inputs})

    def of(self, name: str) -> Dims:
        """Return the dimension of a keyword input."""
        return self.named.get(name, 0)
