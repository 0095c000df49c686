"""Variants of Hugging Face models, by the keys of their configs: variants that cannot be split, and windows of attention."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from penstock.base.counts import is_count
from penstock.base.errors import ConfigError

LARGEST_SIZE = 10**9
"""Far above any size of a model; torch and transformers fail at larger ones with errors that do not name the key."""
_REASONS = {
    "add_cross_attention": "attends to an encoder",
    "is_encoder_decoder": "has an encoder",
    "use_bidirectional_attention": "attends to later tokens",
    "quantization_config": "has quantised weights",
}
VARIANT_KEYS = (*_REASONS, "is_causal", "rope_parameters", "rope_scaling")
"""Keys that `refused_variant` reads."""
_WINDOWED = {"gemma2": (2, 4096), "gemma3_text": (6, 4096), "gpt_oss": (2, 128)}
"""Families in which every n-th block attends to all tokens and the rest to a window, by default of this size."""


def refused_variant(config: Mapping[str, Any]) -> str | None:
    """Return why a variant of a decoder cannot be split, with the key of its config; None if it can.

    `config` has the values of `VARIANT_KEYS`, or is all of a ``config.json``.
    """
    for key, reason in _REASONS.items():
        if config.get(key):
            return f"the config's {key} is set: a model that {reason} cannot be split"
    if config.get("is_causal") is False:
        return "the config's is_causal is false: a model that attends to later tokens cannot be split"
    if "dynamic" in {
        *_rotary_rules(config.get("rope_parameters")),
        *_rotary_rules(config.get("rope_scaling")),
    }:
        return (
            "the config's rope_type is 'dynamic', whose tables depend on which lengths came before; that order differs "
            "between stages. Use 'linear', 'yarn', 'llama3' or 'longrope'"
        )
    return None


def _rotary_rules(parameters: object) -> list[str]:
    """Return each ``rope_type`` of rotary parameters, which some families have once for each kind of attention."""
    if not isinstance(parameters, Mapping):
        return []
    by_kind = [value for value in parameters.values() if isinstance(value, Mapping)]
    return [str(rules.get("rope_type") or rules.get("type")) for rules in (by_kind or [parameters])]


def refused_architecture(config: Mapping[str, Any], heads: Collection[str] = ("CausalLM",)) -> str | None:
    """Return why the architectures that a ``config.json`` names have none of some heads; None if one has, or is open."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        return None
    if any(str(name).partition("For")[2] in ("", *heads) for name in names):
        return None
    others = " and models ".join(["", *(f"...For{head}" for head in heads if head != "CausalLM")])
    return (
        f"the config's architectures is {', '.join(map(str, names))}, and only causal language models{others} can be taken "
        "here; write ...ForCausalLM there if it is one, and of images and text give the model itself, as "
        "AutoModelForImageTextToText.from_pretrained makes it"
    )


def require_positions(sequence: int, positions: int, key: str) -> None:
    """Raise `ConfigError` if a sample has more tokens than a model is configured for.

    `positions` is 0 if the config does not say; `key` names the setting of the tokens in the message.
    """
    if 0 < positions < sequence:
        raise ConfigError(
            f"{key} must be at most {positions:,}, the positions of the model (max_position_embeddings or n_positions in "
            f"its config.json), got {sequence:,}; take {key} = {positions}, or a model for longer samples"
        )


def windows(kind: str, config: Mapping[str, Any], layers: int) -> tuple[int, int]:
    """Return the tokens of a window of attention, and the number of blocks that attend to such windows alone."""
    default, usual = _WINDOWED.get(kind, (1, None))
    window = config.get("sliding_window", usual)
    if not is_count(window):
        return 0, 0
    if "use_sliding_window" in config or kind.startswith("qwen"):
        if config.get("use_sliding_window") is not True:
            return 0, 0
        first = config.get("max_window_layers", layers)
    else:
        first = 0
    types = config.get("layer_types")
    if isinstance(types, list):
        return window, sum(name == "sliding_attention" for name in types)
    if kind in _WINDOWED:
        every = config.get("sliding_window_pattern", default)
        return window, layers - layers // (every if isinstance(every, int) and every > 0 else default)
    return window, max(0, layers - first) if isinstance(first, int) else 0
