from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.base.errors import ConfigError
from penstock.cli.simulate import command
from penstock.schedule.families import build_schedule
from penstock.schedule.text import write_csv
from penstock.show import analysis


def run(*words: str) -> str:
    outcome = CliRunner().invoke(command, words, catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    return outcome.output


def figures(*words: str) -> dict:
    return json.loads(run(*words, "--json"))


def test_figures_are_exact_for_whole_costs_shares_of_stages_and_latency():
    result = figures("1f1b", "-p", "4", "-m", "8", "--costs", "1,1,1")
    assert result["makespan"] == result["longest"] == result["lower_bound"] == 33
    assert isinstance(result["makespan"], int)
    assert (result["busy"], result["bubble"], result["peak_activations"]) == ([24] * 4, [9] * 4, [4, 3, 2, 1])
    words = ("interleaved-1f1b", "-p", "2", "-m", "4", "-v", "2", "--costs", "20,20,20", "--latency", "1")
    result = figures(*words)
    assert result["makespan"] == 4 * 60 + 60 // 2 + 2 * (2 * 2 - 1)
    assert result["stages"] == 4


def test_a_late_rank_is_simulated_in_the_order_of_ranks_in_time():
    words = ("1f1b", "-p", "2", "-m", "2", "--costs", "4,4,4")
    assert figures(*words, "--late", "1=0.5")["makespan"] == 48
    assert (
        figures(*words, "--late", "0=0.5", "--late", "1=0.5")["makespan"] == figures(*words)["makespan"] * 1.5
    )
    for text in ("1", "x=1", "1=fast"):
        with pytest.raises(ConfigError, match="--late must be RANK=SHARE"):
            run(*words, "--late", text)


def test_the_page_says_what_each_percentage_is_of_and_draws_the_timeline():
    lines = run("1f1b", "-p", "2", "-m", "3").splitlines()
    assert lines[0] == "1f1b: 2 ranks, 2 stages, 3 microbatches"
    assert [line.split()[:3] for line in lines[2:5]] == [
        ["makespan", "12", "from"],
        ["longest", "12", "the"],
        ["lower", "bound", "12"],
    ]
    assert "25.0% of ranks x makespan; 25.0% of the longest rank (the zero-bubble paper's rate)" in lines[5]
    assert lines[8].split() == ["rank", "busy", "bubble", "warm-up", "cool-down", "chunks"]
    assert lines[9].split() == ["0", "9", "3", "2", "1", "2"]
    assert lines[12].startswith("rank 0 F0")
    assert lines[15].split() == ["F", "forward", "B", "backward", "·", "idle"]


def test_families_stand_side_by_side():
    words = ("--compare", "1f1b,interleaved-1f1b,zb-v", "-p", "4", "-m", "8", "-v", "4", "--costs", "4,4,4")
    lines = run(*words).splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:5]}
    assert rows["1f1b"] == ["1", "132", "132", "0.0%", "27.3%", "27.3%", "4", "4"]
    assert rows["interleaved-1f1b"][:4] == ["4", "105", "105", "0.0%"]
    assert rows["zb-v"] == ["2", "102", "96", "0.0%", "5.9%", "0.0%", "8", "4"]
    assert any("idle share of ranks x makespan" in line for line in lines)
    result = figures("gpipe", *words)["schedules"]
    assert [one["schedule"] for one in result] == ["gpipe", "1f1b", "interleaved-1f1b", "zb-v"]


def test_a_csv_file_brings_its_own_counts(tmp_path: Path):
    path = tmp_path / "mine.csv"
    write_csv(build_schedule("1f1b", 2, 3), path)
    assert figures(str(path))["makespan"] == figures("1f1b", "-p", "2", "-m", "3")["makespan"] == 12
    with pytest.raises(ConfigError, match=r"a schedule of 3 microbatches, not 4; leave the option out"):
        run(str(path), "-m", "4")


def test_costs_may_come_from_a_file(tmp_path: Path):
    path = tmp_path / "costs.toml"
    path.write_text("F = [1, 3]\nB = 1\nW = 1\nlatency = 2\n")
    result = figures("1f1b", "-p", "2", "-m", "2", "--costs", str(path))
    assert result["busy"] == [6, 10]
    slower = figures("1f1b", "-p", "2", "-m", "2", "--costs", str(path), "--latency", "5")
    assert slower["makespan"] == result["makespan"] + 2 * 3


def test_the_costs_and_the_limit_reach_a_family_that_adapts():
    words = ("zb-auto", "-p", "2", "-m", "4", "--costs", "10,12,7", "--latency", "1", "--memory-limit")
    tight, loose = figures(*words, "2"), figures(*words, "4")
    assert max(tight["peak_activations"]) <= 2 < max(loose["peak_activations"]) <= 4
    assert loose["makespan"] < tight["makespan"]


def test_options_reach_the_families_that_have_them():
    words = ("-p", "4", "-m", "8", "-o", "group_size=8")
    assert max(figures("interleaved-1f1b", *words)["peak_activations"]) == 15
    result = figures("--compare", "1f1b,interleaved-1f1b", *words)["schedules"]
    assert [max(one["peak_activations"]) for one in result] == [4, 15]


SMALL = ("1f1b", "-p", "4", "-m", "4")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("1f1b", "-m", "4"), "1f1b is a family and needs --ranks"),
        (("1f1b", "-p", "4"), "1f1b is a family and needs --microbatches"),
        ((*SMALL, "--gather", "1"), "--gather is .* it needs --shard weights"),
        ((*SMALL, "--shard", "gradients"), "give --gather SECONDS or --reduce SECONDS"),
        ((*SMALL, "--costs", "1,nan,1"), "B must be a finite number of at least 0, got nan"),
        ((*SMALL, "--costs", "1,1"), "three numbers, such as 1,1,1, or a file; '1,1' is neither"),
        ((*SMALL, "--latency", "x"), "--latency must be a number of seconds, got 'x'"),
        ((*SMALL, "--latency", "-1"), "latency must be a finite number of at least 0, got -1"),
        ((*SMALL, "--memory-limit", "3"), "rank 0 holds 4 after 0F3, op 4 of its list, and may hold 3"),
        (("zb-auto", "-p", "4", "-m", "4", "--memory-limit", "0"), "1 is the least"),
        (
            ("--compare", "1f1b,interleaved-1f1b", "-p", "4", "-m", "8", "-o", "group_siz=8"),
            r"none of these schedules has an option 'group_siz' \(did you mean",
        ),
    ],
)  # fmt: skip
def test_bad_input_is_refused_in_one_line(words: tuple[str, ...], message: str):
    with pytest.raises(ConfigError, match=message) as error:
        run(*words)
    assert "\n" not in str(error.value)


def test_no_schedule_at_all_is_a_usage_error():
    outcome = CliRunner().invoke(command, ["-p", "4", "-m", "4"])
    assert outcome.exit_code == 2
    assert "name a schedule, or several with --compare" in outcome.output
    outcome = CliRunner().invoke(command, ["--compare", "1f1b,zb-h1", "-p", "2", "-m", "4", "--reduce", "1"])
    assert outcome.exit_code == 2


def test_many_ranks_keep_the_page_short():
    lines = run("gpipe", "-p", "200", "-m", "2").splitlines()
    assert len(lines) < 90
    assert sum(line.strip() == "..." for line in lines) == 1


def test_a_page_is_written_with_every_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "plan.html"
    costs = (
        tmp_path / "costs.toml"
    )  # sizes of messages differ by boundary, and still fit schedules with others
    costs.write_text("F = 4\nB = 4\nW = 4\nlatency = 1\nbandwidth = 8\nmessage_bytes = [1, 2, 4]\n")
    words = ("--compare", "1f1b,zb-h1", "-p", "4", "-m", "8", "--memory-limit", "6")
    words = (*words, "--costs", str(costs), "--html", str(path))
    monkeypatch.setattr(analysis, "plan", None)  # a simulation needs no other plan
    assert run(*words).splitlines()[-1] == f"page: {path}"
    text = path.read_text()
    assert '<option value="0" selected>1f1b</option><option value="1">zb-h1</option>' in text
    assert '"limit":6' in text
    assert "memory-limit = 6" in text
    assert "With zb-v in the same memory, the step would be" in text


SHARDED = ("breadth-first", "-p", "2", "-m", "4", "-v", "4", "--shard", "weights", "--window", "2")


def test_gathers_and_reductions_of_sharded_weights_are_timed_and_drawn_with_prices_from_a_file_too(
    tmp_path: Path,
):
    result = figures(*SHARDED, "--costs", "4,4,4", "--gather", "8", "--reduce", "4")
    # Rank 0: the first gather of 2, while later ones are beside the ops before; the last reduction.
    assert (result["makespan"], result["gathers"], result["reductions"]) == (54, [6, 6], [4, 4])
    assert (result["exposed_gathers"], result["exposed_reductions"]) == ([2, 0], [1, 1])
    assert figures("breadth-first", "-p", "2", "-m", "4", "-v", "4", "--costs", "4,4,4")["makespan"] == 51
    text = run(*SHARDED, "--gather", "2", "--reduce", "1")
    assert "at most 4 reductions a rank and step, and 6 gathers of a stage" in text
    assert "= reduction   + gather of weights" in text
    assert "exposed" in text
    path = tmp_path / "costs.toml"
    path.write_text("F = 4\nB = 4\nW = 4\ngather = 8\nreduce = 9\n")
    result = figures(*SHARDED, "--costs", str(path), "--reduce", "4")
    assert (result["makespan"], result["exposed_gathers"]) == (54, [2, 0])


def test_what_of_the_gradients_reduction_is_exposed():
    result = figures("interleaved-1f1b", "-p", "4", "-m", "8", "-v", "2", "--reduce", "4")["reduction"]
    assert result["exposed_in_one_bucket"] == [2.0] * 4
    assert result["buckets"] == 16
    # The later stage of each rank is reduced while the earlier one works.
    assert result["exposed"] == [1.0625] * 4
    text = run("interleaved-1f1b", "-p", "4", "-m", "8", "-v", "2", "--reduce", "4")
    assert "2 exposed after the last op" in text
