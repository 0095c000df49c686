"""Saved adapters: peft loads them with the pipeline's numbers, under peft's own names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import penstock
from penstock.base.errors import ConfigError
from penstock.huggingface.adapters.supported import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from penstock.huggingface.save import COPIED_FILES
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import hf_models, peft_models

CONFIGS = {
    "plain": ("llama", {}),
    "dora": ("llama", {"use_dora": True, "modules_to_save": ["lm_head", "norm"]}),
    "biases": ("gpt2", {"bias": "all"}),
    "rslora": ("gemma2", {"use_rslora": True}),
}


def outputs(pipe: penstock.Pipeline) -> torch.Tensor:
    tokens, labels, mask = hf_models.batch()
    result = pipe.evaluate(tokens, labels, attention_mask=mask, outputs=True)
    return torch.cat(list(result.outputs)) if isinstance(result.outputs, list | tuple) else result.outputs


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "dora" else pytest.mark.slow) for n in CONFIGS]
)
def test_peft_loads_the_folder_and_gives_the_same_logits(name: str, tmp_path: Path):
    family, changes = CONFIGS[name]
    base = peft_models.base_folder(tmp_path, family, tied=family == "gemma2")
    config = peft_models.config(family, **changes)
    with peft_models.pipeline(penstock.from_transformers(base, adapters=config)) as pipe:
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
    with peft_models.pipeline(penstock.from_transformers(base, adapters=peft_models.config())) as pipe:
        peft_models.move(pipe)
        expected = peft_models.step(pipe)
        penstock.save_adapters(pipe, tmp_path / "saved")
    again = penstock.from_transformers(base, adapters=tmp_path / "saved")
    with peft_models.pipeline(again, 4) as pipe:
        loss, gradients = peft_models.step(pipe)
    assert loss == expected[0]
    assert peft_models.same(gradients, expected[1])


def save_from_processes(rank: int, base: str, folder: str) -> None:
    torch.set_num_threads(1)
    layers = penstock.from_transformers(base, adapters=peft_models.config(), seed=5)
    with peft_models.pipeline(layers, None) as pipe:
        peft_models.move(pipe)
        penstock.save_adapters(pipe, f"{folder}/adapters")
        penstock.save_transformers(pipe, f"{folder}/merged", base)


def test_processes_write_one_file_and_leave_no_parts(processes: LocalProcesses, tmp_path: Path):
    base = peft_models.base_folder(tmp_path)
    (base / "tokenizer.json").write_text("{}")
    processes.run(2, save_from_processes, str(base), str(tmp_path), timeout=300)
    layers = penstock.from_transformers(base, adapters=peft_models.config(), seed=5)
    with peft_models.pipeline(layers, 1) as pipe:
        peft_models.move(pipe)
        penstock.save_adapters(pipe, tmp_path / "one")
        expected = outputs(pipe)
    names = {path.name for path in (tmp_path / "adapters").iterdir()}
    assert names == {path.name for path in (tmp_path / "one").iterdir()}
    assert names - {*COPIED_FILES} == {ADAPTER_CONFIG, ADAPTER_WEIGHTS}
    assert "tokenizer.json" in names
    for name in names:
        assert (tmp_path / "adapters" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(peft_models.logits(merged), expected, atol=1e-4)


def test_weights_that_the_folder_would_lose_are_refused(tmp_path: Path):
    base = peft_models.base_folder(tmp_path)
    with peft_models.pipeline(penstock.from_transformers(base, adapters=peft_models.config())) as pipe:
        dict(pipe.named_parameters())["model.norm.weight"].requires_grad_(True)
        with pytest.raises(ConfigError, match=r"would lose them: model.norm.weight; freeze them"):
            penstock.save_adapters(pipe, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_model_without_adapters_and_a_folder_that_cannot_be_are_refused(tmp_path: Path):
    base = peft_models.base_folder(tmp_path)
    with (
        peft_models.pipeline(penstock.from_transformers(base)) as pipe,
        pytest.raises(ConfigError, match=r"no adapters that penstock\.from_transformers knows"),
    ):
        penstock.save_adapters(pipe, tmp_path / "saved")
    (tmp_path / "file").write_text("")
    with (
        peft_models.pipeline(penstock.from_transformers(base, adapters=peft_models.config())) as pipe,
        pytest.raises(ConfigError, match="cannot make the folder"),
    ):
        penstock.save_adapters(pipe, tmp_path / "file" / "x")
