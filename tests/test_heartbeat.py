"""Signs of life: written while a process lives, read by others, and never trusted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from penstock.heartbeat import INTERVAL, Heartbeat, lives, read_signs


def test_a_sign_says_who_lives_where_and_how_far_it_is(tmp_path: Path):
    with Heartbeat(tmp_path, 3, step=7) as heartbeat:
        (sign,) = until(tmp_path, lambda signs: len(signs) == 1)
        assert (sign.rank, sign.state, sign.step, sign.pid, sign.error) == (3, "running", 7, os.getpid(), "")
        assert sign.rss > 1_000_000
        assert lives(sign) is True
        heartbeat.step = 8
        (later,) = until(tmp_path, lambda signs: signs[0].step == 8)
        assert later.time >= later.step_time >= sign.time > sign.began - 1
    (last,) = read_signs(tmp_path)
    assert (last.state, last.step) == ("done", 8)


def until(folder: Path, met):
    limit = time.monotonic() + 60 * INTERVAL
    while not met(signs := read_signs(folder) or [None]) or None in signs:
        assert time.monotonic() < limit
        time.sleep(0.01)
    return signs


def test_how_it_ended_stays(tmp_path: Path):
    with pytest.raises(RuntimeError), Heartbeat(tmp_path, 0):
        raise RuntimeError("no more")
    (sign,) = read_signs(tmp_path)
    assert (sign.state, sign.error) == ("failed", "no more")
    with Heartbeat(tmp_path, 0) as heartbeat:
        heartbeat.end("stopped", "by a signal" * 1000)
        heartbeat.end("failed", "a second end changes nothing")
    (sign,) = read_signs(tmp_path)
    assert sign.state == "stopped"
    assert len(sign.error) == 1000


def test_a_process_that_was_killed_does_not_live(tmp_path: Path):
    code = (
        "import sys, time, pathlib; from penstock.heartbeat import Heartbeat\n"
        f"with Heartbeat(pathlib.Path({str(tmp_path)!r}), 1): print('on', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        (sign,) = until(tmp_path, lambda signs: len(signs) == 1)
        assert lives(sign) is True
        process.kill()
        process.wait()
        assert lives(sign) is False
    assert lives(replace(sign, pid=os.getpid())) is False  # a later process with the same number
    assert lives(replace(sign, place="another machine")) is None
    (read,) = read_signs(tmp_path)
    assert (read.state, read.pid) == ("running", sign.pid)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "[" * 3000, '{"rank": 0}', "WRONG TYPE", "x" * 20_000],
    ids=["empty", "cut", "list", "null", "deep", "short", "type", "long"],
)
def test_files_that_are_no_signs_are_left_out(tmp_path: Path, text: str):
    with Heartbeat(tmp_path, 0):
        pass
    (sign,) = read_signs(tmp_path)
    if text == "WRONG TYPE":
        text = json.dumps(asdict(sign) | {"step": "two"})
    (tmp_path / "logs" / "rank-1.json").write_text(text)
    (tmp_path / "logs" / "rank-0.txt").write_text("")
    (tmp_path / "logs" / "rank-2.json").mkdir()
    assert read_signs(tmp_path) == [sign]


def test_without_a_folder_nothing_is_written_and_nothing_read(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with Heartbeat(tmp_path / "file", 0):
        pass
    assert read_signs(tmp_path / "file") == read_signs(tmp_path / "none") == []
