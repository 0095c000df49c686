from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.base.errors import ConfigError
from penstock.show.comparison import RunPair, pair_of
from penstock.show.run import read_run
from penstock.trace.folder import save_step
from tests.support.measured import kept_run, measured
from tests.support.simulated import built, timed


def pair(folder: Path, step: int | None = None) -> RunPair:
    """1f1b of 12 units on two ranks (9 of them computing), and zb-h1."""
    first = kept_run(folder, "first")
    second = folder / "second"
    save_step(second, 10, measured("zb-h1"))
    (second / "config.toml").write_text('[train]\nname = "second"\nsteps = 3\nzero = true\n')
    return pair_of(read_run(first), read_run(second), step)


def test_the_differences_of_causes_add_up_to_that_of_the_steps_and_json_can_represent_them(tmp_path: Path):
    compared = pair(tmp_path)
    first, second = (float(step.bubbles.makespan) for step in compared.steps)
    assert sum(part.difference for part in compared.parts) == pytest.approx(second - first)
    assert sum(part.first for part in compared.parts) == pytest.approx(first)
    assert compared.times()[-1] == ("step", "120 ms", "100 ms", "-20 ms")
    table = json.loads(json.dumps(pair(tmp_path).as_dict()))
    assert [run["title"] for run in table["runs"]] == ["first", "second"]
    assert table["config"]["train.steps"] == ["not set", "3"]
    assert sum(first for first, _ in table["mean_times"].values()) == pytest.approx(0.12)


def test_the_sentence_names_the_largest_part(tmp_path: Path):
    assert pair(tmp_path).sentence == (
        "The step of B takes 16.7% less time than A's: 100 ms instead of 120 ms. The largest part of the difference "
        "is 15 ms less cool-down, on average over the ranks."
    )
    run = read_run(kept_run(tmp_path, "again"))
    assert pair_of(run, run, None).sentence == "The steps of A and B take the same time, 120 ms."


def test_configs_differ_by_key_and_figures_stand_beside_each_other(tmp_path: Path):
    assert pair(tmp_path).config_differences() == [
        ("train.name", "'<b>markup</b>'", "'second'"), ("train.steps", "not set", "3"), ("train.zero", "not set", "true"),
    ]  # fmt: skip
    rows = {name: values for name, *values in pair(tmp_path).figures()}
    assert rows["schedule"] == ["1f1b", "zb-h1"]
    assert rows["ranks, stages, microbatches"] == ["2, 2, 3", "2, 2, 3"]
    assert rows["tokens a second"] == ["9", ""]
    assert rows["last loss"] == ["1.6667", ""]
    assert "MFU" not in rows


def test_a_step_is_chosen_in_both_and_seconds_and_ticks_are_not_compared(tmp_path: Path):
    assert pair(tmp_path, 10).numbers == (10, 10)
    with pytest.raises(ConfigError, match="second has no trace of step 1; traced steps: 10"):
        pair(tmp_path, 1)
    timed(built("1f1b", 2, 3), 1, 1, 1).save(tmp_path / "one.npz")
    with pytest.raises(ConfigError, match=r"first was measured in seconds and one\.npz simulated in ticks"):
        pair_of(read_run(kept_run(tmp_path, "first")), read_run(tmp_path / "one.npz"), None)
