"""Small configs: the same kind of model as another config's, with few and narrow layers."""

from __future__ import annotations

import copy
from typing import Any

_SIZES: dict[str, int] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "n_embd": 32,
    "d_model": 32,
    "dim": 32,
    "word_embed_proj_dim": 32,
    "embedding_size": 32,
    "embedding_dim": 32,
    "emb_dim": 32,
    "n_words": 64,
    "intermediate_size": 48,
    "n_inner": 48,
    "ffn_dim": 48,
    "ffn_hidden_size": 48,
    "dff": 48,
    "decoder_ffn_dim": 48,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "d_head": 8,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "n_ctx": 64,
    "max_seq_len": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_top_k": 2,
    "n_group": 2,
    "num_expert_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "ffn_hidden_size_expert": 16,
    "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "intermediate_size_mlp": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "qk_head_dim": 8,
    "v_head_dim": 8,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_topk": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "mamba_d_state": 8,
    "mamba_d_head": 8,
    "mamba_d_ssm": 64,
    "mamba_headdim": 8,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 4,
    "state_size": 8,
    "ssm_state_size": 8,
    "chunk_size": 4,
    "n_groups": 1,
    "attention_hidden_size": 32,
    "lru_width": 32,
    "time_step_rank": 4,
    "mamba_dt_rank": 4,
    "sliding_window": 4,
    "attention_window_size": 4,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
    "laurel_rank": 4,
    "rotary_dim": 4,
    "projection_dim": 32,
    "embed_dim": 32,
    "out_hidden_size": 32,
    "mm_tokens_per_image": 4,
    "image_token_id": 1,
    "image_token_index": 1,
}
"""Sizes by their keys in configs; a key that the config lacks, or has as None, is left out."""
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def small_config(config: Any, layers: int = 4, dropout: float = 0.0, **changes: Any) -> Any:
    """Return a config of the same kind and with the same options, with few and narrow layers.

    Args:
        layers: number of layers; a config with fewer keeps its own (default 4).
        dropout: every probability of dropout (default 0).
        changes: other values by key.
    """
    table = copy.deepcopy(config.to_dict())
    given = _shrunk(config, table, layers, dropout) | changes
    return type(config)(**given)


def _shrunk(config: Any, table: dict[str, Any], layers: int, dropout: float) -> dict[str, Any]:
    alias = {"num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "depth"}
    count = next((table[key] for key in sorted(alias) if isinstance(table.get(key), int)), layers)
    count = getattr(config, "num_hidden_layers", count)
    few = min(layers, count) if isinstance(count, int) else layers
    result: dict[str, Any] = {}
    for key, value in table.items():
        if key in ("model_type", "transformers_version", "architectures", "_name_or_path"):
            continue
        inner = vars(config).get(key)
        if hasattr(inner, "to_dict") and hasattr(inner, "model_type"):
            result[key] = _shrunk(inner, inner.to_dict(), layers, dropout)
            result[key]["model_type"] = inner.model_type
        elif key in alias and isinstance(value, int):
            result[key] = min(value, few)
        elif key in ("out_features", "out_indices", "stage_names"):
            continue  # of a backbone, by the number of its layers
        elif _is_dropout(key) and isinstance(value, int | float):
            result[key] = type(value)(dropout)
        elif key in _TOKENS:
            result[key] = None if value is None else 0
        elif key == "image_size" and "patch_size" in table:
            result[key] = _few_patches(value, table["patch_size"])
        elif key in ("fullatt_block_indexes", "deepstack_visual_indexes") and isinstance(value, list):
            result[key] = [*range(min(len(value), few))]
        elif key == "rope_parameters" and "mrope_section" in getattr(
            config, "ignore_keys_at_rope_validation", ()
        ):
            # Of a head's width that is rotated.
            half = int(4 * ((value or {}).get("partial_rotary_factor") or 1))
            result[key] = (value or {}) | {"mrope_section": [half - half // 3 * 2, half // 3, half // 3]}
        elif key.startswith("vision_feature_layer") and isinstance(value, list):
            result[key] = [max(-few, min(few, layer)) for layer in value]
        elif key == "per_layer_config" and isinstance(value, dict):
            result[key] = {layer: options for layer, options in value.items() if int(layer) < few}
        elif isinstance(value, list) and len(value) == count and count > few:
            result[key] = value[:few]
        elif key in _SIZES and isinstance(value, int) and not isinstance(value, bool):
            result[key] = min(value, _SIZES[key])
        else:
            result[key] = value
    if "image_grid_pinpoints" in table and "vision_config" in result:
        size, small = (one["vision_config"]["image_size"] for one in (table, result))
        grids = table["image_grid_pinpoints"]
        result["image_grid_pinpoints"] = [[side * small // size for side in grid] for grid in grids]
    # Sizes that follow from others stay what they were: in latent attention the rotated part of a head, and as many keys as
    # heads; in Mamba-2 the heads of the expanded state.
    if _same(table, "qk_rope_head_dim", "head_dim"):
        result["head_dim"] = result["qk_rope_head_dim"]
    if "qk_rope_head_dim" in result and _same(table, "num_attention_heads", "num_key_value_heads"):
        result["num_key_value_heads"] = result["num_attention_heads"]
    if {"expand", "num_heads", "head_dim", "state_size"} <= result.keys():
        result["num_heads"] = result["hidden_size"] * result["expand"] // result["head_dim"]
    return result


def _same(table: dict[str, Any], key: str, other: str) -> bool:
    return key in table and other in table and table[key] == table[other]


def _few_patches(size: Any, patch: Any) -> Any:
    """Return the size of an image of at most four patches a side."""
    if isinstance(size, list | tuple):
        return [_few_patches(side, patch) for side in size]
    patch = patch[0] if isinstance(patch, list | tuple) else patch
    return size if size is None or patch is None else min(size, 4 * patch)


def _is_dropout(key: str) -> bool:
    return "dropout" in key or "drop_path" in key or key.endswith(("_pdrop", "_drop"))
