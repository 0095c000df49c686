from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig

import penstock
from penstock.base.errors import ConfigError
from penstock.huggingface.save import COPIED_FILES
from tests.support import hf_models


def pipeline(like: object, ranks: int = 1) -> penstock.Pipeline:
    return hf_models.pipeline(like, ranks)


def logits_of(folder: Path) -> torch.Tensor:
    tokens, _, mask = hf_models.batch()
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model(tokens, attention_mask=mask).logits


# Tied weights are one, matrices that lie the other way, and weights of another name.
@pytest.mark.parametrize("family", hf_models.by_lane("gemma", "gpt2"))
def test_transformers_loads_a_saved_folder_and_gives_the_same_logits(family: str, tmp_path: Path):
    tied = family.startswith("gemma")
    net = hf_models.model(family, tied=tied).eval()
    tokens, _, mask = hf_models.batch()
    with pipeline(net) as pipe:
        penstock.save_transformers(pipe, tmp_path, net)
    expected = net(tokens, attention_mask=mask).logits
    assert torch.equal(logits_of(tmp_path), expected)
    again = penstock.from_transformers(tmp_path)
    assert torch.equal(hf_models.in_sequence(again, tokens, attention_mask=mask), expected)
    assert len(load_file(tmp_path / "model.safetensors")) == len(net.state_dict()) - tied


def test_files_beside_the_weights_are_copied(tmp_path: Path):
    source, folder = tmp_path / "source", tmp_path / "saved"
    net = hf_models.model("llama")
    net.generation_config = GenerationConfig(max_new_tokens=7)
    net.save_pretrained(source)
    for name in set(COPIED_FILES) - {"generation_config.json"}:
        (source / name).write_text(f"content of {name}")
    with pipeline(source) as pipe:
        penstock.save_transformers(pipe, folder, source)
    for name in COPIED_FILES:
        assert (folder / name).read_bytes() == (source / name).read_bytes()
    written, given = (json.loads((place / "config.json").read_text()) for place in (folder, source))
    assert written == given
    with pipeline(net) as pipe:
        penstock.save_transformers(pipe, tmp_path / "third", net)
    assert GenerationConfig.from_pretrained(tmp_path / "third").max_new_tokens == 7


def test_a_save_over_an_earlier_one_leaves_none_of_its_weights(tmp_path: Path):
    net = hf_models.model("llama")
    net.save_pretrained(tmp_path, max_shard_size="8KB")
    with torch.no_grad():
        net.lm_head.weight.mul_(2)
    with pipeline(net) as pipe:
        penstock.save_transformers(pipe, tmp_path, net)
    assert [path.name for path in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
    tokens, _, mask = hf_models.batch()
    assert torch.equal(logits_of(tmp_path), net.eval()(tokens, attention_mask=mask).logits)


def test_a_like_that_is_not_the_layers_origin_is_refused(tmp_path: Path):
    with pipeline(hf_models.model("llama")) as pipe:
        with pytest.raises(ConfigError, match="like must be the model, the config or the folder"):
            penstock.save_transformers(pipe, tmp_path, 3)
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match="cannot make the folder"):
            penstock.save_transformers(pipe, tmp_path / "file" / "x", hf_models.config("llama"))


def test_a_model_with_other_modules_is_refused_by_name_until_its_own_are_back(tmp_path: Path):
    net = hf_models.model("llama")
    for block in net.model.layers:
        block.mlp.up_proj = nn.Sequential(block.mlp.up_proj)
    with pipeline(net) as pipe:
        for like in (net, net.config):
            with pytest.raises(ConfigError) as told:
                penstock.save_transformers(pipe, tmp_path / "new", like)
            for n in range(4):
                assert f"model.layers.{n}.mlp.up_proj.weight is missing" in str(told.value)
            assert "model.layers.0.mlp.up_proj.0.weight is unknown" in str(told.value)
            assert "merge_and_unload" in str(told.value)
        assert not (tmp_path / "new").exists()
    for block in net.model.layers:
        block.mlp.up_proj = block.mlp.up_proj[0]
    with pipeline(net) as pipe:
        penstock.save_transformers(pipe, tmp_path / "new", net)
    logits_of(tmp_path / "new")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"vocab_size": 62}, r"model.embed_tokens.weight has shape \(61, 16\), not \(62, 16\)"),
        ({"tied": True}, r"lm_head.weight is a separate weight, which the config ties"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], said: str):
    with pipeline(hf_models.model("llama")) as pipe, pytest.raises(ConfigError, match=said):
        penstock.save_transformers(pipe, tmp_path / "new", hf_models.config("llama", **change))
