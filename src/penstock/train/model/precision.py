"""Precision of a run: the dtype of the weights, and autocast's dtype."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from penstock.stage.layers import Layer
from penstock.train.config.fields import Precision

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_of(precision: Precision) -> torch.dtype | None:
    """Return the dtype of autocast; None for none."""
    return _AUTOCAST.get(precision)


def weights_dtype(precision: Precision) -> torch.dtype:
    return torch.bfloat16 if precision == "bf16-weights" else torch.float32


def with_weights(layers: list[Layer], dtype: torch.dtype) -> list[Layer]:
    """Return layers whose floating-point parameters get a dtype as soon as they are built; buffers keep theirs."""

    def casting(layer: Layer) -> Layer:
        return replace(layer, build=lambda: _cast(layer.build(), dtype))

    return [casting(layer) for layer in layers]


def _cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    for parameter in module.parameters():
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
    return module
