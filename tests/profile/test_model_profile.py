"""Profiles: costs between measured sizes, JSON that reads back as written, and spoiled files."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.base.errors import ConfigError
from penstock.profile.closed_form import Workload
from penstock.profile.layer_cost import DeviceWork, LayerCost
from penstock.profile.model_profile import Profile, ProfiledLayer, of_shape, read_profile
from penstock.profile.model_shape import ModelShape

SHAPE = ModelShape(
    name="small", layers=3, hidden=64, heads=4, kv_heads=2, head_size=16, ffn=128, vocabulary=100, tied=True
)


def cost(seconds: float, saved: float = 8.0) -> LayerCost:
    return LayerCost(
        forward=(DeviceWork("seconds", seconds), DeviceWork("memory", 2 * seconds, calls=3)),
        input_grad=(DeviceWork("seconds", 2 * seconds),), saved_bytes=saved, parameters=5, recomputes=False,
    )  # fmt: skip


def measured() -> Profile:
    kinds = (
        ProfiledLayer(((1, cost(1.0)), (2, cost(1.5, 16.0)), (4, cost(3.5, 32.0)))),
        ProfiledLayer(((2, cost(7.0)),)),
    )
    layers = (("in", "embedding", 1), ("a", "block", 0), ("b", "block", 0))
    return Profile(
        name="mine", source="measured", shape=None, sequence=16, dtype="fp32", kinds=kinds, layers=layers,
        machine={"host": "here", "cores": 2}, op_overhead=1e-6, step_overhead=2e-3, spread=0.01,
    )  # fmt: skip


def test_costs_lie_on_the_line_between_the_sizes_that_were_measured():
    steps = measured().kinds[0]
    assert [steps.at(n).forward[0].amount for n in (1, 2, 3, 4, 6)] == [1.0, 1.5, 2.5, 3.5, 5.5]
    assert [steps.at(n).saved_bytes for n in (1, 2, 3, 8)] == [8, 16, 24, 64]
    assert steps.at(3).parameters == 5
    assert steps.at(3).forward[1] == DeviceWork("memory", 5.0, calls=3)
    assert not steps.at(3).recomputes


def test_one_size_is_scaled():
    one = measured().kinds[1]
    assert one.at(2) is one.points[0][1]
    assert one.at(6).forward[0].amount == 21.0
    assert (one.at(6).saved_bytes, one.at(6).parameters) == (24.0, 5)


def test_a_profile_of_sizes_has_a_table_for_every_workload():
    profile = of_shape(SHAPE)
    table = profile.table(Workload(microbatch=2, sequence=16, tp=2))
    assert (profile.blocks, profile.parameters) == (3, SHAPE.parameters)
    assert table.kinds == (0, 1, 1, 1, 2)
    assert table.roles == ("embedding", "block", "block", "block", "head")
    assert table.names == ("embedding", "blocks.0", "blocks.1", "blocks.2", "head")
    with pytest.raises(ConfigError, match="tp=4 does not divide"):
        profile.table(Workload(microbatch=2, sequence=16, tp=4))


def test_a_measured_profile_holds_for_its_own_sequence_and_one_device():
    profile = measured()
    assert (profile.blocks, profile.parameters) == (2, 15)
    assert profile.table(Workload(microbatch=2, sequence=16)).costs == (cost(1.5, 16.0), cost(7.0))
    with pytest.raises(
        ConfigError, match="measured with samples of 16 tokens, got 17; profile the model again"
    ):
        profile.table(Workload(microbatch=2, sequence=17))
    with pytest.raises(ConfigError, match="tp must be 1, got 2"):
        profile.table(Workload(microbatch=2, sequence=16, tp=2))


@pytest.mark.parametrize("profile", [of_shape(SHAPE), measured()], ids=["sizes", "measured"])
def test_a_saved_profile_reads_back_as_it_was(profile: Profile, tmp_path: Path):
    profile.save(tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json") == profile
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.floats(0, 1e30), min_size=1, max_size=5, unique=True), st.text(max_size=5))
def test_every_number_survives(tmp_path: Path, numbers: list[float], name: str):
    kinds = (ProfiledLayer(tuple((n + 1, cost(number)) for n, number in enumerate(numbers))),)
    profile = Profile(name=name, source="measured", kinds=kinds, layers=((name, "block", 0),))
    profile.save(tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json") == profile


def changed(table: Any, *keys: Any, value: Any) -> Any:
    inner = table
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    return table


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (["format"], 2, "not a profile of format 1"),
        (["source"], "guessed", "source must be .*, got 'guessed'"),
        (["source"], "sizes", "shape is None"),
        (["dtype"], "bf61", "dtype must be .*, got 'bf61'"),
        (["sequence"], -1, "sequence must be .*, got -1"),
        (["op_overhead"], float("nan"), "op_overhead must be .*, got nan"),
        (["spread"], "wide", "spread must be .*, got 'wide'"),
        (["layers"], [], "layers is"),
        (["layers", 0, 1], "middle", r"layers\.0\.1 must be .*, got 'middle'"),
        (["layers", 0, 2], 7, "kind is 7"),
        (["layers", 0, 2], -1, r"layers\.0\.2 must be .*, got -1"),
        (["kinds", 0, "points"], [], "microbatches is"),
        (["kinds", 0, "points", 0, 0], 9, r"microbatches is \[9, 2, 4\]"),
        (["kinds", 0, "points", 0, 1, "forward"], [], "operations is"),
        (["kinds", 0, "points", 0, 1, "forward", 0, 0], "magic", r"forward\.0\.0 must be .*, got 'magic'"),
        (["kinds", 0, "points", 0, 1, "forward", 0, 1], -1.0, r"forward\.0\.1 must be .*, got -1\.0"),
        (["kinds", 0, "points", 0, 1, "forward", 0, 3], 0, r"forward\.0\.3 must be .*, got 0"),
        (["kinds", 0, "points", 0, 1, "saved_bytes"], float("inf"), "saved_bytes must be .*, got inf"),
        (["kinds", 0, "points", 0, 1, "saved_bytes"], 10**400, "saved_bytes must be a valid number"),
        (["kinds", 0, "points", 0, 1, "recomputes"], 1, "recomputes must be .*, got 1"),
        (["surprise"], 1, "no key surprise"),
    ],
)
def test_wrong_values_are_refused(keys: list[Any], value: Any, message: str, tmp_path: Path):
    table = changed(json.loads(json.dumps(measured().as_dict())), *keys, value=value)
    (tmp_path / "p.json").write_text(json.dumps(table))
    with pytest.raises(ConfigError, match=message) as error:
        read_profile(tmp_path / "p.json")
    assert "p.json" in str(error.value)


def spoiled(data: bytes) -> Iterator[bytes]:
    draw = random.Random(3)
    for _ in range(150):
        place, kind = draw.randrange(len(data)), draw.randrange(4)
        if kind == 0:
            yield data[:place]
        elif kind == 1:
            yield data[:place] + bytes([draw.randrange(256)]) + data[place + 1 :]
        elif kind == 2:
            yield data[:place] + data[place + draw.randrange(40) :]
        else:
            word = draw.choice([b"null", b"[]", b"{}", b"-", b"9" * 400, b'"', b"true"])
            yield data[:place] + word + data[place:]


@pytest.mark.parametrize("profile", [of_shape(SHAPE), measured()], ids=["sizes", "measured"])
def test_a_spoiled_file_is_refused_or_still_a_profile(profile: Profile, tmp_path: Path):
    path = tmp_path / "p.json"
    profile.save(path)
    for data in spoiled(path.read_bytes()):
        path.write_bytes(data)
        try:
            read = read_profile(path)
        except ConfigError:
            continue
        assert read.table(Workload(microbatch=2, sequence=read.sequence or 8)).costs
        assert read.parameters > 0


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000],
    ids=["empty", "list", "object", "binary", "deep"],
)
def test_files_that_are_no_profile_are_refused(content: bytes, tmp_path: Path):
    (tmp_path / "p.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"p\.json"):
        read_profile(tmp_path / "p.json")
    for name in (tmp_path, tmp_path / "none.json", "a\0b"):
        with pytest.raises(ConfigError, match="cannot read the profile"):
            read_profile(name)
