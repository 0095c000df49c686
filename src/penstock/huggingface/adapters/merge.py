"""Weights of a pipeline with its adapters merged into the base's matrices."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn

from penstock.base.errors import ConfigError
from penstock.huggingface.adapters.adapted_model import Adapters
from penstock.runtime.pipeline import Pipeline
from penstock.stage.layers import whole_name


def merged_state(pipe: Pipeline, state: Mapping[str, Any], adapters: Adapters) -> dict[str, Any]:
    """Return this process's weights by their names in the base model, with the adapters merged by peft's own rules.

    The pipeline's own weights are not changed: one module at a time is copied and merged.

    Args:
        pipe: pipeline of the model with adapters.
        state: this process's weights by their names in that model.
        adapters: adapters of the whole model.

    Raises:
        ConfigError: if an adapter cannot be merged, as one that is not finite.
    """
    from peft.tuners.lora import LoraLayer

    of_base = {name: value for name, value in state.items() if not adapters.is_added(name)}
    merged = {adapters.base_name(n): value for n, value in of_base.items() if n in adapters.saved_names}
    for stage in pipe.stages.values():
        for layer_name, layer in stage.module.named_layers():
            for inner, module in layer.named_modules():
                weight = whole_name(layer_name, f"{inner}.weight")
                name = weight.removesuffix(".weight")
                if isinstance(module, LoraLayer) and f"{name}.base_layer.weight" in state:
                    merged[weight] = _merged_weight(name, module)
    for name, value in of_base.items():
        merged.setdefault(adapters.base_name(name), value)
    return merged


def _merged_weight(name: str, module: nn.Module) -> Any:
    copied: Any = copy.deepcopy(module)
    try:
        copied.merge(safe_merge=True)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"peft cannot merge the adapter of {name}: {error}") from error
    return copied.get_base_layer().weight.detach()
