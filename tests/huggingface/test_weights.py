from __future__ import annotations

import json
from pathlib import Path

import torch

from penstock.huggingface.model_folder import INDEX, WEIGHTS
from penstock.huggingface.weights import load, save_part, write_index

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
