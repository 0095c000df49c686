"""Values arrive as they were sent; other bytes, pickles included, are refused and run nothing."""

from __future__ import annotations

import json
import math
import os
import pickle
import struct
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base.encoding import decode, encode, sendable
from penstock.base.errors import TransportError
from penstock.base.tensor_file import StoredFile
from penstock.parallel.replicas.shard_slice import ShardSlice
from penstock.runtime.start.place import current_place
from penstock.runtime.workers.pool import LocalProcesses
from penstock.runtime.workers.world import World

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=9)
)
KEYS = st.integers() | st.text(max_size=5) | st.tuples(st.integers(), st.booleans())
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=20)
@given(VALUES)
def test_plain_values_arrive_as_they_were_sent(value: object):
    found = decode(encode(value))
    assert found == value
    assert repr(found) == repr(value)  # 1, 1.0 and True, and tuples and lists, are told apart


DTYPES = ["float32", "float64", "bfloat16", "float16", "int64", "uint8", "bool", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_arrive_bit_for_bit(dtype: str):
    whole = torch.arange(12).reshape(4, 3).t().to(getattr(torch, dtype))
    for sent in (whole[1, 1].clone(), whole[0, :3].clone(), whole[:2, :0].clone(), whole[:3, :2].clone()):
        (got,) = decode(encode([sent]))
        assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
        assert torch.equal(got, sent)
        got.zero_()  # its memory is its own, and can be written


def test_records_of_pipelines_arrive():
    graph = torch.ones(2, requires_grad=True) * 2
    sent = {
        "piece": ShardSlice((2, 3), (3, 1), 1, 4), "file": StoredFile(8, "ab"), "path": Path("/a/b"), "seen": {1, 2},
        "times": np.array([1.5, math.inf]), "count": np.int64(3), "size": torch.Size([2, 3]), "held": OrderedDict(a=1),
    }  # fmt: skip
    got = decode(encode(sent))
    times = got.pop("times")
    assert times.dtype == np.float64
    np.testing.assert_array_equal(times, sent.pop("times"))
    assert got == sent | {"size": (2, 3)}
    assert not decode(encode(graph)).requires_grad
    assert math.isnan(decode(encode(math.nan)))


class Unknown(NamedTuple):
    a: int


@dataclass
class Opaque:
    a: int


@pytest.mark.parametrize(
    "value", [Unknown(1), Opaque(1), object(), print, torch.ones(2).to_sparse(), np.array(["a"])]
)
def test_other_types_are_refused_by_name(value: object):
    with pytest.raises(TypeError, match="cannot be sent to other processes"):
        encode({"deep": [value]})


def message(text: Any, body: bytes = b"") -> bytes:
    data = json.dumps(text).encode()
    return struct.pack("<Q", len(data)) + data + body


class Harmful:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("sprung",)


NAME = f"{ShardSlice.__module__}.ShardSlice"


@pytest.mark.parametrize(
    "data",
    [
        b"", b"1234567", pickle.dumps(Harmful()), encode([1, 2])[:12], struct.pack("<Q", 1 << 60),
        message(["nothing", 1]), message([]), message({"a": 1}), message(["dict", 1]), message(["set", ["list"]]),
        message(["bytes", 0, 9], b"1234"), message(["bytes", -1, 2], b"1234"), message(["bytes", 0.5, 1], b"1234"),
        message(["tensor", "float32", [2], 0, 4], b"1234"), message(["tensor", "no", [1], 0, 4], b"1234"),
        message(["tensor", "float32", [-1], 0, 4], b"1234"), message(["tensor", "float32", "1", 0, 4], b"1234"),
        message(["array", "|O", [1], 0, 8], bytes(8)), message(["array", "<i4", [3], 0, 4], b"1234"),
        message(["array", 3, [1], 0, 4], b"1234"), message(["record", "os.mkdir", "sprung"]),
        message(["record", NAME, 1]), message(["path", 1]), struct.pack("<Q", 1 << 17) + b"[" * (1 << 17),
    ],
    ids=lambda data: repr(data[:24]),
)  # fmt: skip
def test_bytes_that_are_no_value_are_refused_and_nothing_runs(
    data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TransportError, match="what another process sent cannot be read"):
        decode(data)
    assert not list(tmp_path.iterdir())


def test_only_records_with_fields_can_be_marked():
    with pytest.raises(AssertionError):
        sendable(int)


def exchange(rank: int, folder: str) -> list[str]:
    """Rank 1 sends a pickle that would make a folder, in place of its value."""
    import penstock.parallel.replicas.exchange as at

    place = current_place()
    assert place is not None
    world = World(*place, 20.0)
    said = [str(world.gather({"rank": rank, "of": (rank, torch.ones(2))}))]
    os.chdir(folder)
    if rank == 1:
        at.encode = lambda value: pickle.dumps(Harmful())
    try:
        world.gather(None)
    except TransportError as error:
        said.append(str(error))
    finally:
        at.encode = encode
    return said


@pytest.mark.slow
def test_a_pickle_from_another_process_is_refused_and_runs_nothing(processes: LocalProcesses, tmp_path: Path):
    whole = [{"rank": r, "of": (r, torch.ones(2))} for r in range(2)]
    for values, refused in processes.run(2, exchange, str(tmp_path)):
        assert values == str(whole)
        assert refused.startswith("what another process sent cannot be read")
    assert not list(tmp_path.iterdir())
