"""Model of a user as layers: a list of them, a model with a forward of its own, or one of a library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from penstock.base.errors import ConfigError
from penstock.forward.own_layers import ModelLayers, split
from penstock.forward.unchanged import UnchangedModel
from penstock.runtime.batch.loss_weights import Reduction
from penstock.stage.compute.causal_lm_loss import causal_lm_loss, valid_tokens
from penstock.stage.compute.linear_cross_entropy import LinearCrossEntropy
from penstock.stage.compute.output_loss import of_output
from penstock.stage.compute.runner import LossFunction
from penstock.stage.converters import converter_of
from penstock.stage.layers import Container, Layer, as_layers


class GivenModel(NamedTuple):
    """A model as a Pipeline takes it."""

    layers: list[Layer]
    loss_fn: LossFunction
    module: nn.Module | None
    container: Container | UnchangedModel
    reduction: Reduction


def given_model(model: object, loss_fn: LossFunction | None) -> GivenModel:
    """Return the layers of a model."""
    if loss_fn is not None and not callable(loss_fn):
        raise ConfigError(f"loss_fn must be callable as loss_fn(output, target), got {loss_fn!r}")
    layers, own_loss, module = layers_of(model, loss_fn is None)
    loss = loss_fn if loss_fn is not None else own_loss
    if loss is None:
        raise ConfigError(
            "loss_fn must be given as loss_fn(output, target), or loss_fn(output), unless the model's own "
            "forward(x, target) or forward(x) returns the loss"
        )
    loss = of_output(loss)
    unchanged = layers.unchanged if isinstance(layers, ModelLayers) else None
    reduction: Reduction = valid_tokens if loss is causal_lm_loss else "mean"
    if isinstance(loss, LinearCrossEntropy):
        reduction = loss.valid_targets
    if (of_layers := _loss_of(layers)) is not None and loss is of_layers[0]:
        reduction = of_layers[1]
    return GivenModel(layers, loss, module, unchanged or Container(model), reduction)


def layers_of(model: object, own_loss: bool) -> tuple[list[Layer], LossFunction | None, nn.Module | None]:
    """Return the layers of a model as `given_model`, the loss that it computes itself, and the module that they are of."""
    if isinstance(model, ModelLayers):
        return model, model.loss_fn, model.model
    module = model if isinstance(model, nn.Module) else None
    if (converter := converter_of(module)) is not None:
        model = converter.convert(module)
    if isinstance(model, nn.Module) and not isinstance(model, nn.Sequential | nn.ModuleList):
        own = split(model, loss=own_loss)
        return own, own.loss_fn, model
    layers = as_layers(model)
    of_layers = _loss_of(layers)
    return layers, None if of_layers is None else of_layers[0], module


def _loss_of(layers: list[Layer]) -> tuple[LossFunction, Callable[[Any], Any]] | None:
    """Return the loss function that layers bring with them, and what their microbatches weigh."""
    return layers[0].batch.loss if layers and layers[0].batch is not None else None
