from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from penstock.base.errors import ConfigError
from penstock.schedule.ops import Kind
from penstock.schedule.placement import Placement
from penstock.simulate import cost_file
from penstock.simulate.cost_file import read_costs
from penstock.simulate.costs import Link

TWO = Placement.loop(2)


def write(folder: Path, text: str, name: str = "costs.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_three_lines_are_enough(tmp_path: Path):
    costs = read_costs(write(tmp_path, "F = 1\nB = 2\nW = [3, 4]\n"), TWO)
    assert costs.seconds.tolist() == [[1, 5, 2, 3, 1], [1, 6, 2, 4, 1]]
    assert costs.communication.same_node == costs.communication.other_node == Link(0, math.inf)


def test_the_example_in_the_docstring_reads(tmp_path: Path):
    text = cost_file.__doc__.split("::\n")[1]
    costs = read_costs(write(tmp_path, text), Placement.loop(4))
    assert costs.seconds[:, Kind.W].tolist() == [7.7, 7.7, 7.7, 9.1]
    assert costs.seconds[0].tolist() == [10.4, 17.9, 10.2, 7.7, 10.4]
    assert costs.pair.tolist() == [25.0] * 4
    talk = costs.communication
    assert (talk.same_node, talk.other_node) == (Link(1e-5, 200e9), Link(3e-5, 40e9))
    assert (talk.message_bytes, talk.ranks_per_node, talk.blocks) == (8388608, 8, "none")


def test_the_example_names_every_key():
    for key in (*cost_file._NEEDED, *cost_file._OPTIONAL):
        assert f"    {key} = " in cost_file.__doc__


def test_json_says_the_same(tmp_path: Path):
    table = {"F": 1, "B": 2, "W": 3, "latency": 1, "latency_between_nodes": 4, "ranks_per_node": 1}
    costs = read_costs(write(tmp_path, json.dumps(table), "costs.json"), TWO)
    assert costs.communication.transfer(2).tolist() == [[1, 4]]


def test_a_latency_given_beside_the_file_replaces_both_of_it(tmp_path: Path):
    path = write(tmp_path, "F = 1\nB = 2\nW = 3\nlatency = 1\nlatency_between_nodes = 4\n")
    assert read_costs(path, TWO, latency=9).communication.transfer(2).tolist() == [[9, 9]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F = 1\nB = 2\n", "W is missing; F, B and W are needed"),
        ("F = 1\nB = 2\nW = 3\nlatencies = 1\n", r"no cost is called 'latencies' \(did you mean 'latency'"),
        ("F = 1\nB = -2\nW = 3\n", "B must be a finite number of at least 0, got -2"),
        ("F = nan\nB = 2\nW = 3\n", "F must be a finite number of at least 0, got nan"),
        ("F = [1, 1, 1]\nB = 2\nW = 3\n", r"F must cover stages 0\.\.1"),
        ('F = 1\nB = 2\nW = "x"\n', "W of stage 0 must be a number, got 'x'"),
        ("F = 1\nB = 2\nW = 3\nlatency = -1\n", "latency must be a finite number"),
        ("F = 1\nF = 2\n", "is not a TOML file"),
    ],
)
def test_a_bad_file_is_refused_with_its_name(tmp_path: Path, text: str, message: str):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as error:
        read_costs(path, TWO)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not a JSON file"), ("[1]", "holds a list, not a table")]
)
def test_bad_json_is_refused(tmp_path: Path, text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        read_costs(write(tmp_path, text, "costs.json"), TWO)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"cannot read the costs .*nowhere\.toml: No such file"):
        read_costs(tmp_path / "nowhere.toml", TWO)
