"""Manifests that are malformed or malicious: a clear error or a manifest, and nothing runs."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import pickle
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.base.errors import DataError
from penstock.checkpoint.manifest import (
    Manifest,
    StoredFile,
    StoredTensor,
    decode_value,
    digest_of_config,
    dump,
    parse,
)

NAME = "stage-00001-of-00001.safetensors"
GOOD = Manifest(
    step=3,
    seed=0,
    layers=(("a", "b"),),
    layout={},
    files={NAME: StoredFile(10, "0" * 64)},
    tensors={"model/a.weight": StoredTensor(NAME, (2, 3), "F32")},
    values={"extra": {}},
    config={"x": {"y": 1}},
    config_sha256=digest_of_config({"x": {"y": 1}}),
    versions={"torch": "2"},
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.text(max_size=8) | st.sampled_from(["$tuple", "$dict", "$counter", "$tensor"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


def signed(key: str, value: object) -> bytes:
    """Return a manifest with another value and the right digest."""
    table = {k: v for k, v in json.loads(dump(GOOD)).items() if k != "sha256"} | {key: value}
    rest = json.dumps(table)[1:].encode()
    return b'{"sha256": "' + hashlib.sha256(rest).hexdigest().encode() + b'",\n' + rest


def test_a_written_manifest_is_read():
    assert parse(dump(GOOD), "x") == GOOD


@pytest.mark.parametrize("key", sorted({*json.loads(dump(GOOD))} - {"sha256"}))
def test_a_value_of_another_kind_is_refused(key: str):
    with pytest.raises(DataError):
        parse(signed(key, 1.5), "x")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([[1]], r"\[1\] is not a key with its value"),
        ([[1, 2, 3]], r"\[1, 2, 3\] is not a key with its value"),
        ([3], "3 is not a key with its value"),
        ([[[1], 2]], r"\[1\] is not a key of a checkpoint's dictionary"),
    ],
)
def test_what_is_no_pair_of_a_dictionary_is_refused(value: object, said: str):
    for kind in ("$dict", "$counter"):
        with pytest.raises(DataError, match=said):
            decode_value({kind: value}, lambda name: torch.ones(1))


def test_dictionaries_have_keys_of_other_kinds_than_text():
    for kind, value in (("$dict", {1: 2, None: "a"}), ("$counter", Counter({1: 2}))):
        found = decode_value({kind: [list(pair) for pair in value.items()]}, lambda name: torch.ones(1))
        assert (found, type(found)) == (value, type(value))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([*json.loads(dump(GOOD)), "other"]), JSON)
def test_any_value_in_any_place_is_refused_or_read(key, value):
    with contextlib.suppress(DataError):
        assert isinstance(parse(signed(key, value), "x"), Manifest)


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused(data):
    with pytest.raises(DataError):
        parse(data, "x")


@settings(max_examples=150, deadline=None)
@given(JSON)
def test_any_json_is_a_value_or_refused(value):
    def none(name: str):
        raise DataError("no tensor")

    with contextlib.suppress(DataError):
        decode_value(value, none)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "stage-1.pt", "a/stage-00001-of-00001.safetensors"]
)
def test_files_elsewhere_are_refused(name):
    with pytest.raises(DataError, match="must match pattern"):
        parse(signed("files", {name: {"bytes": 1, "sha256": "0" * 64}}), "x")


class Trap:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_under_our_name_is_refused_and_does_not_run(tmp_path: Path):
    from penstock.checkpoint.find import damage
    from penstock.checkpoint.read import Reader

    sprung = tmp_path / "sprung"
    data = pickle.dumps(Trap(sprung))
    (tmp_path / NAME).write_bytes(data)
    assert damage(tmp_path, GOOD)
    # Even where the manifest says that this is its file.
    agreed = Manifest(
        **{**vars(GOOD), "files": {NAME: StoredFile(len(data), hashlib.sha256(data).hexdigest())}}
    )
    assert damage(tmp_path, agreed) == [
        f"{tmp_path / NAME}: it is not a file of safetensors, or is cut short"
    ]
    with Reader(tmp_path, agreed) as reader, pytest.raises(DataError, match=r"cannot read model/a\.weight"):
        reader.tensor("model/a.weight")
    with pytest.raises(DataError):
        parse(data, "x")
    assert not sprung.exists()


def test_no_source_unpickles_files_of_others():
    """Folders of DCP are pickles; tests/checkpoint/test_dcp.py shows that no code in them runs."""
    modules = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    package = Path(penstock.__file__).parent
    suspicious = re.compile(rf"torch\.load|allow_pickle|\b({'|'.join(modules)})\b")
    for path in {*package.rglob("*.py")} - {package / "checkpoint" / "dcp.py"}:
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if suspicious.search(text) else ():
            if isinstance(node, ast.Import):
                assert not modules & {alias.name for alias in node.names}, path
            if isinstance(node, ast.ImportFrom):
                only_writes = node.module == "pickle" and {alias.name for alias in node.names} == {"dumps"}
                assert node.module not in modules or only_writes, path
            if isinstance(node, ast.Attribute) and node.attr == "load" and isinstance(node.value, ast.Name):
                assert node.value.id != "torch", path
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert isinstance(node.value, ast.Constant), path
                assert node.value.value is False, path
