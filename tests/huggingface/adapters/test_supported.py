from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import penstock
from penstock.base.errors import ConfigError, DataError
from penstock.huggingface.adapters.fill import load
from penstock.huggingface.adapters.supported import ADAPTER_CONFIG, ADAPTER_WEIGHTS, require_supported
from penstock.huggingface.model_folder import read_header
from tests.support import peft_models


def test_other_types_than_lora_are_refused_by_name():
    from peft import IA3Config, PromptTuningConfig

    for config, kind in (
        (IA3Config(target_modules=["q_proj"], feedforward_modules=[]), "IA3"),
        (PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"), "PROMPT_TUNING"),
    ):
        with pytest.raises(ConfigError, match=f"peft's type LORA, got {kind}"):
            require_supported(config, new=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"trainable_token_indices": [1, 2]},
        {"layer_replication": [(0, 4), (2, 4)]},
        {"alora_invocation_tokens": [3], "task_type": "CAUSAL_LM"},
        {"target_parameters": ["weight"]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_is_more_than_low_rank_matrices_is_refused_by_its_key(changes: dict):
    with pytest.raises(ConfigError, match=f"{next(iter(changes))} of the LoraConfig is set"):
        require_supported(peft_models.config(**changes), new=True)


def test_initial_weights_that_change_the_base_are_refused():
    for first in ("pissa", "olora"):
        with pytest.raises(ConfigError, match=f"init_lora_weights must be .* got '{first}'"):
            require_supported(peft_models.config(init_lora_weights=first), new=False)
    require_supported(peft_models.config(init_lora_weights=False), new=False)
    with pytest.raises(ConfigError, match="init_lora_weights must be True or 'gaussian', got False"):
        require_supported(peft_models.config(init_lora_weights=False), new=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("saved")
    base = peft_models.base_folder(root)
    with peft_models.adapted(base) as pipe:
        penstock.save_adapters(pipe, root / "adapters")
    return base, root / "adapters"


def damaged(saved: tuple[Path, Path], folder: Path, change) -> str:
    shutil.copytree(saved[1], folder)
    change(folder)
    with pytest.raises((ConfigError, DataError)) as error:
        penstock.from_transformers(saved[0], adapters=folder)
    return str(error.value)


def test_a_folder_that_does_not_fit_is_refused_with_all_its_tensors(saved: tuple[Path, Path], tmp_path: Path):
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"

    def swap(folder: Path) -> None:
        state = load_file(folder / ADAPTER_WEIGHTS)
        state["surplus"] = state.pop(name)
        state[name.replace("_A", "_B")] = state["surplus"].clone()
        save_file(state, folder / ADAPTER_WEIGHTS)

    text = damaged(saved, tmp_path / "a", swap)
    assert f"{name} is missing" in text
    assert "surplus is unknown" in text
    assert re.search(r"lora_B.weight has shape \(4, 16\), not \(24, 4\)", text)


def test_what_the_folder_has_of_a_module_is_loaded_and_the_rest_stays(tmp_path: Path):
    save_file({"a": torch.full((3, 2), 5.0), "b": torch.ones(1)}, tmp_path / ADAPTER_WEIGHTS)
    layer = nn.Linear(2, 3)
    bias = layer.bias.detach().clone()
    adapters = SimpleNamespace(saved_names={"block.weight": "a", "other.weight": "b"})
    load(layer, "block", adapters, read_header(tmp_path / ADAPTER_WEIGHTS))
    assert layer.weight.eq(5.0).all()
    assert torch.equal(layer.bias, bias)


def of_another_type(folder: Path) -> None:
    table = json.loads((folder / ADAPTER_CONFIG).read_text())
    (folder / ADAPTER_CONFIG).write_text(json.dumps({**table, "peft_type": "NONE"}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda folder: (folder / ADAPTER_CONFIG).unlink(),
            "is not a folder of adapters: it has no adapter_config.json",
        ),
        (
            lambda folder: (folder / ADAPTER_WEIGHTS).rename(folder / "adapter_model.bin"),
            "adapter_model.bin is a pickle, which can run code",
        ),
        (of_another_type, "peft cannot use"),
        (lambda folder: (folder / ADAPTER_CONFIG).write_text("{"), "is not JSON"),
        (lambda folder: (folder / ADAPTER_WEIGHTS).write_bytes(b"cut"), "adapter_model.safetensors"),
    ],
)
def test_missing_and_broken_files_are_refused(
    saved: tuple[Path, Path], tmp_path: Path, change: Any, said: str
):
    assert said in damaged(saved, tmp_path / "a", change)
