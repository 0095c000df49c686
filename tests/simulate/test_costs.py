"""Costs given in Python and in files, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from penstock.base.errors import ConfigError
from penstock.schedule.check import check
from penstock.schedule.families import build_schedule
from penstock.schedule.ops import Kind
from penstock.schedule.placement import Placement
from penstock.simulate import cost_file
from penstock.simulate.cost_file import read_costs, write_costs
from penstock.simulate.costs import Communication, Costs, Link
from penstock.simulate.simulator import simulate

FOUR = Placement.loop(2, 2)


def test_a_number_is_shared_by_the_stages_of_a_rank():
    costs = Costs.of(FOUR, 2, 4, 6)
    assert costs.seconds.tolist() == [[1, 5, 2, 3, 1]] * 4
    assert costs.seconds.dtype == np.int64


def test_a_number_is_not_shared_where_two_ranks_hold_copies_of_a_stage():
    costs = Costs.of(Placement.two_way(4), 2, 4, 6, gather=4, reduce=2)
    assert costs.seconds.tolist() == [[2, 10, 4, 6, 2]] * 4
    # But each of the two gathers and reduces the whole stage.
    assert (costs.gather.tolist(), costs.reduce.tolist()) == ([2] * 4, [1] * 4)
    # A share that is not whole is a float.
    costs = Costs.of(FOUR, 1, 2, 2)
    assert costs.seconds[:, Kind.F].tolist() == [0.5] * 4
    assert costs.seconds.dtype == np.float64


def test_a_list_gives_the_seconds_of_every_stage():
    costs = Costs.of(FOUR, [1, 2, 3, 4], 2, 2, full=[5, 5, 5, 9], recompute=4, pair=[3, 4, 5, 6])
    assert costs.seconds[:, Kind.F].tolist() == [1, 2, 3, 4]
    assert costs.seconds[:, Kind.B].tolist() == [5, 5, 5, 9]
    assert costs.seconds[:, Kind.I].tolist() == [1, 1, 1, 1]
    assert costs.seconds[:, Kind.R].tolist() == [2, 2, 2, 2]
    assert costs.pair.tolist() == [3, 4, 5, 6]


@pytest.mark.parametrize("bad", [-1, math.nan, math.inf, -0.5])
def test_a_cost_that_is_no_time_is_refused(bad: float):
    with pytest.raises(ConfigError, match=r"B must be a finite number of at least 0, got"):
        Costs.of(FOUR, 1, bad, 1)
    with pytest.raises(ConfigError, match=r"W of stage 2 must be a finite number of at least 0, got"):
        Costs.of(FOUR, 1, 1, [1, 1, bad, 1])
    with pytest.raises(ConfigError, match=r"latency must be a finite number"):
        Link(bad)


@pytest.mark.parametrize("bad", ["1", None, True, [1]])
def test_a_cost_that_is_no_number_is_refused(bad: object):
    with pytest.raises(ConfigError, match=r"F of stage 1 must be a number, got"):
        Costs.of(FOUR, [1, bad, 1, 1], 1, 1)


def test_costs_that_do_not_cover_a_stage_are_refused():
    with pytest.raises(ConfigError, match=r"F must cover stages 0\.\.3 of the schedule: stage 3 has no cost"):
        Costs.of(FOUR, [1, 1, 1], 1, 1)
    with pytest.raises(ConfigError, match=r"W must cover .*: there are costs of 5 stages"):
        Costs.of(FOUR, 1, 1, [1] * 5)
    with pytest.raises(ConfigError, match="pair must cover"):
        Costs.of(FOUR, 1, 1, 1, pair=[1])


def test_a_table_is_checked_like_the_rest():
    with pytest.raises(ConfigError, match=r"shape \(4, 3\); it needs \(stages, 5\)"):
        Costs(np.ones((4, 3)))
    table = np.ones((4, 5))
    table[1, Kind.W] = math.nan
    with pytest.raises(ConfigError, match=r"W of stage 1 must be a finite number"):
        Costs(table)


def test_a_message_takes_latency_and_bytes_over_bandwidth():
    talk = Communication([100, 200, 0], Link(1, 100), Link(5, 10))
    assert talk.transfer(4).tolist() == [[2, 15], [3, 25], [1, 5]]
    assert Communication(100, Link(3), Link(7)).transfer(3).tolist() == [[3, 7], [3, 7]]
    assert Communication(100, Link(3), Link(7)).transfer(3).dtype == np.int64
    with pytest.raises(ConfigError, match="message_bytes gives 3 numbers for 5 stages"):
        talk.transfer(5)


def test_ranks_fill_nodes_in_order():
    assert Communication(ranks_per_node=2).node(5).tolist() == [0, 0, 1, 1, 2]
    assert Communication().node(3).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("message", "make"),
    [
        ("bandwidth must be above 0", lambda: Link(0, 0)),
        ("bandwidth must be above 0", lambda: Link(0, "fast")),
        ("bandwidth must be above 0", lambda: Link(0, math.nan)),
        ("message_bytes must be a finite number", lambda: Communication(-1)),
        ("ranks_per_node must be a whole number of at least 1, got 0", lambda: Communication(ranks_per_node=0)),
        ("ranks_per_node must be a whole number of at least 1, got '8'", lambda: Communication(ranks_per_node="8")),
        ("blocks must be one of none, sender, receiver, both, got 'all'", lambda: Communication(blocks="all")),
        ("pair_output must be end or early, got 'now'", lambda: Costs.of(FOUR, 1, 1, 1, pair_output="now")),
        (
            "pair_output early needs messages that block no rank",
            lambda: Costs.of(FOUR, 1, 1, 1, pair_output="early", communication=Communication(blocks="receiver")),
        ),
    ],
)  # fmt: skip
def test_what_means_nothing_is_refused(message: str, make):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("cost", [2**63, 10**400, 1e300])
def test_a_cost_whose_sums_would_not_fit_is_refused(cost):
    with pytest.raises(ConfigError, match=r"F must be at most 4,611,686,018,427,387,904, got "):
        Costs.of(FOUR, cost, 1, 1)


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


def test_files_of_another_kind_and_missing_ones_are_refused(tmp_path: Path):
    for text, message in (("{", "is not a JSON file"), ("[1]", "holds a list, not a table")):
        with pytest.raises(ConfigError, match=message):
            read_costs(write(tmp_path, text, "costs.json"), TWO)
    with pytest.raises(ConfigError, match=r"cannot read the costs .*nowhere\.toml: No such file"):
        read_costs(tmp_path / "nowhere.toml", TWO)


THREE = Placement.loop(3)


def test_links_that_differ_by_boundary_price_each_message(tmp_path: Path):
    talk = Communication([100, 200], boundaries=[Link(1, 100), Link(5)])
    assert talk.transfer(3).tolist() == [[2, 2], [5, 5]]
    assert Communication(boundaries=[Link(1), Link(2)]).transfer(3).dtype == np.int64
    path = write(
        tmp_path, "F = 1\nB = 1\nW = 1\nlatency = [1, 5]\nbandwidth = 100\nmessage_bytes = [100, 200]"
    )
    costs = read_costs(path, THREE)
    assert costs.communication.transfer(3).tolist() == [[2, 2], [7, 7]]
    assert simulate(check(build_schedule("1f1b", 3, 1)).program, costs).end.max() == 9 + 2 * (2 + 7)
    write_costs(tmp_path / "again.toml", costs, "again")
    assert [link.latency for link in read_costs(tmp_path / "again.toml", THREE).communication.boundaries] == [
        1,
        5,
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("latency = [1, 2, 3]", "latency gives 3 numbers, and there are 2 boundaries between stages"),
        ("latency = [1, 2]\nranks_per_node = 2", "ranks_per_node is for one latency and one bandwidth"),
        ("bandwidth = [1, 0]", "bandwidth must be above 0"),
    ],
)
def test_links_by_boundary_that_fit_no_stages_are_refused(tmp_path: Path, text: str, message: str):
    path = write(tmp_path, f"F = 1\nB = 1\nW = 1\n{text}")
    with pytest.raises(ConfigError, match=message):
        read_costs(path, THREE)
    with pytest.raises(ConfigError, match="boundaries gives 1 link for 3 stages"):
        Communication(boundaries=[Link()]).transfer(3)


def test_a_late_rank_lengthens_exactly_its_own_ops():
    program = check(build_schedule("1f1b", 2, 2)).program
    costs = Costs.of(Placement.loop(2), 4, 4, 4).with_late(Placement.loop(2), {1: 0.5})
    trace = simulate(program, costs)
    spans = list(zip(trace.rank.tolist(), trace.start.tolist(), trace.end.tolist(), strict=True))
    # Rank 1 takes 6 for a forward and 12 for a backward; rank 0, in time, waits for its gradients.
    assert spans == [
        (0, 0, 4), (0, 4, 8), (0, 22, 30), (0, 40, 48),
        (1, 4, 10), (1, 10, 22), (1, 22, 28), (1, 28, 40),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "late", "message"),
    [
        ("1f1b", {4: 0.1}, "late: ranks are 0 to 3, got 4"),
        ("1f1b", {1: -0.1}, "late: the share of rank 1 must be a finite number of at least 0"),
        ("chimera", {1: 0.1}, "late: rank 1 shares its stages with another one"),
    ],
)
def test_a_late_rank_that_has_no_meaning_is_refused(name: str, late: dict[int, float], message: str):
    placement = build_schedule(name, 4, 4).placement
    with pytest.raises(ConfigError, match=message):
        Costs.of(placement, 1, 1, 1).with_late(placement, late)
