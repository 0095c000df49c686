"""Files are replaced as a whole or not at all, with the mode of the umask."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from penstock.base.atomic import replacing, write_text


def half_written(path: Path) -> None:
    with replacing(path) as unfinished:
        unfinished.write_text("half")
        raise OSError("no more")


def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path: Path):
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with replacing(path) as unfinished:
        unfinished.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    with pytest.raises(OSError, match="no more"):
        half_written(path)
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_killed_process_leaves_nothing_in_the_way(tmp_path: Path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("kept")
    (tmp_path / "a.txt.unfinished").symlink_to(elsewhere)
    write_text(tmp_path / "a.txt", "new")
    assert (tmp_path / "a.txt").read_text() == "new"
    assert elsewhere.read_text() == "kept"


def test_the_mode_is_what_the_umask_says(tmp_path: Path):
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "a.txt", "a")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == 0o640


def test_a_link_is_followed_and_a_pipe_stays_a_pipe(tmp_path):
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    target.write_text("old")
    link.symlink_to(target)
    write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(pipe, "text")
        assert os.read(reader, 100) == b"text"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
