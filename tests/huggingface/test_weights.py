from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from penstock.base.errors import DataError
from penstock.huggingface.model_folder import INDEX, WEIGHTS
from penstock.huggingface.weights import load, save_part, write_index

STATE = {"embedding.weight": torch.arange(6.0).view(2, 3), "head.weight": torch.ones(4)}


def save_split(folder: Path) -> None:
    for part, name in enumerate(STATE):
        save_part(folder, {name: STATE[name]}, part, 2)
    write_index(folder, 2)


def assert_is_the_state(state: dict[str, torch.Tensor]) -> None:
    assert state.keys() == STATE.keys()
    assert all(torch.equal(state[name], value) for name, value in STATE.items())


def test_one_process_writes_one_file(tmp_path: Path):
    save_part(tmp_path, STATE, 0, 1)
    write_index(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == [WEIGHTS]
    assert_is_the_state(load(tmp_path))


def test_several_write_a_part_each_and_an_index_in_hugging_faces_layout(tmp_path: Path):
    save_split(tmp_path)
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


def test_no_weights_is_an_error(tmp_path: Path):
    with pytest.raises(DataError, match="holds no weights"):
        load(tmp_path)


def test_a_missing_part_is_an_error(tmp_path: Path):
    save_split(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(DataError, match=r"cannot read the weights .*00002-of-00002"):
        load(tmp_path)


def test_a_damaged_file_is_an_error(tmp_path: Path):
    (tmp_path / WEIGHTS).write_bytes(b"\x80\x04not safetensors")
    with pytest.raises(DataError, match="cannot read the weights"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "must hold a JSON object"),
        ('{"weight_map": 3}', "has no weight_map"),
        ('{"weight_map": {"a": "../elsewhere.safetensors"}}', "to safetensors files beside it"),
        (
            '{"weight_map": {"other": "model-00001-of-00002.safetensors"}}',
            "other is not in .*; embedding.weight of .* is not in the index",
        ),
    ],
)
def test_an_index_that_does_not_fit_is_an_error(tmp_path: Path, index: str, said: str):
    save_split(tmp_path)
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(DataError, match=said):
        load(tmp_path)
