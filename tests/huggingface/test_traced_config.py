"""Profiles of configs of transformers, traced without weights: figures of the closed form, and of the library's models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from penstock.huggingface.from_transformers import on_meta, read_config
from penstock.huggingface.traced_config import sizes_of, trace_config
from penstock.profile.closed_form import Workload
from penstock.profile.model_profile import Profile, of_shape, read_profile
from penstock.profile.read_shape import NoClosedFormError, read_shape
from tests.support.lanes import exhaustive, slow


def written(folder: Path, kind: str, **values: Any) -> Path:
    """Write the config.json of a kind of model, as the library writes it."""
    CONFIG_MAPPING[kind](**values).save_pretrained(folder / kind)
    return folder / kind / "config.json"


def traced(path: Path, sequence: int | None = None, dtype: str = "bf16") -> Profile:
    return trace_config(NoClosedFormError("", path), sequence, dtype)


MIXTURE = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_hidden_layers": 4, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 128,
}  # fmt: skip


@pytest.mark.parametrize("kind", [*slow("qwen3"), *exhaustive("llama", "phi3")])
def test_figures_are_those_of_the_closed_form(kind: str, tmp_path: Path):
    """Products and parameters are the same.

    Of activations the library keeps more than fused kernels: at most 8 bytes for each value that a norm takes (in fp32, and
    scaled, in bf16) and 2 for each of the gate's activation.
    """
    sizes = {
        "hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 8, "num_key_value_heads": 4,
        "num_hidden_layers": 3, "vocab_size": 512, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    path = written(tmp_path, kind, **sizes)
    shape, rows, tokens = read_shape(path), 3, 128
    load = Workload(microbatch=rows, sequence=tokens)
    profile = traced(path, tokens)
    assert (profile.parameters, profile.blocks) == (shape.parameters, shape.layers)
    expected, actual = of_shape(shape).table(load), profile.table(load)
    for number in range(shape.layers + 2):
        ours, theirs = actual.costs[actual.kinds[number]], expected.costs[expected.kinds[number]]
        assert (ours.model_flops, ours.attention_flops) == (theirs.model_flops, theirs.attention_flops)
        assert ours.parameters == theirs.parameters
        assert ours.output_bytes == theirs.output_bytes
        if expected.roles[number] == "block":
            query, key, _ = shape.attention_sizes
            normed = 2 * shape.hidden + (query + key if kind == "qwen3" else 0)
            more = rows * tokens * (8 * normed + 2 * shape.ffn)
            assert theirs.saved_bytes < ours.saved_bytes < theirs.saved_bytes + more


@pytest.mark.exhaustive
@pytest.mark.parametrize("tied", [True, False])
def test_experts_count_the_products_of_the_chosen_ones_and_all_parameters(tied: bool, tmp_path: Path):
    path = written(tmp_path, "mixtral", tie_word_embeddings=tied, **MIXTURE)
    profile = traced(path, 32)
    rows, hidden, experts, ffn = 32, 64, 8, 128
    block = profile.kinds[profile.layers[1][2]].at(1)
    attention = hidden * (64 + 2 * 32 + 64)
    assert block.model_flops - block.attention_flops == 2 * rows * (
        attention + hidden * experts + 2 * 3 * hidden * ffn
    )
    assert block.parameters == attention + hidden * experts + experts * 3 * hidden * ffn + 2 * hidden
    assert block.output_bytes == traced(path, 32, "fp8").kinds[1].at(1).output_bytes == rows * hidden * 2
    assert traced(path, 32, "fp32").kinds[1].at(1).output_bytes == rows * hidden * 4
    assert (profile.blocks, profile.parameters) == sizes_of(NoClosedFormError("", path))
    assert profile.table(Workload(microbatch=1, sequence=32)).tied == profile.tied == tied * 64 * 128
    profile.save(tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == profile


def test_samples_are_as_long_as_the_config_allows(tmp_path: Path):
    path = written(tmp_path, "mixtral", max_position_embeddings=48, **{**MIXTURE, "num_hidden_layers": 2})
    assert traced(path).sequence == 48


def test_infinite_numbers_of_the_library_are_read(tmp_path: Path):
    path = written(tmp_path, "mamba2", num_hidden_layers=2)
    assert "__float__" in path.read_text()
    assert read_config(path).time_step_limit == [0.0, float("inf")]


FULL = {
    "mixtral": {"num_hidden_layers": 3},
    "deepseek_v3": {"num_hidden_layers": 5},  # three dense blocks, and two with experts
    "qwen3_moe": {"num_hidden_layers": 3},
    "gpt_oss": {"num_hidden_layers": 4},
    "mamba2": {"num_hidden_layers": 3},
}


@pytest.mark.parametrize(
    "kind", [*slow("deepseek_v3"), *exhaustive("mixtral", "qwen3_moe", "gpt_oss", "mamba2")]
)
def test_layers_of_full_size_need_no_memory(kind: str, tmp_path: Path):
    """Two blocks of DeepSeek-V3 with experts have 46 GB of weights in 16 bits."""
    path = written(tmp_path, kind, **FULL[kind])
    profile = traced(path)
    model = on_meta(read_config(path), torch.bfloat16)
    assert profile.parameters == sum(parameter.numel() for parameter in model.parameters())
    blocks = [profile.kinds[kind].at(1) for _, role, kind in profile.layers if role == "block"]
    assert len(blocks) == FULL[kind]["num_hidden_layers"]
    active = blocks[-1].model_flops - blocks[-1].attention_flops
    if kind != "mamba2":  # whose scan is products of activations
        assert active < 2 * 2048 * blocks[-1].parameters / 2
