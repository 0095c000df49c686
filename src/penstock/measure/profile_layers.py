"""Profile of a model's layers, measured on this machine or traced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from penstock.profile.measured import DEFAULT_EFFORT, Effort, Exchange, measure_layers
from penstock.profile.model_profile import Profile
from penstock.profile.traced import trace_layers
from penstock.runtime.model.given_model import layers_of
from penstock.stage.compute.runner import LossFunction


def profile_layers(
    model: object,
    example: object,
    *,
    measure: bool = True,
    target: object = None,
    loss_fn: LossFunction | None = None,
    named: Mapping[str, object] | None = None,
    microbatches: Sequence[int] | None = None,
    ranks: int = 1,
    effort: Effort = DEFAULT_EFFORT,
    exchange: Exchange | None = None,
    name: str | None = None,
    seed: int = 0,
    autocast: torch.dtype | None = None,
) -> Profile:
    """Profile the layers of a model, for `penstock.plan`.

    Args:
        model: model or layers as `penstock.Pipeline` takes them.
        example: input of one microbatch, batch first.
        measure: measure the layers on this machine (default), or trace them without running them.
        target: target of the loss for the same microbatch.
        loss_fn: loss function as `penstock.Pipeline` takes it; its cost is part of the last layer's (default: with a
            target the one that the model itself computes, and else none).
        named: keyword inputs of the step, by name.
        microbatches: samples of the microbatches to profile (default: the example's, and twice as many).
        ranks: number of threads of this process that compute at the same time while it is measured (default 1).
        effort: bounds on the measurement.
        exchange: function that joins the processes that measure at the same time (default None: this process alone).
        name: name of the model (default: its class).
        seed: seed of layers that are built (default 0).
        autocast: dtype of mixed precision, as for `penstock.Pipeline` (default None).

    Returns:
        A profile with source "traced" or "measured". `Profile.save` writes it as JSON.

    Raises:
        ProfileError: if a layer does not run on tensors without values; names it.
        SplitError: if the model cannot be split into layers.
    """
    layers, own_loss, _ = layers_of(model, own_loss=loss_fn is None and target is not None)
    loss_fn = own_loss if loss_fn is None and target is not None else loss_fn
    name = name or type(model).__name__
    if not measure:
        return trace_layers(
            layers, example, target=target, loss_fn=loss_fn, named=named, microbatches=microbatches, name=name,
            seed=seed, autocast=autocast,
        )  # fmt: skip
    return measure_layers(
        layers, example, target=target, loss_fn=loss_fn, named=named, microbatches=microbatches, ranks=ranks,
        effort=effort, exchange=exchange, name=name, seed=seed, autocast=autocast,
    )  # fmt: skip
