from __future__ import annotations

import pickle
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base.errors import DataError
from penstock.trace.events import Trace
from tests.support.traces import trace_of

LINES = ["0F0@0-1 0B0@4-6", "1F0@1-2 1B0@2-4"]


def same(a: Trace, b: Trace) -> bool:
    columns = ("rank", "stage", "kind", "microbatch", "start", "end", "paired")
    return (
        a.ranks == b.ranks
        and dict(a.info) == dict(b.info)
        and all(np.array_equal(getattr(a, c), getattr(b, c)) for c in columns)
        and all(getattr(a, c).dtype == getattr(b, c).dtype for c in columns)
    )


def test_a_saved_trace_loads_as_it_was(tmp_path: Path):
    trace = trace_of(*LINES, info={"source": "measured", "steps": [1, 2]})
    trace.save(tmp_path / "a.npz")
    again = Trace.load(tmp_path / "a.npz")
    assert same(trace, again)
    assert again.held is None
    replace(trace, held=np.array([1, 0, 1, 0], np.int64)).save(tmp_path / "b.npz")
    assert Trace.load(tmp_path / "b.npz").held.tolist() == [1, 0, 1, 0]
    with pytest.raises(DataError, match="cannot write the trace"):
        trace.save(tmp_path / "no" / "a.npz")


def test_columns_of_different_lengths_are_refused():
    plain = trace_of(*LINES)
    with pytest.raises(DataError, match=r"must be of one length, got \[3, 4\]"):
        Trace(**{**vars(plain), "end": plain.end[:3]})


def test_what_is_no_trace_is_refused_and_not_executed(tmp_path: Path):
    path, flag = tmp_path / "a.npz", tmp_path / "flag"
    with pytest.raises(DataError, match=r"cannot read .*a\.npz as a trace"):
        Trace.load(path)
    trace_of(*LINES).save(path)
    for content in (b"not a zip file", path.read_bytes()[:-100]):
        path.write_bytes(content)
        with pytest.raises(DataError, match="as a trace"):
            Trace.load(path)
    np.savez(path, header=np.array("{}"))
    with pytest.raises(DataError, match="as a trace"):
        Trace.load(path)

    class Trap:
        def __reduce__(self):
            return Path.touch, (flag,)

    assert pickle.dumps(Trap())
    np.savez(path, header=np.array([Trap()], object))
    with pytest.raises(DataError, match="as a trace"):
        Trace.load(path)
    assert not flag.exists()


def test_rows_of_a_rank_and_selections():
    trace = trace_of(*LINES, "2F0@2-3")
    assert trace.rank_slices() == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert trace.select(trace.kind == 0).stage.tolist() == [0, 1, 2]
    assert trace.select(trace.kind == 1).rank_slices() == [slice(0, 1), slice(1, 2), slice(2, 2)]


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("rank", [0, 0, 5, 5], r"events on ranks 0\.\.5 of 0\.\.1"),
        ("rank", [1, 1, 0, 0], "not sorted by rank"),
        ("kind", [0, 99, 0, 1], "a kind of event that is not known: 99"),
        ("start", [0.0, np.nan, 1.0, 2.0], "ends before it starts"),
        ("start", [0.0, 7.0, 1.0, 2.0], "ends before it starts"),
        ("stage", [0.5, 0.5, 1.5, 1.5], "column stage has type float64"),
        ("stage", [[0, 0, 1, 1]], "not of one length"),
        ("paired", [False, False, False, True], "a pair has no second half"),
        ("paired", [False, True, False, False], "a pair has no second half"),
    ],
)
def test_a_file_whose_columns_no_trace_can_have_is_refused(tmp_path: Path, column, values, message):
    path = tmp_path / "a.npz"
    trace_of(*LINES).save(path)
    with np.load(path) as file:
        columns = dict(file)
    np.savez(path, **{**columns, column: np.array(values)})
    with pytest.raises(DataError, match=message):
        Trace.load(path)


@settings(max_examples=60)
@given(data=st.data())
def test_a_damaged_file_is_refused_or_sound_and_never_something_else(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damaged") / "a.npz"
    trace_of(*LINES, info={"source": "measured"}).save(path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with suppress(DataError):
        assert len(Trace.load(path).rank_slices()) == 2
