"""Comparison of a model's layers with the model itself on a sample, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import SplitError
from penstock.stage.layers import Layer, is_joint
from penstock.stage.module import StageModule
from penstock.stage.own_model.loss_piece import loss_in
from penstock.stage.values import flatten, pack

SEED = 0


def check_sample(
    model: nn.Module,
    layers: Sequence[Layer],
    loss_fn: Callable[[Any, Any], Any] | None,
    sample: Sequence[Any],
    named: Mapping[str, Any],
) -> None:
    """Run a model and its layers on a sample, each layer on a copy of its own, and compare output, loss and gradients.

    Args:
        model: the model; it, its gradients and torch's random numbers stay as they are.
        layers: layers of the model.
        loss_fn: loss of the last layer's output and the target; None to compare the output alone.
        sample: the batch, and the target if there is a loss.
        named: keyword arguments.

    Raises:
        SplitError: if anything differs in a bit; says what.
    """
    reference = copy.deepcopy(model)
    alone = [StageModule([Layer(x.name, x.build, module=copy.deepcopy(x.module))]) for x in layers]
    devices = sorted({p.device.index for p in model.parameters() if p.is_cuda and p.device.index is not None})
    with torch.random.fork_rng(devices), torch.enable_grad():
        torch.manual_seed(SEED)
        expected = reference(*sample, **named)
        torch.manual_seed(SEED)
        result = _through(alone, sample[0], named)
        if loss_fn is not None:
            expected, result = loss_in(expected), loss_fn(result, sample[1])
        _require_equal(type(model).__name__, expected, result)
        _backward(expected)
        _backward(result)
    gradients = {id(p): p.grad for p in reference.parameters()}
    ours: dict[int, list[Tensor]] = {}
    for stage, layer in zip(alone, layers, strict=True):
        for inner, p in stage.layers[0].named_parameters():
            if p.grad is not None:
                key = id(reference.get_parameter(inner if is_joint(layer.name) else f"{layer.name}.{inner}"))
                ours.setdefault(key, []).append(p.grad)
    names = {id(p): n for n, p in reference.named_parameters()}
    for key, name in names.items():
        _require_same_gradient(name, gradients[key], ours.get(key, []))


def _through(layers: Sequence[StageModule], value: Any, named: Mapping[str, Any]) -> Any:
    for number, layer in enumerate(layers):
        wanted = {k: v for k, v in named.items() if k in layer.takes[0]}
        value = layer(value, **wanted)
        if number + 1 < len(layers):
            pack(value)  # refuses what cannot travel
    return value


def _backward(value: Any) -> None:
    leaves = [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
    if leaves:
        torch.autograd.backward(leaves, [torch.ones_like(leaf) for leaf in leaves])


def _require_equal(name: str, expected: Any, result: Any) -> None:
    one, other = flatten(expected), flatten(result)
    same = len(one[0]) == len(other[0]) and all(map(_equal, one[0], other[0]))
    if not same:
        raise SplitError(
            f"the layers of {name} give a different result from {name} itself for the sample, so it is not split: its "
            "modules may leave values for each other in attributes or lists. Pass such values on as arguments, or give the "
            "layers yourself, as docs/models.md shows under 'Layers by hand'"
        )


def _require_same_gradient(name: str, expected: Tensor | None, parts: Sequence[Tensor]) -> None:
    if expected is None and not parts:
        return
    total = sum(parts[1:], parts[0]) if parts else None
    exact = len(parts) < 3  # a sum of more has another order
    if (
        expected is None
        or total is None
        or not (_equal(expected, total) if exact else torch.allclose(expected, total, rtol=1e-4, atol=1e-6))
    ):
        raise SplitError(
            f"the layers give {name} a different gradient from the model's for the sample, so it is not split: a value may "
            "reach a layer in a way other than through the forward's variables. Give the layers yourself, as docs/models.md "
            "shows under 'Layers by hand'"
        )


def _equal(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and bool(one == other)
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and bool(torch.equal(one, other) or torch.equal(one.nan_to_num(), other.nan_to_num()))
    )
