from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import penstock
from penstock.base.errors import DataError
from penstock.huggingface.model_folder import INDEX, WEIGHTS
from penstock.huggingface.weights import load, save_part, write_index
from tests.support import hf_models


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    hf_models.model("llama").save_pretrained(tmp_path)
    return tmp_path


def refused(folder: Path) -> str:
    with pytest.raises(DataError) as info:
        penstock.from_transformers(folder)
    return str(info.value)


def test_missing_unknown_and_misshapen_tensors_are_all_listed(folder: Path):
    path = folder / "model.safetensors"
    state = load_file(path)
    del state["model.norm.weight"], state["model.layers.1.mlp.up_proj.weight"]
    state["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2)
    state["lm_head.weight"] = torch.zeros(60, 16)
    state["model.layers.0.input_layernorm.weight"] = torch.zeros(16, dtype=torch.int8)
    save_file(state, path)
    said = refused(folder)
    for part in (
        "model.norm.weight is missing",
        "model.layers.1.mlp.up_proj.weight is missing",
        "model.layers.9.mlp.up_proj.weight is unknown",
        "lm_head.weight has shape (60, 16), not (61, 16)",
        "model.layers.0.input_layernorm.weight is I8",
    ):
        assert part in said


def test_pickles_are_refused_by_name(folder: Path):
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    assert "pytorch_model.bin is a pickle" in refused(folder)


def test_a_folder_without_weights_or_config_is_refused(folder: Path):
    (folder / "model.safetensors").unlink()
    assert "holds no weights: neither model.safetensors nor model.safetensors.index.json" in refused(folder)
    (folder / "config.json").unlink()
    assert "cannot read" in refused(folder)


@pytest.mark.parametrize("size", [0, 4, 100, 5000])
def test_a_truncated_file_is_refused(folder: Path, size: int):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert "cannot read the weights" in refused(folder)


def test_an_index_that_does_not_fit_is_refused(tmp_path: Path):
    hf_models.model("llama").save_pretrained(tmp_path, max_shard_size="8KB")
    path = tmp_path / "model.safetensors.index.json"
    kept = path.read_text()
    places = json.loads(kept)["weight_map"]
    for text, said in (("{", "is not JSON"), ("[]", "must hold a JSON object"), ("{}", "has no weight_map")):
        path.write_text(text)
        assert said in refused(tmp_path)
    for place in ("../model.safetensors", "/etc/passwd", "..", "x.bin", 3, ""):
        path.write_text(json.dumps({"weight_map": places | {"model.norm.weight": place}}))
        assert "has no weight_map from tensor names to safetensors files beside it" in refused(tmp_path)
    name, file = next(iter(places.items()))
    renamed = {("other.weight" if each == name else each): place for each, place in places.items()}
    path.write_text(json.dumps({"weight_map": renamed}))
    said = refused(tmp_path)
    assert f"other.weight is not in {file}" in said
    assert f"{name} of {file} is not in the index" in said
    path.write_text(kept)
    (tmp_path / file).unlink()
    assert "cannot read the weights" in refused(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", '{"model_type": "nothing"}', '{"model_type": 3}'])
def test_a_file_that_is_no_config_is_refused(folder: Path, text: str):
    (folder / "config.json").write_text(text)
    assert "config.json" in refused(folder)


def test_a_config_the_library_refuses_is_refused(folder: Path):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": "wide"}))
    assert "transformers cannot use" in refused(folder)


STATE = {"embedding.weight": torch.arange(6.0).view(2, 3), "head.weight": torch.ones(4)}


def assert_is_the_state(state: dict[str, torch.Tensor]) -> None:
    assert state.keys() == STATE.keys()
    assert all(torch.equal(state[name], value) for name, value in STATE.items())


def test_one_process_writes_one_file(tmp_path: Path):
    save_part(tmp_path, STATE, 0, 1)
    write_index(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == [WEIGHTS]
    assert_is_the_state(load(tmp_path))


def test_several_write_a_part_each_and_an_index_in_hugging_faces_layout(tmp_path: Path):
    for part, name in enumerate(STATE):
        save_part(tmp_path, {name: STATE[name]}, part, 2)
    write_index(tmp_path, 2)
    parts = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*parts, INDEX]
    assert json.loads((tmp_path / INDEX).read_text()) == {
        "metadata": {"total_size": 40},
        "weight_map": {"embedding.weight": parts[0], "head.weight": parts[1]},
    }
    assert_is_the_state(load(tmp_path))


def test_a_copy_on_another_rank_is_counted_once(tmp_path: Path):
    for part in range(2):
        save_part(tmp_path, STATE, part, 2)
    write_index(tmp_path, 2)
    assert json.loads((tmp_path / INDEX).read_text())["metadata"] == {"total_size": 40}
    assert_is_the_state(load(tmp_path))


def test_views_are_saved_with_their_own_elements(tmp_path: Path):
    save_part(tmp_path, {"turned": torch.arange(6.0).view(2, 3).T}, 0, 1)
    assert load(tmp_path)["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
