from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from penstock.base.errors import DataError
from penstock.train.config.sections.data_section import DataConfig
from penstock.train.data.file_formats import find_files


def of(path: Path, **config: str) -> str:
    return find_files(DataConfig(path=str(path), **config)).format


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("chat.JSON", "one object a line"),
        ("table.csv", r"as \.jsonl or \.parquet"),
        ("texts.jsonl.zst", "unpack it first"),
        ("texts.zip", "unpack it first"),
        ("weights.safetensors", r"\.txt or \.jsonl"),
        ("photo.png", r"\.txt or \.jsonl"),
        ("data-00000-of-00001.arrow", r"dataset_info\.json"),
    ],
)
def test_files_that_are_no_text_are_refused_by_name(tmp_path: Path, name: str, hint: str):
    (tmp_path / name).write_text("not really\n")
    (tmp_path / "a.txt").write_text("text")
    for path in (tmp_path / name, tmp_path):
        with pytest.raises(
            DataError, match=rf"{name} is a .* file, which is not understood.*{hint}.*data\.pattern"
        ):
            of(path)
    assert of(tmp_path, pattern="*.txt") == "text"
    assert of(tmp_path / name, format="text") == "text"


def test_files_that_are_no_text_are_refused_by_content(tmp_path: Path):
    cases = {
        "one": (gzip.compress(b"text"), "a gzip file"),
        "two.txt": (b"te\0xt", "a binary file"),
        "three.txt": (b'{"text": "a"}\n{"text": "b"}\n', "JSON objects as lines; set data.format=jsonl"),
        "four": (b"PAR1 and so on", "a Parquet file"),
        "five.txt": ("text".encode("utf-16"), "a binary file"),
    }
    for name, (content, said) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"{name} (is|has) {said}"):
            of(tmp_path / name)
    assert of(tmp_path / "three.txt", format="jsonl") == "jsonl"


@pytest.mark.parametrize(
    "content", ["{", "{% for a in b %}\n{% endfor %}", '{"a": 1}\ntext', "[1, 2]", "", "# {}\n"]
)
def test_text_with_braces_is_text(tmp_path: Path, content: str):
    (tmp_path / "a.txt").write_text(content)
    assert of(tmp_path) == "text"


def test_formats_are_found_by_name(tmp_path: Path):
    for name, expected in {
        "a.jsonl": "jsonl",
        "a.ndjson": "jsonl",
        "a.parquet": "parquet",
        "a.py": "text",
    }.items():
        (tmp_path / name).write_text('{"text": "a"}\n' if expected != "text" else "text")
        assert of(tmp_path / name) == expected
    np.save(tmp_path / "a.npy", np.arange(5))
    assert of(tmp_path / "a.npy") == "text"


def test_several_formats_in_a_folder_are_refused(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "README.md").write_text("read me")
    with pytest.raises(
        DataError, match=r"several formats \(README.md and a.jsonl\); set data.pattern .* '\*.jsonl'"
    ):
        of(tmp_path)
    assert of(tmp_path, pattern="*.jsonl") == "jsonl"


def test_several_splits_in_a_folder_are_refused(tmp_path: Path):
    for name in ("train-00000-of-00001.jsonl", "test-00000-of-00001.jsonl"):
        (tmp_path / name).write_text('{"text": "a"}\n')
    with pytest.raises(DataError, match=r"several splits .*; set data.pattern .* 'train\*.jsonl'"):
        of(tmp_path)
    assert of(tmp_path, pattern="train*") == "jsonl"


def test_a_folder_that_datasets_did_not_save_is_refused_as_one(tmp_path: Path):
    with pytest.raises(DataError, match=r"is not a folder that `datasets` saved"):
        of(tmp_path, format="datasets")
