"""Outputs of models of transformers as processes send them to each other."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

_CLASS = "class of the output"


def plain_output(value: Any) -> Any:
    """Return an output of a model as what processes send each other: tensors on the CPU, in dicts, lists and tuples."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, tuple | list):
        return [plain_output(inner) for inner in value]
    if isinstance(value, ModelOutput):
        kind = type(value)
        return {
            _CLASS: f"{kind.__module__}:{kind.__name__}",
            **{k: plain_output(v) for k, v in value.items()},
        }
    return value


def restored_output(value: Any, device: torch.device) -> Any:
    """Return the output that was sent as `plain_output` gives it, with its tensors on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, list):
        return tuple(restored_output(inner, device) for inner in value)
    if isinstance(value, dict) and _CLASS in value:
        module, _, name = value.pop(_CLASS).partition(":")
        kind = getattr(sys.modules[module], name)
        return kind(**{key: restored_output(inner, device) for key, inner in value.items()})
    return value
