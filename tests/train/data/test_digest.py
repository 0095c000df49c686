"""Digests of data: equal for equal data, differences by name, and a bounded cost."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from penstock.base.errors import DataError
from penstock.train.config.sections import DataConfig
from penstock.train.data import digest as data_digest
from penstock.train.data.corpus import Corpus
from penstock.train.data.digest import PIECE, PIECES, DataDigest
from tests.support.corpora import open_corpora


def digest(path: Path) -> DataDigest:
    return DataDigest.of(*open_corpora(DataConfig(path=str(path), held_out=0.2, format="text")))


def folder(path: Path, files: int = 10) -> Path:
    path.mkdir()
    for n in range(files):
        (path / f"{n}.txt").write_text(f"file {n} ")
    return path


def test_the_same_files_elsewhere_have_the_same_digest(tmp_path: Path):
    one, other = digest(folder(tmp_path / "one")), digest(folder(tmp_path / "other"))
    assert one == other
    assert one.short == other.short
    assert one.changes(other) == []
    assert DataDigest.from_values(json.loads(json.dumps(one.values()))) == one


@pytest.mark.parametrize(
    "values", [None, {}, {"training": {}, "held_out": {}}, {"training": 1, "held_out": 2}]
)
def test_what_is_no_digest_is_refused(values: object):
    with pytest.raises(DataError, match="it is not a digest of data"):
        DataDigest.from_values(values)


def test_every_difference_is_named(tmp_path: Path):
    before = digest(folder(tmp_path / "a"))
    (tmp_path / "a" / "3.txt").write_text("file ! ")
    assert digest(tmp_path / "a").changes(before) == ["the training file '3.txt' has other tokens"]
    (tmp_path / "a" / "3.txt").write_text("file 3 and more")
    assert digest(tmp_path / "a").changes(before) == ["the training file '3.txt' had 8 tokens and has 16"]
    (tmp_path / "a" / "3.txt").rename(tmp_path / "a" / "33.txt")
    assert digest(tmp_path / "a").changes(before) == [
        "the training file '3.txt' is gone",
        "the training file '33.txt' is new",
    ]


def test_of_many_differences_the_first_are_named(tmp_path: Path):
    before = digest(folder(tmp_path / "a"))
    for path in (tmp_path / "a").iterdir():
        path.write_text("changed")
    *named, more = digest(tmp_path / "a").changes(before)
    assert len(named) == 5
    assert all("has other tokens" in change for change in named)
    assert more == "and 5 more such differences"


def test_the_end_of_a_single_file_is_held_out_data(tmp_path: Path):
    path = tmp_path / "one.txt"
    path.write_bytes(b"0123456789")
    before = digest(path)
    path.write_bytes(b"012345678!")
    assert digest(path).changes(before) == ["the held-out file 'one.txt' has other tokens"]


def test_more_files_than_are_listed_are_told_by_their_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(data_digest, "_LISTED", 3)
    before = digest(folder(tmp_path / "a"))
    assert before.training.listed == ()
    (tmp_path / "a" / "new.txt").write_text("new")
    assert "the training files were 8 with 64 tokens and are 9 with 72, or have other names or sizes" in (
        digest(tmp_path / "a").changes(before)
    )
    (tmp_path / "a" / "new.txt").unlink()
    (tmp_path / "a" / "3.txt").write_text("file ! ")
    (change,) = digest(tmp_path / "a").changes(before)
    assert change.startswith("the training files have other tokens, ")


def large(path: Path, tokens: int, at: int | None = None) -> Path:
    """A file of zeros that takes no room, with one other token."""
    with path.open("wb") as file:
        file.truncate(tokens)
        if at is not None:
            file.seek(at)
            file.write(b"x")
    return path


def test_of_a_large_corpus_a_bounded_part_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    read = []
    original = Corpus.read

    def counting(self, start, length):
        read.append(length)
        return original(self, start, length)

    monkeypatch.setattr(Corpus, "read", counting)
    monkeypatch.setattr(data_digest, "PIECE", 64)
    tokens = 1 << 36
    before = digest(large(tmp_path / "a.txt", tokens))
    assert sum(read) == 2 * PIECES * 64
    assert len(read) == 2 * PIECES
    assert len(json.dumps(before.values())) < 100_000
    cut = tokens - round(0.2 * tokens)
    for at, role in ((0, "training"), (cut - 1, "training"), (cut, "held-out"), (tokens - 1, "held-out")):
        (change,) = digest(large(tmp_path / "a.txt", tokens, at)).changes(before)
        assert change == f"the {role} file 'a.txt' has other tokens"


@pytest.mark.parametrize("tokens", [2, PIECES, PIECES + 1, PIECES * PIECE, PIECES * PIECE + 1])
def test_up_to_the_bound_every_token_is_hashed_once(tokens: int):
    for listed in ((), (("a", tokens - 1), ("b", 1))):
        places = data_digest._places(tokens, listed)
        covered = sum(length for _, length in places)
        assert covered == (tokens if tokens <= PIECES * PIECE else PIECES * PIECE)
        assert places[0][0] == 0
        assert sum(places[-1]) == tokens
        assert all(a + n <= b for (a, n), (b, _) in pairwise(places))


def test_names_that_are_no_text_are_written_out(tmp_path: Path):
    one = folder(tmp_path / "a", 3)
    Path(str(one) + "/caf\udce9.txt").write_text("x")
    names = [name for part in (digest(one).training, digest(one).held_out) for name, _ in part.listed]
    assert "caf\\xe9.txt" in names


def test_numbers_of_any_width_have_one_digest(tmp_path: Path):
    np.save(tmp_path / "a.npy", np.arange(1000, dtype=np.uint16))
    before = digest(tmp_path / "a.npy")
    np.save(tmp_path / "a.npy", np.arange(1000, dtype=">i8"))
    assert digest(tmp_path / "a.npy") == before
