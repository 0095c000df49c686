from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import penstock
from penstock.base.errors import ConfigError
from tests.support import peft_models


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        pytest.param("llama", {}, marks=pytest.mark.slow),
        pytest.param("llama", {"use_dora": True, "modules_to_save": ["norm"]}, marks=pytest.mark.slow),
        ("gpt2", {"bias": "all"}),
        pytest.param("gemma2", {"use_rslora": True}, marks=pytest.mark.slow),
    ],
)
def test_the_merged_folder_is_what_peft_merges_and_the_pipeline_is_unchanged(
    family: str, changes: dict, tmp_path: Path
):
    base = peft_models.base_folder(tmp_path, family, tied=family != "llama")
    config = peft_models.config(family, **changes)
    with peft_models.pipeline(penstock.from_transformers(base, adapters=config)) as pipe:
        peft_models.move(pipe)
        before = peft_models.step(pipe)
        penstock.save_transformers(pipe, tmp_path / "merged", base)
        penstock.save_adapters(pipe, tmp_path / "adapters")
        after = peft_models.step(pipe)
    assert before[0] == after[0]
    assert peft_models.same(before[1], after[1])
    expected = peft_models.with_peft(base, tmp_path / "adapters", trainable=False).merge_and_unload()
    merged, info = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert peft_models.same(dict(merged.named_parameters()), dict(expected.named_parameters()))
    assert torch.equal(peft_models.logits(merged), peft_models.logits(expected))


def test_an_adapter_that_is_not_finite_is_not_merged(tmp_path: Path):
    base = peft_models.base_folder(tmp_path)
    with peft_models.pipeline(penstock.from_transformers(base, adapters=peft_models.config())) as pipe:
        for name, parameter in pipe.named_parameters():
            if name.endswith("layers.2.mlp.up_proj.lora_B.default.weight"):
                parameter.data.fill_(torch.nan)
        with pytest.raises(ConfigError, match=r"cannot merge the adapter of model.layers.2.mlp.up_proj"):
            penstock.save_transformers(pipe, tmp_path / "merged", base)
    assert not (tmp_path / "merged").exists()
