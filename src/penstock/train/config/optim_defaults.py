"""Defaults of ``[optim]`` that depend on other keys: for fine-tuning, and for each of torch's optimizers."""

from __future__ import annotations

import dataclasses
from typing import Any

from penstock.base.errors import ConfigError
from penstock.train.config.optimizers import is_of_adam, torch_defaults
from penstock.train.config.sections.optim_section import OptimConfig

OURS = "AdamW"
"""Optimizer that the defaults of `OptimConfig` are for."""
FINE_TUNING = {"lr": 2e-5, "weight_decay": 0.01, "beta2": 0.999}
"""Defaults with ``model.path``, of AdamW; the rate suits all optimizers of Adam's kind."""


def optim_defaults(config: OptimConfig, given: set[str], *, fine_tunes: bool) -> OptimConfig:
    """Fill in the keys that are not given and whose default depends on the optimizer or the model.

    Args:
        fine_tunes: whether the run starts from trained weights (``model.path``).
    """
    values = {} if config.name == OURS else torch_defaults(config.name)
    if fine_tunes and config.name == OURS:
        values |= FINE_TUNING
    elif fine_tunes and is_of_adam(config.name):
        values["lr"] = FINE_TUNING["lr"]
    elif fine_tunes and "lr" not in given:
        raise ConfigError(
            f"optim.lr must be given with model.path and optim.name = {config.name}: torch's default of {values['lr']:g} "
            "may destroy the weights that the run starts from"
        )
    unset: dict[str, Any] = {key: value for key, value in values.items() if key not in given}
    return dataclasses.replace(config, **unset)


def fine_tuning_note(config: OptimConfig) -> str:
    """Return a sentence about the learning rate and the weight decay of a run that starts from trained weights."""
    course = (
        "constant"
        if config.lr_schedule == "constant"
        else f"{config.lr_schedule} to {config.final_lr:.0%} of it"
    )
    return (
        f"fine-tuning with {config.name}: learning rate {config.lr:g} (warm-up over {config.warmup:.0%} of the steps, then "
        f"{course}), weight decay {config.weight_decay:g} (none for norms, biases and embeddings); set [optim] for others"
    )
