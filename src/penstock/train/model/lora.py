"""The adapters that ``[lora]`` asks for."""

from __future__ import annotations

from typing import Any

from penstock.huggingface.adapters.supported import require_peft
from penstock.train.config.sections.lora_section import LoraSection

ALL_LINEAR = "all-linear"


def new_adapters(lora: LoraSection) -> Any:
    """Return the argument ``adapters`` of `from_transformers`: a folder, or peft's config of new adapters.

    Raises:
        ConfigError: if peft is not installed.
    """
    if lora.path:
        return lora.path
    require_peft()
    from peft import LoraConfig

    alpha = 2 * lora.rank if lora.alpha is None else lora.alpha
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,
        lora_dropout=lora.dropout,
        target_modules=ALL_LINEAR if lora.target_modules == ALL_LINEAR else names_in(lora.target_modules),
        modules_to_save=names_in(lora.modules_to_save) or None,
        bias=lora.bias,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
    )


def names_in(text: str) -> list[str]:
    """Return the names in a text with commas between them."""
    return [name.strip() for name in text.split(",") if name.strip()]
