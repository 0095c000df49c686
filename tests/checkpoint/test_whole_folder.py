"""Folders appear and go as a whole, and nothing behind a link goes with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.checkpoint.whole_folder import begin, commit, digest_of, discard, remove, unfinished


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A folder with a file, beside the one that tests change."""
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "kept").write_text("kept")
    return folder


def test_a_folder_a_file_and_a_link_are_deleted_but_nothing_behind_the_link(tmp_path: Path, other: Path):
    folder, file, link, broken = (tmp_path / name for name in ("folder", "file", "link", "broken"))
    folder.mkdir()
    (folder / "in it").touch()
    file.touch()
    link.symlink_to(other, target_is_directory=True)
    broken.symlink_to(tmp_path / "nothing")
    for path in (folder, file, link, broken):
        discard(path)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    assert (other / "kept").read_text() == "kept"


@pytest.mark.parametrize("before", ["nothing", "a folder", "a file", "a link"])
def test_a_folder_takes_the_place_of_what_has_its_name(tmp_path: Path, other: Path, before: str):
    path = tmp_path / "step-1"
    if before == "a folder":
        path.mkdir()
        (path / "old").touch()
    elif before == "a file":
        path.touch()
    elif before == "a link":
        path.symlink_to(other, target_is_directory=True)
    folder = begin(path)
    assert folder == unfinished(path)
    (folder / "new").write_text("new")
    commit(path)
    assert sorted(found.name for found in tmp_path.iterdir()) == ["other", "step-1"]
    assert [found.name for found in path.iterdir()] == ["new"]
    assert (other / "kept").exists()


def test_what_earlier_saves_left_unfinished_goes_with_the_next(tmp_path: Path):
    (begin(tmp_path / "step-1") / "half").touch()
    begin(tmp_path / "step-2")
    assert [found.name for found in tmp_path.iterdir()] == [unfinished(tmp_path / "step-2").name]
    commit(tmp_path / "step-2")
    remove(tmp_path / "step-2")
    assert list(tmp_path.iterdir()) == []


def test_a_digest_is_that_of_the_bytes(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"abc")
    assert digest_of(tmp_path / "file").startswith("ba7816bf8f01cfea")
