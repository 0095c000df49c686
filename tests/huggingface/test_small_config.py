"""Small configs are of the same kind, with sizes that still fit each other."""

from __future__ import annotations

import pytest
from transformers import CONFIG_MAPPING

from penstock.huggingface.small_config import small_config


def test_sizes_are_few_and_options_stay():
    few = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1}
    large = CONFIG_MAPPING["llama"](rope_theta=5.0, attention_dropout=0.1, **few)
    small = small_config(large, layers=3, max_position_embeddings=7)
    assert type(small) is type(large)
    assert (small.num_hidden_layers, small.vocab_size, small.max_position_embeddings) == (3, 64, 7)
    assert (small.hidden_size, small.num_attention_heads, small.num_key_value_heads) == (
        24,
        3,
        1,
    )  # smaller ones stay
    assert (small.attention_dropout, small.hidden_act) == (0.0, large.hidden_act)
    assert small.rope_parameters == large.rope_parameters
    assert (large.num_hidden_layers, large.vocab_size) == (32, 32000)


def test_lists_by_layer_are_cut_with_the_layers():
    large = CONFIG_MAPPING["gemma2"](num_hidden_layers=6)
    small = small_config(large, layers=4)
    assert small.layer_types == large.layer_types[:4]
    assert small_config(large, layers=9).num_hidden_layers == 6


@pytest.mark.parametrize("expand", [2, 4])
def test_heads_of_mamba_2_divide_its_expanded_state(expand: int):
    small = small_config(CONFIG_MAPPING["mamba2"](expand=expand, num_heads=64 * expand))
    assert small.num_heads * small.head_dim == expand * small.hidden_size


@pytest.mark.parametrize("kind", ["qwen2_vl_text", "qwen3_vl_text"])
def test_positions_in_images_divide_half_of_a_head(kind: str):
    small = small_config(CONFIG_MAPPING[kind]())
    section = small.rope_parameters["mrope_section"]
    assert len(section) == 3
    assert min(section) > 0
    assert sum(section) == small.hidden_size // small.num_attention_heads // 2


def test_the_rotated_part_of_a_latent_head_and_its_keys_stay_in_step():
    large = CONFIG_MAPPING["deepseek_v3"]()
    small = small_config(large)
    assert small.head_dim == small.qk_rope_head_dim < large.qk_rope_head_dim
    assert small.num_key_value_heads == small.num_attention_heads < large.num_attention_heads
