"""Every format gives the same records; broken ones are named by file and place."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from penstock.base.errors import ConfigError, DataError
from penstock.train.config.sections.data_section import DataConfig
from penstock.train.data.file_formats import find_files
from penstock.train.data.records.record_store import RecordStore
from penstock.train.data.token_cache import TokenCache
from penstock.train.data.tokenizer import ByteTokenizer
from tests.support import records


def stored(path: Path, cache: Path | None = None, **config: Any) -> RecordStore:
    data = DataConfig(path=str(path), **config)
    return TokenCache(cache, ByteTokenizer(), None).records(find_files(data), data)


def tokens(store: RecordStore) -> list[int]:
    return store.read(0, int(store.starts[-1])).tolist()


@pytest.mark.parametrize("kind", ["texts", "completions"])
def test_every_format_gives_the_same_tokens(tmp_path: Path, kind: str, datasets: ModuleType):
    rows = getattr(records, kind)(300)
    lines = stored(records.write_lines(tmp_path / "a.jsonl", rows))
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=70)
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(tmp_path / "splits")
    for name in ("a.parquet", "saved", "splits"):
        other = stored(tmp_path / name)
        assert tokens(other) == tokens(lines)
        assert np.array_equal(other.starts, lines.starts)
    assert lines.kind == kind.removesuffix("s")
    assert len(lines) == 300


def test_a_split_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path, datasets: ModuleType):
    saved = datasets.Dataset.from_list(records.texts(3))
    datasets.DatasetDict({"training": saved, "test": saved}).save_to_disk(tmp_path / "splits")
    with pytest.raises(
        ConfigError, match=r"no split 'train' \(did you mean 'training'\?\); set data.split to one of"
    ):
        stored(tmp_path / "splits")
    assert len(stored(tmp_path / "splits", split="test")) == 3


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": "a"', r"line 3 is not a JSON object"),
        ("[1, 2]", r"line 3 must be a JSON object, got '\[1, 2\]'"),
        ('{"text": 5}', r"line 3: 'text' must be text, got 5"),
        ('{"text": null}', r"line 3: 'text' must be text, got None"),
        (
            '{"body": "a"}',
            r"line 3 has no field 'text', only 'body'; every record of a source must be of kind text",
        ),
        ('{"text": "a\\ud800b"}', r"line 3 has half a character"),
        (
            f'{{"text": "a", "more": {{"id": [-{"1" * 4301}]}}}}',
            r"line 3: 'more' has a whole number of more than 4,300 digits; write it in quotes, as text, or leave it out$",
        ),
        (b'{"text": "\xff"}', r"line 3 is not a JSON object: 'utf-8' codec can't decode"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str | bytes, said: str):
    good = b'{"text": "abc"}\n\n'
    (tmp_path / "a.jsonl").write_bytes(
        good + (line if isinstance(line, bytes) else line.encode()) + b"\n" + good
    )
    with pytest.raises(DataError, match=f"a.jsonl, {said}"):
        stored(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (gzip.compress(b'{"text": "abc"}'), "packed by gzip: unpack it first"),
        (json.dumps([{"text": "abc"}]).encode(), r"jq -c '\.\[\]' FILE.json > FILE.jsonl"),
        (json.dumps({"text": "abc"}, indent=1).encode(), r"each line must be one object of its own"),
    ],
)
def test_another_format_under_this_name_is_refused_with_advice(tmp_path: Path, content: bytes, said: str):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=f"a.jsonl, line 1 .*{said}"):
        stored(tmp_path / "a.jsonl")


def test_marks_of_other_systems_are_read(tmp_path: Path):
    plain = stored(records.write_lines(tmp_path / "a.jsonl", records.texts(5)))
    content = (tmp_path / "a.jsonl").read_bytes()
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + content.replace(b"\n", b"\r\n").rstrip())
    assert tokens(stored(tmp_path / "b.jsonl")) == tokens(plain)


def test_unknown_fields_are_refused_with_what_to_set(tmp_path: Path):
    path = records.write_lines(tmp_path / "a.jsonl", [{"content": "abc", "id": 1}])
    with pytest.raises(
        DataError, match=r"line 1 has the fields 'content', 'id', and none of .*; set data.text_field"
    ):
        stored(path)
    assert len(stored(path, text_field="content")) == 1
    both = records.write_lines(tmp_path / "b.jsonl", [{"text": "abc", "prompt": "a", "completion": "b"}])
    with pytest.raises(DataError, match=r"could be of kind completion or text .*; set data.record"):
        stored(both)
    assert stored(both, record="text").kind == "text"


def test_empty_and_untrainable_records_are_counted(tmp_path: Path):
    rows = [{"prompt": "", "completion": ""}, {"prompt": "a", "completion": "b"}]
    store = stored(records.write_lines(tmp_path / "a.jsonl", rows))
    assert (len(store), store.files[0].empty, store.files[0].untrained) == (1, 1, 0)


def test_a_damaged_parquet_file_is_refused(tmp_path: Path):
    parquet.write_table(pa.Table.from_pylist(records.texts(50)), tmp_path / "a.parquet")
    data = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(data[:-20])
    with pytest.raises(DataError, match=r"cannot read .*a.parquet"):
        stored(tmp_path / "a.parquet")


def test_the_cache_is_used_until_file_or_options_change(tmp_path: Path):
    path, cache = records.write_lines(tmp_path / "a.jsonl", records.texts(5)), tmp_path / "cache"

    def stores() -> set[str]:
        return {one.name for one in cache.iterdir() if one.is_dir()}

    first = tokens(stored(path, cache))
    (name,) = stores()
    changed = (cache / name / "tokens.npy").stat().st_mtime_ns
    assert tokens(stored(path, cache)) == first
    assert stores() == {name}
    assert (cache / name / "tokens.npy").stat().st_mtime_ns == changed
    records.write_lines(path, records.texts(5, seed=1))
    assert tokens(stored(path, cache)) != first
    assert len(stores()) == 2
    stored(path, cache, train_on="all")
    assert len(stores()) == 3


def test_a_failure_leaves_no_store_behind_and_a_damaged_one_is_refused(tmp_path: Path):
    cache = tmp_path / "cache"
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n' * 500 + "broken\n")
    with pytest.raises(DataError, match="line 501"):
        stored(tmp_path / "a.jsonl", cache)
    assert not [one for one in cache.iterdir() if one.is_dir()]
    store = stored(records.write_lines(tmp_path / "a.jsonl", records.texts(5)), cache)
    (store.folder / "about.json").write_text(json.dumps({"files": 3}))
    with pytest.raises(DataError, match=r"the tokenized data in .* is damaged.*; delete that folder"):
        stored(tmp_path / "a.jsonl", cache)


def test_columns_that_are_not_asked_for_are_not_opened(tmp_path: Path, datasets: ModuleType):
    """A data set can name files of this machine and addresses as its images and sounds."""
    rows = records.texts(3)
    named = [{"bytes": None, "path": str(tmp_path / "secret.png")}] * 3
    place = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    features = datasets.Features({"text": datasets.Value("string"), "image": place})
    table = {"text": [row["text"] for row in rows], "image": named}
    datasets.Dataset.from_dict(table, features=features).save_to_disk(tmp_path / "saved")
    info = tmp_path / "saved" / "dataset_info.json"
    told = json.loads(info.read_text())
    told["features"]["image"] = {
        "_type": "Image"
    }  # by hand: `save_to_disk` reads images and puts them into the file
    info.write_text(json.dumps(told))
    lines = stored(records.write_lines(tmp_path / "a.jsonl", rows))
    assert tokens(stored(tmp_path / "saved")) == tokens(lines)
