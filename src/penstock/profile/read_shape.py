"""Read a model's sizes from a ``config.json`` of transformers or the ``[model]`` section of a TOML file; needs no torch.

It covers the families that `penstock.from_transformers` splits. `model_type` chooses the traits that a config leaves to the
library's code, such as biases, extra norms and defaults.
"""

from __future__ import annotations

import json
import os.path
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from penstock.base.bounded_io import MEGABYTE, read_bytes
from penstock.base.counts import require_count
from penstock.base.errors import ConfigError, nearest
from penstock.base.model_variants import LARGEST_SIZE, refused_architecture, refused_variant, windows
from penstock.profile.model_shape import ModelShape

_MAX_BYTES = 16 * MEGABYTE


class NoClosedFormError(ConfigError):
    """A model of a family without a closed form; `path` is its ``config.json``."""

    def __init__(self, message: str, path: Path) -> None:
        super().__init__(message)
        self.path = path


_LAYER_NORMS = {"norm_weights": 4, "final_norm_weights": 2}
_BIASES = {"qkv_bias": True, "output_bias": True, "ffn_bias": True}

_TRAITS: dict[str, dict[str, Any]] = {
    "apertus": {"gated": False},
    "arcee": {"gated": False},
    "deepseek_v3": {},
    "ernie4_5": {"tied": True},
    "gemma": {"tied": True},
    "gemma2": {"tied": True, "norm_weights": 4, "norms": 4},
    "gemma3_text": {"tied": True, "norm_weights": 4, "norms": 4},
    "glm": {},
    "glm4": {"norm_weights": 4, "norms": 4},
    "gpt_oss": {"qkv_bias": True, "output_bias": True, "ffn_bias": True},
    "gpt2": {"gated": False, "tied": True, "dropout": True, **_LAYER_NORMS, **_BIASES},
    "gpt_neox": {"gated": False, **_LAYER_NORMS, **_BIASES},
    "helium": {},
    "internlm3": {},
    "iquestcoder": {},
    "jais2": {"gated": False, **_LAYER_NORMS},
    "llama": {},
    "ministral3": {},
    "mistral": {},
    "mixtral": {},
    "olmo": {"norm_weights": 0, "final_norm_weights": 0},
    "olmo2": {},
    "phi3": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {},
    "qwen3_moe": {},
    "seed_oss": {},
    "smollm3": {"tied": True},
    "vaultgemma": {"tied": True},
    "youtu": {"tied": True},
}
"""Traits by ``model_type`` that differ from Llama's, and defaults of keys that a config may lack."""

MODEL_TYPES = tuple(_TRAITS)
"""Families, by ``model_type``, that have a closed form."""

_FIXED_BIASES = {"gpt2", "ministral3", "mistral", "phi3", "qwen2"}
"""Families whose biases no key of a config changes."""


class _Mixture(NamedTuple):
    """Keys of a mixture's config: its number of experts, with the library's newer name, and an expert's inner size."""

    experts: tuple[str, ...]
    ffn: str


_MIXTURES = {
    "deepseek_v3": _Mixture(("n_routed_experts",), "moe_intermediate_size"),
    "gpt_oss": _Mixture(("num_local_experts",), "intermediate_size"),
    "mixtral": _Mixture(("num_local_experts",), "intermediate_size"),
    "qwen3_moe": _Mixture(("num_experts", "num_local_experts"), "moe_intermediate_size"),
}

_BIAS_KEYS: dict[str, dict[str, tuple[str, ...]]] = {
    "ernie4_5": {"use_bias": ("attention_bias", "mlp_bias")},
    "internlm3": {"qkv_bias": ("attention_bias",), "bias": ("mlp_bias",)},
}
"""Other keys of biases, and the usual ones that they stand for."""

_GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
}
"""Other names that the library takes for keys of a GPT-2 config, and the usual ones."""

_QKV_ONLY = {"glm", "glm4", "helium", "seed_oss"}
"""Families in which ``attention_bias`` leaves the output projection without one."""


def read_shape(path: str | Path) -> ModelShape:
    """Read the sizes of a model from a ``config.json``, a folder that has one, or a TOML file.

    The file's section ``[model]`` has the sizes, or names one of these as ``config`` or ``path``.
    """
    path = Path(path)
    if os.path.isdir(path):
        path = path / "config.json"
        if not os.path.exists(path):
            raise ConfigError(f"{path.parent} has no config.json; give a model's folder or its config.json")
    try:
        text = read_bytes(path, _MAX_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read the model {str(path)!r}: {error}; give a folder on this machine, or its config.json: nothing is "
            "downloaded"
        ) from error
    if path.suffix == ".toml":
        return _from_toml(text, path)
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not JSON: {error}; a model is a config.json, its folder, or a TOML file with [model]"
        ) from error
    if not isinstance(table, dict):
        raise ConfigError(f"{path} must be an object with the keys of a config.json")
    return _from_config(table, path)


def _from_toml(text: str, path: Path) -> ModelShape:
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    model = table.get("model")
    if not isinstance(model, dict):
        raise ConfigError(f"{path} has no [model] section, which gives the model's sizes")
    for key in ("config", "path"):
        if model.get(key):
            return read_shape(_hugging_face(model[key], key, path))
    # Defaults of `penstock train`, in `train.config.sections.model_section`.
    defaults = {"vocabulary": 256, "width": 128, "layers": 6, "heads": 4, "kv_heads": 2, "hidden": 352}
    of_experts = ("experts", "experts_per_token", "expert_hidden", "shared_hidden")
    of_router = ("router", "auxiliary_loss", "bias_update_rate")
    allowed = [*defaults, *of_experts, *of_router, "rotary_base", "norm_epsilon", "path", "config"]
    for key in model:
        if key not in allowed:
            raise ConfigError(
                f"{path}: no key model.{key}{nearest(key, allowed)}; [model] has {', '.join(allowed)}"
            )
    sizes = {key: _count(model, key, path, default) for key, default in defaults.items()}
    if sizes["width"] % sizes["heads"]:
        raise ConfigError(f"{path}: width {sizes['width']} does not divide into {sizes['heads']} heads")
    return ModelShape(
        name=path.stem,
        layers=sizes["layers"],
        hidden=sizes["width"],
        heads=sizes["heads"],
        kv_heads=sizes["kv_heads"],
        head_size=sizes["width"] // sizes["heads"],
        ffn=sizes["hidden"],
        vocabulary=sizes["vocabulary"],
        **_experts(model, path, sizes["hidden"]),
    )


def _experts(model: dict[str, Any], path: Path, hidden: int) -> dict[str, Any]:
    """Return the sizes of the experts of ``[model]``."""
    if model.get("experts", 0) == 0:
        return {}
    return {
        "experts": _count(model, "experts", path),
        "experts_per_token": _count(model, "experts_per_token", path, 2),
        "expert_ffn": _count(model, "expert_hidden", path, hidden),
        "shared_ffn": 0 if model.get("shared_hidden", 0) == 0 else _count(model, "shared_hidden", path),
    }


def _hugging_face(value: object, key: str, path: Path) -> Path:
    """Return the path that ``model.config`` or ``model.path`` names: as the trainer reads it, else in the file's folder."""
    if not isinstance(value, str) or value.endswith(".toml"):
        raise ConfigError(f"{path}: model.{key} must name a config.json or its folder, got {value!r}")
    named = Path(value).expanduser()
    return named if os.path.exists(named) else path.parent / named


def _from_config(table: dict[str, Any], path: Path) -> ModelShape:
    kind = table.get("model_type")
    if kind is None:
        raise ConfigError(
            f"{path}: the config has no model_type, which says of what family the model is; is it one of a language model?"
        )
    if not isinstance(kind, str) or kind not in _TRAITS:
        raise NoClosedFormError(f"{path}: {_unknown(table)}", path)
    if (reason := refused_variant(table) or refused_architecture(table)) is not None:
        raise ConfigError(f"{path}: {reason}")
    traits = dict(_TRAITS[kind])
    name = _name(table, path)
    table = {
        **{_GPT2_NAMES[key]: table[key] for key in _GPT2_NAMES if kind == "gpt2" and key in table},
        **table,
    }
    if kind == "gpt2":
        # Defaults of transformers' `GPT2Config`, which a config.json may leave out.
        hidden, heads = _count(table, "n_embd", path, 768), _count(table, "n_head", path, 12)
        layers, positions = _count(table, "n_layer", path, 12), _count(table, "n_positions", path, 1024)
        ffn = _count(table, "n_inner", path, 4 * hidden)
        kv_heads, vocabulary = heads, _count(table, "vocab_size", path, 50257)
    else:
        hidden, heads = _count(table, "hidden_size", path), _count(table, "num_attention_heads", path)
        layers, positions = _count(table, "num_hidden_layers", path), 0
        if table.get("max_position_embeddings") is not None:
            traits["context"] = _count(table, "max_position_embeddings", path)
        ffn, vocabulary = _count(table, "intermediate_size", path), _count(table, "vocab_size", path)
        kv_heads = heads if kind == "gpt_neox" else _count(table, "num_key_value_heads", path, heads)
    head_size = _count(table, "head_dim", path, hidden // heads)
    traits |= _mixture(kind, table, path)
    if kind in ("deepseek_v3", "youtu"):
        traits |= _latents(table, path)
        head_size, kv_heads = traits.pop("head_size"), heads
    elif not table.get("head_dim") and hidden % heads:
        raise ConfigError(f"{path}: hidden size {hidden} does not divide into {heads} heads")
    for key, usual in _BIAS_KEYS.get(kind, {}).items():
        table = {**dict.fromkeys(usual, table.get(key)), **table}
    bias = _flag(table, "attention_bias", path)
    if kind not in _FIXED_BIASES and bias is not None:
        traits["qkv_bias"] = bias
        traits["output_bias"] = bias and kind not in _QKV_ONLY
    for key, trait in (("mlp_bias", "ffn_bias"), ("tie_word_embeddings", "tied")):
        if (flag := _flag(table, key, path)) is not None:
            traits[trait] = flag
    if kind == "seed_oss" and (flag := _flag(table, "attention_out_bias", path)) is not None:
        traits["output_bias"] = flag
    traits["window"], traits["windowed"] = windows(kind, table, layers)
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        ffn=ffn,
        vocabulary=vocabulary,
        positions=positions,
        head_norm_weights=_head_norms(kind, heads, kv_heads, head_size),
        **traits,
    )


def _mixture(kind: str, table: dict[str, Any], path: Path) -> dict[str, int]:
    """Return the sizes of the experts of a family of mixtures; none for other families."""
    keys = _MIXTURES.get(kind)
    if keys is None:
        return {}
    # The library's own files have the second name of a number of experts.
    key = next((key for key in keys.experts if table.get(key) is not None), keys.experts[0])
    experts, each = _count(table, key, path), _count(table, keys.ffn, path)
    sizes = {
        "experts": experts,
        "experts_per_token": _count(table, "num_experts_per_tok", path),
        "expert_ffn": each,
    }
    if kind == "qwen3_moe" and (table.get("mlp_only_layers") or table.get("decoder_sparse_step", 1) != 1):
        raise NoClosedFormError(
            f"{path}: no closed form for a {kind} in which some blocks have no experts", path
        )
    if kind == "deepseek_v3":
        dense, layers = table.get("first_k_dense_replace"), _count(table, "num_hidden_layers", path)
        sizes["shared_ffn"] = each * _count(table, "n_shared_experts", path, 1)
        sizes["dense_layers"] = min(
            layers, 0 if dense == 0 else _count(table, "first_k_dense_replace", path, 3)
        )
    return sizes


def _latents(table: dict[str, Any], path: Path) -> dict[str, int]:
    """Return the sizes of attention whose queries, keys and values are expanded from latents."""
    # Defaults of transformers' `YoutuConfig` and `DeepseekV3Config`.
    rotary = _count(table, "qk_rope_head_dim", path, 64)
    without_query = "q_lora_rank" in table and table["q_lora_rank"] is None
    return {
        "query_rank": 0 if without_query else _count(table, "q_lora_rank", path, 1536),
        "kv_rank": _count(table, "kv_lora_rank", path, 512),
        "rotary_size": rotary,
        "value_size": _count(table, "v_head_dim", path, 128),
        "head_size": _count(table, "qk_nope_head_dim", path, 128) + rotary,
    }


def _unknown(table: dict[str, Any]) -> str:
    """Return why a model's family has no closed form, and what to do."""
    kind, part = table.get("model_type"), table.get("text_config")
    what = f"no closed form for a model of type {kind!r}"
    if isinstance(part, dict) and part.get("model_type") in _TRAITS:
        return f"{what}; its text part ({part['model_type']}) has one: write text_config to a config.json of its own"
    return (
        f"{what}; `penstock plan` traces a config that penstock.from_transformers takes. Give any other model as a list of "
        "layers to `penstock.profile_layers`, trace it without weights (measure=False), save the profile as JSON, and plan "
        "that; see docs/planning.md"
    )


def _head_norms(kind: str, heads: int, kv_heads: int, head_size: int) -> int:
    if kind in ("qwen3", "qwen3_moe", "gemma3_text"):
        return 2 * head_size
    if kind == "gpt_oss":
        return heads  # sinks of attention
    if kind == "apertus":
        return 2 * head_size + 2  # and the two parameters of its activation
    return (heads + kv_heads) * head_size if kind == "olmo2" else 0


def _name(table: dict[str, Any], path: Path) -> str:
    given = table.get("_name_or_path")
    if isinstance(given, str) and given:
        return given.rstrip("/").rpartition("/")[2]
    return path.parent.name if path.name == "config.json" else path.stem


def _count(table: dict[str, Any], key: str, path: Path, default: int | None = None) -> int:
    value = table.get(key)
    if value is None:
        if default is None:
            raise ConfigError(f"{path}: {key} is missing; the model's sizes depend on it")
        return default
    require_count(f"{path}: {key}", value, most=LARGEST_SIZE)
    return int(value)


def _flag(table: dict[str, Any], key: str, path: Path) -> bool | None:
    value = table.get(key)
    if value is None or isinstance(value, bool):
        return value
    raise ConfigError(f"{path}: {key} must be true or false, got {value!r}")
