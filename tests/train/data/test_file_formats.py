from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from penstock.base.errors import DataError
from penstock.train.config.sections import DataConfig
from penstock.train.data.file_formats import find_files


def of(path: Path, **config: str) -> str:
    return find_files(DataConfig(path=str(path), **config)).format


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("chat.JSON", "save_to_disk"),
        ("chats.parquet", "save_to_disk"),
        ("texts.jsonl.zst", "unpack it first"),
        ("weights.safetensors", r"\.txt files, or tokens"),
        ("data-00000-of-00001.arrow", "save_to_disk"),
    ],
)
def test_files_that_are_no_text_are_refused_by_name(tmp_path: Path, name: str, hint: str):
    (tmp_path / name).write_text("not really\n")
    (tmp_path / "a.txt").write_text("text")
    for path in (tmp_path / name, tmp_path):
        said = rf"{name} is a .* file, which is not understood.*{hint}.*data\.pattern"
        with pytest.raises(DataError, match=said):
            of(path)
    assert of(tmp_path, pattern="*.txt") == "text"
    assert of(tmp_path / name, format="text") == "text"


def test_files_that_are_no_text_are_refused_by_content(tmp_path: Path):
    cases = {
        "one": (gzip.compress(b"text"), "a gzip file"),
        "two.txt": (b"te\0xt", "a binary file"),
        "three.txt": (
            b'{"text": "a"}\n{"text": "b"}\n',
            "JSON objects as lines; read its records with `datasets`",
        ),
        "four": (b"PAR1 and so on", "a Parquet file"),
        "five.txt": ("text".encode("utf-16"), "a binary file"),
    }
    for name, (content, said) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"{name} (is|has) {said}"):
            of(tmp_path / name)
    assert of(tmp_path / "three.txt", format="text") == "text"


@pytest.mark.parametrize(
    "content", ["{", "{% for a in b %}\n{% endfor %}", '{"a": 1}\ntext', "[1, 2]", "", "# {}\n"]
)
def test_text_with_braces_is_text(tmp_path: Path, content: str):
    (tmp_path / "a.txt").write_text(content)
    assert of(tmp_path) == "text"


def test_token_files_and_text_may_be_in_one_folder(tmp_path: Path):
    (tmp_path / "a.py").write_text("text")
    np.save(tmp_path / "a.npy", np.arange(5))
    assert [path.name for path in find_files(DataConfig(path=str(tmp_path))).paths] == ["a.npy", "a.py"]


def test_a_folder_that_datasets_did_not_save_is_refused_as_one(tmp_path: Path):
    with pytest.raises(DataError, match=r"is not a folder that `datasets` saved"):
        of(tmp_path, format="datasets")
