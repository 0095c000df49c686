"""Model of a user as layers: a list of them, a model with a forward of its own, or one of a library."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

import penstock
from penstock.base.errors import ConfigError
from penstock.forward.own_layers import ModelLayers, split
from penstock.forward.unchanged import UnchangedModel
from penstock.runtime.batch.splitter import Reduction
from penstock.stage.compute.linear_cross_entropy import LinearCrossEntropy
from penstock.stage.compute.runner import LossFunction
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
            "loss_fn must be given as loss_fn(output, target), unless the model's own forward(x, target) returns the loss"
        )
    unchanged = layers.unchanged if isinstance(layers, ModelLayers) else None
    reduction: Reduction = penstock.valid_tokens if loss is penstock.causal_lm_loss else "mean"
    if isinstance(loss, LinearCrossEntropy):
        reduction = loss.valid_targets
    return GivenModel(layers, loss, module, unchanged or Container(model), reduction)


def layers_of(model: object, own_loss: bool) -> tuple[list[Layer], LossFunction | None, nn.Module | None]:
    """Return the layers of a model as `given_model`, the loss that it computes itself, and the module that they are of."""
    if isinstance(model, ModelLayers):
        return model, model.loss_fn, model.model
    if not isinstance(model, nn.Module) or isinstance(model, nn.Sequential | nn.ModuleList):
        return as_layers(model), None, model if isinstance(model, nn.Module) else None
    if any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__):
        return penstock.from_transformers(model), penstock.causal_lm_loss, model
    layers = split(model, loss=own_loss)
    return layers, layers.loss_fn, model
