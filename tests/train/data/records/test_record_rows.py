from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.train.config.sections.data_section import DataConfig
from penstock.train.data.file_formats import find_files
from penstock.train.data.records.record_rows import RecordSamples
from penstock.train.data.records.record_store import RecordStore
from penstock.train.data.token_cache import TokenCache
from penstock.train.data.tokenizer import ByteTokenizer
from tests.support import records


def stored(path: Path, lines: list[dict[str, str]]) -> RecordStore:
    data = DataConfig(path=str(records.write_lines(path / "lines.jsonl", lines)))
    return TokenCache(None, ByteTokenizer(), None).records(find_files(data), data)


def rows(store: RecordStore, sequence: int, packing: bool = False) -> RecordSamples:
    return RecordSamples(store, np.arange(len(store)), sequence, 0, packing)


def test_a_completion_is_trained_on_and_its_prompt_is_not(tmp_path: Path):
    store = stored(tmp_path, [{"prompt": "ab", "completion": "cé"}])
    (row,) = rows(store, 8).once()
    assert row.tokens.tolist() == [*b"abc\xc3\xa9", 0, 0, 0]
    assert row.labels.tolist() == [-100, -100, *b"c\xc3\xa9", 0, -100, -100, -100]
    assert rows(store, 8).size == 3


def test_packed_records_have_positions_and_first_labels_of_their_own(tmp_path: Path):
    store = stored(tmp_path, [{"text": "abc"}, {"text": "de"}])
    (row,) = rows(store, 9, packing=True).once()
    assert row.tokens.tolist() == [*b"abc\0de\0", 0, 0]
    assert row.labels.tolist() == [-100, *b"bc\0", -100, *b"e\0", -100, -100, -100]
    assert row.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("sequence", [2, 3, 7, 30])
def test_a_long_text_continues_and_each_token_is_predicted_once(tmp_path: Path, sequence: int, packing: bool):
    store = stored(tmp_path, [{"text": "abcdefghijklm"}, {"text": "n"}, {"text": "opqrstu"}])
    labels = np.concatenate([row.labels for row in rows(store, sequence, packing).once()])
    assert sorted(labels[labels >= 0].tolist()) == sorted(b"bcdefghijklm\0" + b"\0" + b"pqrstu\0")


def test_a_long_completion_loses_its_end_and_is_left_out_if_nothing_is_trained(tmp_path: Path):
    store = stored(
        tmp_path, [{"prompt": "abcdef", "completion": "g"}, {"prompt": "a", "completion": "bcdef"}]
    )
    samples = rows(store, 5)
    (row,) = samples.once()
    assert row.tokens.tolist() == [*b"abcde"]
    assert (samples.cut, samples.unreached, samples.longest, samples.size) == (2, 1, 8, None)


def test_every_epoch_reads_every_row_once_in_another_order(tmp_path: Path):
    store = stored(tmp_path, [{"text": f"text {n}"} for n in range(20)])
    samples = rows(store, 16, packing=True)
    count = samples.per_epoch
    assert 5 <= count < 20
    epochs = [[row.tokens.tolist() for row in samples.read(np.arange(count) + count * e)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]
