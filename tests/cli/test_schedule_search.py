from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from penstock.cli import group, main, schedule_search
from penstock.schedule.text import read_csv
from tests.support.lanes import exhaustive, slow


def run(*words: object) -> str:
    result = CliRunner().invoke(group, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def search(*words: object) -> dict[str, object]:
    found = json.loads(run("schedule", "search", *words, "--json"))
    assert isinstance(found, dict)
    return found


def test_the_found_schedule_is_a_file_that_the_other_commands_read(tmp_path: Path):
    path = tmp_path / "best.csv"
    costs = ("--costs", "10,10,10", "--latency", 1, "--memory-limit", 5)
    found = search("-p", 4, "-m", 12, "--backward", "full", *costs, "--out", path)
    assert (found["makespan"], found["bubble"], found["lower_bound"], found["gap"]) == (456, 96, 456, 0.0)
    assert found["peak"] == max(found["peaks"]) <= 5
    assert found["seconds"] > 0
    simulated = json.loads(run("simulate", path, *costs, "--json"))
    assert simulated["makespan"] == 456
    assert simulated["peak_activations"] == found["peaks"]
    assert "valid" in run("schedule", "check", path, "--memory-limit", 5)


def test_costs_are_those_of_a_rank_and_the_limit_counts_stage_activations():
    found = search("-p", 4, "-m", 6, "-v", 2, "--costs", "2,2,2", "--memory-limit", 8, "--seconds", 120)
    assert (found["makespan"], found["bubble"]) == (45, 9)


def test_two_pipes_have_a_copy_of_every_stage(tmp_path: Path):
    path = tmp_path / "best.csv"
    words = ("--placement", "bidirectional", "--backward", "split", "--memory-limit", 4, "--seconds", 120)
    found = search("-p", 4, "-m", 8, *words, "--costs", "3,3,2", "--out", path)
    assert found["makespan"] == 67
    assert read_csv(path).placement.holders[0] == (0, 3)
    one, two = (search("-p", 2, "-m", 2, *stages, *words)["makespan"] for stages in ((), ("-v", 2)))
    assert one == two


def test_costs_may_come_from_a_file_and_memory_be_counted_in_bytes(tmp_path: Path):
    file = tmp_path / "costs.toml"
    file.write_text("F = [3, 2, 2]\nB = [3, 2, 4]\nW = [2, 2, 2]\nlatency = 1\n")
    words = ("-p", 3, "-m", 5, "--backward", "split", "--costs", file, "--seconds", 0.5)
    found = search(*words, "--memory-limit", "7GB", "--saved", "2GB,2GB,3GB")
    assert 3e9 <= found["peak"] <= 7e9
    assert search("-p", 4, "-m", 4, "--saved", "9GB", "--seconds", 1)["peak"] == 36 * 10**9


def test_without_json_it_prints_time_memory_bound_and_gap():
    said = run("schedule", "search", "-p", 2, "-m", 4, "--memory-limit", 2, "--seconds", 1)
    for line in (
        "makespan      15",
        "memory        2 activations (of 2)",
        "lower bound   15  ",
        "gap           0.00%",
    ):
        assert line in said
    assert "valid" in run("schedule", "check", "searched", "-p", 2, "-m", 3, "--memory-limit", 1)


C20 = "F=1\nB=1\nW=1\nranks_per_node=3\nlatency=0\nbandwidth_between_nodes=10.0\nmessage_bytes=[0,0,1000]\n"


@pytest.mark.parametrize(("microbatches", "makespan"), [(1, 12), (3, 18)])
def test_the_bound_of_two_pipes_counts_every_assignment_of_microbatches(
    tmp_path: Path, microbatches: int, makespan: int
):
    file = tmp_path / "costs.toml"
    file.write_text(C20)  # messages are slow in one of the two directions alone
    words = ("-p", 4, "-m", microbatches, "--placement", "bidirectional", "--costs", file)
    found = search(*words, "--seconds", 4)
    assert found["makespan"] == makespan
    assert found["lower_bound"] <= makespan
    assert (found["ended"] == "proved") == (found["gap"] == 0)


UNEVEN = "F=[1,2,3,4]\nB=[1,2,3,4]\nW=[1,2,3,4]\nblocks='both'\n"


# Joined halves, pairs and nodes; the rest has no bound of its own.
@pytest.mark.parametrize(
    ("costs", "backward"),
    [
        (f"{UNEVEN}full=[1,3,5,6]\nlatency=0.5\n", "split"),
        ("F=1\nB=1\nW=1\npair=1.5\npair_output='early'\n", "full"),
        *slow(("F=1\nB=1\nW=1\nranks_per_node=2\nlatency=0.1\nlatency_between_nodes=3\n", "split")),
        *exhaustive((f"{UNEVEN}latency=1.0\n", "full"), (f"{UNEVEN}latency=1.0\n", "split")),
    ],
    ids=["joined", "pairs", "nodes", "blocking full", "blocking split"],
)
def test_proved_means_a_gap_of_0_and_the_bound_is_the_one_that_ended_the_search(
    tmp_path: Path, costs: str, backward: str
):
    file = tmp_path / "costs.toml"
    file.write_text(costs)
    found = search("-p", 4, "-m", 4, "--backward", backward, "--costs", file, "--seconds", 0.5)
    assert (found["ended"] == "proved") == (found["gap"] < 1e-8)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-v", "2", "--memory-limit", "1"), "takes 2 on rank 0, so 2 is the least"),
        (("--memory-limit", "4GB"), "unless --saved gives their bytes, got '4GB'"),
        (("--memory-limit", "lots", "--saved", "1GB"), "--memory-limit must be bytes above 0"),
        (("--placement", "bidirectional", "-v", "3"), "got 3 stages per rank; take 1"),
        (("--placement", "bidirectional", "-p", "3"), "two pipes need an even number of ranks"),
        (("--costs", "1,1"), "--costs must be three numbers"),
        (("-m", "100000000"), "is too large"),
        (("--saved", "9GB,8GB"), "--saved must be one number of bytes, or one for each of the 4"),
        (("--waiting", "1,2,3"), "--waiting must be one number of bytes, or one for each of the 4"),
        (("--memory-limit", "3", "--saved", "1.5"), "--saved must be a whole number of bytes"),
        (("--seconds", "nan"), "--seconds must be a number above 0"),
        (("--out", "best.json"), "--out must end in .csv"),
    ],
)  # fmt: skip
def test_what_cannot_be_searched_is_refused_in_one_line(words: tuple[str, ...], message: str, refused):
    assert message in refused("schedule", "search", "-p", 4, "-m", 4, *words)


def test_an_interrupt_before_the_first_order_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    search = schedule_search.search_schedule

    def interrupted(*args: Any, **options: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return search(*args, **options)

    monkeypatch.setattr("sys.argv", ["penstock", "schedule", "search", "-p", "4", "-m", "4"])
    monkeypatch.setattr(schedule_search, "search_schedule", interrupted)
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 130
    assert "interrupted before an order was found" in capsys.readouterr().err
