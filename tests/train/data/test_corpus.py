from __future__ import annotations

import io
import os
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from penstock.base.errors import DataError
from penstock.train.config.sections import DataConfig
from penstock.train.data import corpus
from penstock.train.data.corpus import Corpus, Document
from penstock.train.data.tokenizer import HFTokenizer
from tests.support.corpora import open_corpora


def names(found: Corpus) -> list[str]:
    return [document.path.name for document in found.documents]


def write_many(folder: Path, count: int) -> None:
    for n in range(count):
        (folder / f"{n}.txt").write_text(f"file {n}")


def test_files_follow_one_another_with_a_zero_after_each(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"abc")
    (tmp_path / "b.txt").write_bytes(b"de")
    both = Corpus([Document(tmp_path / "a.txt", 0, 3, 1), Document(tmp_path / "b.txt", 0, 2, 1)])
    assert len(both) == 7
    everything = list(b"abc\0de\0")
    assert both.read(0, 7).tolist() == everything
    for start in range(7):
        for length in range(1, 8 - start):
            assert both.read(start, length).tolist() == everything[start : start + length]


def test_chunks_overlap_by_one_token_and_cover_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.txt").write_bytes(bytes(range(1, 10)))
    monkeypatch.setattr(corpus, "_CHUNK", 4)
    chunks = [c.tolist() for c in Corpus([Document(tmp_path / "a.txt", 0, 9, 1)]).chunks()]
    assert chunks == [[1, 2, 3, 4], [4, 5, 6, 7], [7, 8, 9, 0]]


def test_a_fixed_share_of_the_files_is_held_out_by_name(tmp_path: Path):
    write_many(tmp_path, 40)
    training, held_out = open_corpora(DataConfig(path=str(tmp_path), held_out=0.1))
    assert len(names(held_out)) == 4
    assert sorted(names(training) + names(held_out)) == sorted(f"{n}.txt" for n in range(40))
    before = names(held_out)
    for path in tmp_path.iterdir():  # another content and another age
        path.write_text("changed " + path.name * 5)
    assert names(open_corpora(DataConfig(path=str(tmp_path), held_out=0.1))[1]) == before
    assert sorted(before) == ["1.txt", "18.txt", "20.txt", "39.txt"]


def test_with_two_files_one_is_held_out_whatever_the_share_and_of_a_single_one_the_end(tmp_path: Path):
    write_many(tmp_path, 2)
    for share in (0.01, 0.99):
        training, held_out = open_corpora(DataConfig(path=str(tmp_path), held_out=share))
        assert len(training.documents) == len(held_out.documents) == 1
    path = tmp_path / "one.txt"
    path.write_bytes(b"0123456789")
    training, held_out = open_corpora(DataConfig(path=str(path), held_out=0.3))
    assert bytes(training.read(0, len(training)).tolist()) == b"0123456"
    assert bytes(held_out.read(0, len(held_out)).tolist()) == b"789\0"


def test_of_a_large_numpy_file_only_what_is_asked_for_is_read(tmp_path: Path):
    path, count = tmp_path / "tokens.npy", 1 << 36
    with path.open("wb") as file:
        header = {"descr": "<u2", "fortran_order": False, "shape": (count,)}
        np.lib.format.write_array_header_2_0(file, header)
        file.truncate(file.tell() + 2 * count)  # 128 GiB, none of it on the disk
        file.seek(-4, os.SEEK_END)
        file.write(np.array([998 * 50, 999 * 50], np.uint16).tobytes())
    training, held_out = open_corpora(DataConfig(path=str(path), held_out=0.5))
    assert len(training) == len(held_out) == count // 2
    assert held_out.read(count // 2 - 3, 3).tolist() == [0, 998 * 50, 999 * 50]


class Letters(HFTokenizer):
    """Every letter is a token, a as 10, b as 11 and so on."""

    def encode_batch(self, texts: Iterable[str]) -> list[np.ndarray]:
        return [np.array([ord(c) - ord("a") + 10 for c in text], np.uint32) for text in texts]


def test_text_goes_through_the_tokenizer_and_numbers_do_not(tmp_path: Path):
    (tmp_path / "one.txt").write_text("abc")
    (tmp_path / "two.txt").write_text("de")
    np.save(tmp_path / "three.npy", np.array([7, 8, 9]))
    config = DataConfig(path=str(tmp_path), held_out=0.01)
    training, held_out = open_corpora(config, Letters(None, 100, 99, 99))
    found = [c.read(0, len(c)).tolist() for c in (training, held_out)]
    assert sorted(found[0] + found[1]) == [7, 8, 9, 10, 11, 12, 13, 14, 99, 99]
    assert [7, 8, 9] in (found[1], found[0][:3], found[0][-3:])


def test_without_an_end_token_texts_follow_one_another_bare(tmp_path: Path):
    (tmp_path / "one.txt").write_text("abcdefghij")
    letters = Letters(None, 100, None, 0)
    training, held_out = open_corpora(DataConfig(path=str(tmp_path / "one.txt"), held_out=0.2), letters)
    assert training.read(0, len(training)).tolist() == list(range(10, 18))
    assert held_out.read(0, len(held_out)).tolist() == [18, 19]


def test_a_file_that_is_no_text_is_refused_by_the_tokenizer(tmp_path: Path):
    (tmp_path / "one.txt").write_text("abc")
    (tmp_path / "two.dat").write_bytes(b"ab\xff")
    with pytest.raises(DataError, match=r"two.dat is not UTF-8 text \(invalid start byte at byte 2\)"):
        open_corpora(DataConfig(path=str(tmp_path)), Letters(None, 100, 99, 99))


def test_a_pattern_chooses_files_at_any_depth_and_hidden_ones_are_passed_over(tmp_path: Path):
    for name in ("a.py", "deep/er/b.py", "c.md", ".git/d.py", ".e.py", "deep/empty.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("" if "empty" in name else "text")
    training, held_out = open_corpora(DataConfig(path=str(tmp_path), pattern="*.py"))
    assert sorted(names(training) + names(held_out)) == ["a.py", "b.py"]


def test_by_default_it_is_the_standard_library_without_tests_and_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert (Path(sysconfig.get_paths()["stdlib"]) / "json" / "decoder.py").is_file()
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    apart = ("test/a.py", "json/tests/a.py", "site-packages/a.py", "lib.so")
    library = ("json/decoder.py", *(f"{n}.py" for n in range(19)))
    for name in (*library, *apart):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pass")
    training, held_out = open_corpora(DataConfig())
    inside = [d.path.relative_to(tmp_path) for d in training.documents + held_out.documents]
    assert sorted(map(str, inside)) == sorted(library)
    assert len(held_out.documents) == round(0.05 * len(inside))


def array(values: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, values, allow_pickle=True)
    return file.getvalue()


TOKENS = array(np.arange(100))


@pytest.mark.parametrize(
    ("files", "path", "said"),
    [
        ({}, "absent", "there is no file or folder .*absent"),
        ({}, ".", r"no file in .* matches '\*'"),
        ({"a.txt": b"", "b.txt": b""}, ".", "every file in .* is empty"),
        ({"a.npy": b"no numpy file"}, "a.npy", "a.npy is not a numpy token file"),
        ({"a.npy": b""}, "a.npy", "a.npy is not a numpy token file"),
        ({"a.npy": array(np.zeros((3, 3), int))}, ".", r"int64 of shape \(3, 3\); tokens are one dimension of integers"),
        ({"a.npy": array(np.zeros(3))}, "a.npy", "float64"),
        # A pickle is not opened.
        ({"a.npy": array(np.array([print], dtype=object))}, "a.npy", "a.npy is not a numpy token file"),
        ({"a.npy": TOKENS[:-1]}, "a.npy", "it is cut short, its header says"),
        ({"a.npy": TOKENS[:40]}, "a.npy", "a.npy is not a numpy token file"),
        ({"a.npy": TOKENS.replace(b"(100,)", b"(-10,)")}, "a.npy", r"its header says that its shape is \(-10,\)"),
        ({"a.npy": TOKENS[:6] + b"\x03" + TOKENS[7:]}, "a.npy", r"version \(3, 0\) of the format"),
    ],
    ids=lambda value: None if isinstance(value, str) else "files",
)  # fmt: skip
def test_what_has_no_tokens_is_an_error(tmp_path: Path, files: dict[str, bytes], path: str, said: str):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said):
        open_corpora(DataConfig(path=str(tmp_path / path)))


def test_what_cannot_be_opened_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_many(tmp_path, 3)

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "somewhere")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", denied)
        with pytest.raises(DataError, match=r"cannot read .*0.txt: Permission denied"):
            open_corpora(DataConfig(path=str(tmp_path)))
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", denied)
        with pytest.raises(DataError, match=r"cannot read the folder .*: Permission denied"):
            open_corpora(DataConfig(path=str(tmp_path)))


@pytest.mark.parametrize("suffix", [".txt", ".npy"])
def test_a_file_cut_short_after_it_was_read_is_an_error_and_the_next_run_reads_what_is_there(
    tmp_path: Path, suffix: str
):
    """A mapped file would give zeros up to the end of its last page; after that SIGBUS would end the process."""
    path = tmp_path / f"shrinking{suffix}"
    if suffix == ".npy":
        np.save(path, np.arange(20_000, dtype=np.uint16))
    else:
        path.write_bytes(b"0123456789" * 4_000)
    training, _ = open_corpora(DataConfig(path=str(path), held_out=0.1))
    before = training.read(5_000, 10).tolist()
    os.truncate(path, 15_000)
    assert training.read(5_000, 10).tolist() == before
    with pytest.raises(DataError, match=rf"shrinking{suffix} became shorter while it was being read"):
        training.read(15_000, 10)
    if suffix == ".txt":
        path.unlink()
        path.write_bytes(b"abcdefghij")
        training, _ = open_corpora(DataConfig(path=str(path), held_out=0.1))
        assert bytes(training.read(0, 9).tolist()) == b"abcdefghi"
