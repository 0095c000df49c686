"""Saved adapters: peft loads them with the pipeline's numbers, under peft's own names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import penstock
from penstock.base.errors import ConfigError
from penstock.huggingface.adapters.supported import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tests.support import hf_models, peft_models
from tests.support.lanes import exhaustive, slow


def outputs(pipe: penstock.Pipeline) -> torch.Tensor:
    tokens, labels, mask = hf_models.batch()
    result = pipe.evaluate(tokens, labels, attention_mask=mask, outputs=True)
    return torch.cat(list(result.outputs)) if isinstance(result.outputs, list | tuple) else result.outputs


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"use_dora": True, "modules_to_save": ["lm_head", "norm"]}),
        *exhaustive(("llama", {}), ("gpt2", {"bias": "all"}), ("gemma2", {"use_rslora": True})),
    ],
)
def test_peft_loads_the_folder_and_gives_the_same_logits(
    family: str, changes: dict[str, Any], tmp_path: Path
):
    base = peft_models.base_folder(tmp_path, family, tied=family == "gemma2")
    with peft_models.adapted(base, 2, family, **changes) as pipe:
        peft_models.move(pipe)
        expected = outputs(pipe)
        penstock.save_adapters(pipe, tmp_path / "saved")
    model = peft_models.with_peft(base, tmp_path / "saved", trainable=False)
    assert torch.equal(peft_models.logits(model), expected)

    model.save_pretrained(tmp_path / "by peft")
    ours, theirs = (load_file(tmp_path / folder / ADAPTER_WEIGHTS) for folder in ("saved", "by peft"))
    assert peft_models.same(ours, theirs)
    written = json.loads((tmp_path / "saved" / ADAPTER_CONFIG).read_text())
    assert written["base_model_name_or_path"] == str(base.resolve())
    assert written["inference_mode"] is True
    assert isinstance(written["target_modules"], str) or written["target_modules"] == sorted(
        written["target_modules"]
    )


def test_saved_adapters_are_trained_further(tmp_path: Path):
    base = peft_models.base_folder(tmp_path)
    with peft_models.adapted(base) as pipe:
        peft_models.move(pipe)
        expected = peft_models.step(pipe)
        penstock.save_adapters(pipe, tmp_path / "saved")
    again = penstock.from_transformers(base, adapters=tmp_path / "saved")
    with hf_models.pipeline(again, 4) as pipe:
        loss, gradients = peft_models.step(pipe)
    assert loss == expected[0]
    assert peft_models.same(gradients, expected[1])


def test_what_cannot_be_saved_is_refused(tmp_path: Path):
    base = peft_models.base_folder(tmp_path)
    with (
        hf_models.pipeline(base) as pipe,
        pytest.raises(ConfigError, match=r"no adapters that penstock\.from_transformers knows"),
    ):
        penstock.save_adapters(pipe, tmp_path / "saved")
    (tmp_path / "file").write_text("")
    with peft_models.adapted(base) as pipe:
        with pytest.raises(ConfigError, match="cannot make the folder"):
            penstock.save_adapters(pipe, tmp_path / "file" / "x")
        dict(pipe.named_parameters())["model.norm.weight"].requires_grad_(True)
        with pytest.raises(ConfigError, match=r"would lose them: model.norm.weight; freeze them"):
            penstock.save_adapters(pipe, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt2", {"bias": "all"}),
        *slow(("llama", {"use_dora": True, "modules_to_save": ["norm"]})),
        *exhaustive(("llama", {}), ("gemma2", {"use_rslora": True})),
    ],
)
def test_the_merged_folder_is_what_peft_merges_and_the_pipeline_is_unchanged(
    family: str, changes: dict, tmp_path: Path
):
    base = peft_models.base_folder(tmp_path, family, tied=family != "llama")
    with peft_models.adapted(base, 2, family, **changes) as pipe:
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
    with peft_models.adapted(base) as pipe:
        for name, parameter in pipe.named_parameters():
            if name.endswith("layers.2.mlp.up_proj.lora_B.default.weight"):
                parameter.data.fill_(torch.nan)
        with pytest.raises(ConfigError, match=r"cannot merge the adapter of model.layers.2.mlp.up_proj"):
            penstock.save_transformers(pipe, tmp_path / "merged", base)
    assert not (tmp_path / "merged").exists()
