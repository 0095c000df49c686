"""Configs of Hugging Face's peft: those whose adapters can be split, trained and saved, and their folders."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from penstock.base.errors import ConfigError, DataError
from penstock.huggingface.model_folder import Stored, read_header, read_json

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

_REFUSED = {
    "alora_invocation_tokens": "adapters that act from certain tokens on",
    "arrow_config": "adapters that are routed",
    "kasa_config": "another kind of adapter",
    "layer_replication": "blocks that are used several times",
    "megatron_config": "adapters of Megatron's layers",
    "monteclora_config": "another kind of adapter",
    "target_parameters": "adapters of parameters instead of modules",
    "trainable_token_indices": "single rows of a token table",
    "use_bdlora": "another kind of adapter",
    "use_qalora": "adapters of quantised weights",
    "velora_config": "another kind of adapter",
}
"""Keys of peft's ``LoraConfig`` that ask for more than low-rank matrices beside a matrix, and what they ask for."""


def require_peft() -> None:
    """Require the peft package.

    Raises:
        ConfigError: if it is not installed; says how to install it.
    """
    if importlib.util.find_spec("peft") is None:
        raise ConfigError("LoRA needs the peft package: pip install 'penstock-torch[peft]'")


def is_peft_model(model: object) -> bool:
    """Return whether a model is one of peft; without peft it cannot be."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def require_supported(config: Any, new: bool) -> None:
    """Require a config of peft whose adapters can be split, trained and saved.

    Args:
        config: config of peft, of any type.
        new: whether the adapters are to be initialised, or exist already.

    Raises:
        ConfigError: if it is of another type than LoRA, or asks for more than LoRA, rsLoRA and DoRA; names the key.
    """
    if not hasattr(config, "peft_type"):
        raise ConfigError(f"adapters must be peft's LoraConfig or a folder, got {type(config).__name__}")
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA":
        raise ConfigError(f"adapters must be of peft's type LORA, got {kind}; use peft.LoraConfig")
    for key, reason in _REFUSED.items():
        if getattr(config, key, None):
            raise ConfigError(f"{key} of the LoraConfig is set: {reason} cannot be split; leave it unset")
    first = config.init_lora_weights
    allowed: tuple[object, ...] = (True, "gaussian") if new else (True, False, "gaussian")
    if not any(first is each or (isinstance(first, str) and first == each) for each in allowed):
        raise ConfigError(
            f"init_lora_weights must be {' or '.join(map(repr, allowed))}, got {first!r}; other ways change the base's "
            "weights or need data: use peft's own functions, merge, and start from the merged folder"
        )


def read_adapter_folder(given: str | os.PathLike[str]) -> tuple[Any, dict[str, Stored]]:
    """Read the config of a folder that peft or `save_adapters` has written, and the list of its tensors.

    Returns:
        peft's ``LoraConfig``, and the tensors by their names in the file.

    Raises:
        ConfigError: if there is no such folder, or its adapters cannot be split.
        DataError: if its files are missing or damaged.
    """
    require_peft()
    folder = Path(given).expanduser()
    if not (folder / ADAPTER_CONFIG).is_file():
        raise ConfigError(f"{folder} is not a folder of adapters: it has no {ADAPTER_CONFIG}")
    table = read_json(folder / ADAPTER_CONFIG)
    from peft import PeftConfig

    try:
        config = PeftConfig.from_pretrained(str(folder))
    except Exception as error:  # the library's own checks raise many kinds
        raise DataError(f"peft cannot use {folder / ADAPTER_CONFIG}: {error}") from error
    if table.get("peft_type") is None:
        raise DataError(f"{folder / ADAPTER_CONFIG} has no peft_type")
    require_supported(config, new=False)
    if not (folder / ADAPTER_WEIGHTS).is_file():
        pickle = folder / "adapter_model.bin"
        hint = (
            f"; {pickle.name} is a pickle, which can run code when it is loaded, and is not read: load it with peft where "
            "you trust it and save it again with save_pretrained"
            if pickle.is_file()
            else ""
        )
        raise DataError(f"{folder} has no {ADAPTER_WEIGHTS}{hint}")
    return config, read_header(folder / ADAPTER_WEIGHTS)
