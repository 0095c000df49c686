"""Weights of new adapters, which depend on the seed and the names of the modules alone, and of adapters from a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.base.errors import DataError
from penstock.huggingface.adapters.adapted_model import Adapters
from penstock.huggingface.adapters.supported import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from penstock.huggingface.model_folder import Stored, read_tensors
from penstock.stage.rng.initial import generator_for


def initialise(module: nn.Module, name: str, adapters: Adapters, seed: int) -> None:
    """Initialise the adapters within a module by peft's own rules.

    Args:
        module: module with adapters, whose base has its weights.
        name: name of the module in the whole model.
        adapters: adapters of the whole model.
        seed: random seed.
    """
    from peft.tuners.lora import LoraLayer

    before = torch.get_rng_state()
    try:
        with torch.no_grad():
            for inner, part in module.named_modules():
                if isinstance(part, LoraLayer):
                    torch.set_rng_state(generator_for(seed, f"{name}.{inner}").get_state())
                    part.reset_lora_parameters(adapters.name, adapters.config.init_lora_weights)
                    _set_magnitude(part, adapters.name)
    finally:
        torch.set_rng_state(before)


def _set_magnitude(part: Any, adapter: str) -> None:
    """Set DoRA's magnitudes (2402.09353) to the norms of the base's rows, where there are any."""
    magnitudes = part.lora_magnitude_vector
    if adapter in magnitudes:
        magnitudes[adapter].update_layer(
            base_layer=part.get_base_layer(),
            lora_A=part.lora_A[adapter].weight,
            lora_B=part.lora_B[adapter].weight,
            scaling=part.scaling[adapter],
        )


def load(module: nn.Module, name: str, adapters: Adapters, stored: Mapping[str, Stored]) -> None:
    """Load the adapters within a module from a folder whose names `require_fitting` has checked."""
    own = {inner: adapters.saved_names.get(f"{name}.{inner}") for inner in module.state_dict()}
    tensors = read_tensors({inner: stored[saved] for inner, saved in own.items() if saved is not None})
    module.load_state_dict(tensors, strict=False)


def require_fitting(folder: Path, adapters: Adapters, stored: Mapping[str, Stored]) -> None:
    """Require that a folder has all tensors of its config's adapters and no others.

    Raises:
        DataError: if tensors are missing, unknown or misshapen; lists all of them.
    """
    shapes = {adapters.saved_names[name]: shape for name, shape in adapters.shapes.items()}
    problems = [f"{name} is missing" for name in shapes if name not in stored]
    problems += [f"{name} is unknown" for name in stored if name not in shapes]
    problems += [
        f"{name} has shape {tensor.shape}, not {shapes[name]}"
        for name, tensor in stored.items()
        if name in shapes and tensor.shape != shapes[name]
    ]
    if problems:
        raise DataError(
            f"{folder / ADAPTER_WEIGHTS} does not fit its {ADAPTER_CONFIG} and the base model: "
            + "; ".join(problems)
        )
