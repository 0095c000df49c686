from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from penstock.base.errors import DataError
from penstock.trace.folder import FOLDER, read_file, read_folder, save_step, step_path
from penstock.trace.join import present
from tests.support.traces import trace_of

LINES = ["0F0@0.0-1.0 0B0@4.0-6.0", "1F0@1.0-2.0 1B0@2.0-4.0"]


def part(rank: int):
    return trace_of(*(line if r == rank else "" for r, line in enumerate(LINES)))


def test_steps_are_read_in_their_order(tmp_path: Path):
    for step in (100, 9, 10):
        assert save_step(tmp_path, step, trace_of(*LINES)) == step_path(tmp_path, step)
    found = read_folder(tmp_path)
    assert list(found.steps) == [9, 10, 100]
    assert found.problems == ()
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == [
        "step-000009.npz", "step-000010.npz", "step-000100.npz",
    ]  # fmt: skip


def test_a_missing_rank_is_named_and_the_rest_is_shown(tmp_path: Path):
    path = save_step(tmp_path, 5, part(0))
    found = read_folder(tmp_path)
    assert present(found.steps[5]) == [0]
    assert found.problems == (f"{path}: nothing of rank 1 (of 2)",)


def test_a_broken_file_is_named_and_the_rest_is_shown(tmp_path: Path):
    for step in (1, 2, 3, 4):
        save_step(tmp_path, step, trace_of(*LINES))
    cut, other, text = (step_path(tmp_path, step) for step in (2, 3, 4))
    cut.write_bytes(cut.read_bytes()[:-40])
    with np.load(other) as file:
        columns = dict(file)
    columns["header"] = np.array(json.dumps({**json.loads(str(columns["header"])), "format": 7}))
    np.savez(other, **columns)
    text.write_text("not a trace")
    found = read_folder(tmp_path)
    assert list(found.steps) == [1]
    assert [str(path) in problem for path, problem in zip((cut, other, text), found.problems, strict=True)]
    assert "format 7; this version reads format 1" in found.problems[1]


def test_a_folder_without_traces_says_what_there_should_be(tmp_path: Path):
    with pytest.raises(DataError, match=rf"has no traces: cannot read .*{FOLDER}"):
        read_folder(tmp_path)
    (tmp_path / FOLDER).mkdir()
    with pytest.raises(DataError, match=r"holds no trace; the files of a run are called step-000010\.npz"):
        read_folder(tmp_path)
    step_path(tmp_path, 1).write_text("")
    with pytest.raises(DataError, match=r"cannot read .*step-000001\.npz as a trace"):
        read_folder(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / FOLDER).write_text("in the way")
    with pytest.raises(DataError, match=r"cannot write the trace .*step-000001\.npz"):
        save_step(tmp_path / "other", 1, trace_of(*LINES))


def test_a_single_file_may_lack_ranks_but_not_all(tmp_path: Path):
    part(1).save(tmp_path / "a.npz")
    trace, problems = read_file(tmp_path / "a.npz")
    assert present(trace) == [1]
    assert problems == (f"{tmp_path / 'a.npz'}: nothing of rank 0 (of 2)",)
    trace_of("", "").save(tmp_path / "b.npz")
    with pytest.raises(DataError, match="holds no event"):
        read_file(tmp_path / "b.npz")
