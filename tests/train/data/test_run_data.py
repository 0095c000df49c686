from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from penstock.train.data import corpus, run_data
from penstock.train.data.corpus import Corpus, Document
from penstock.train.data.run_data import bigram_bits, bigram_counts


def as_corpus(path: Path, tokens: list[int]) -> Corpus:
    np.save(path, np.array(tokens))
    return Corpus([Document(path, 0, len(tokens), 0)])


def test_a_table_counted_and_bits_worked_out_by_hand(tmp_path: Path):
    counts = bigram_counts(as_corpus(tmp_path / "a.npy", [0, 1, 0, 1, 2]), 3)
    assert counts.tolist() == [[0, 2, 0], [1, 0, 1], [0, 0, 0]]
    # With one added: p(1|0) = 3/5, p(2|1) = 2/5, and p(0|2) = 1/3, never seen.
    expected = -(math.log2(3 / 5) + math.log2(2 / 5) + math.log2(1 / 3)) / 3
    assert bigram_bits(counts, np.array([[0, 1, 2]]), np.array([[1, 2, 0]])) == pytest.approx(expected)
    # An untrained table costs the whole vocabulary.
    assert bigram_bits(np.zeros((256, 256), np.int64), np.array([3]), np.array([7])) == pytest.approx(8)


def test_nothing_is_lost_or_counted_twice_where_chunks_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tokens = np.random.default_rng(0).integers(0, 4, 101).tolist()
    whole = bigram_counts(as_corpus(tmp_path / "a.npy", tokens), 4)
    monkeypatch.setattr(corpus, "_CHUNK", 8)
    assert (bigram_counts(as_corpus(tmp_path / "b.npy", tokens), 4) == whole).all()
    assert whole.sum() == 100


def test_counting_ends_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(corpus, "_CHUNK", 11)
    monkeypatch.setattr(run_data, "_MAX_TOKENS", 20)
    assert bigram_counts(as_corpus(tmp_path / "a.npy", [0] * 101), 1).sum() == 20
