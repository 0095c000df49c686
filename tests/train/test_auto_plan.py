"""`penstock train --plan auto` measures, chooses and trains."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from penstock.cli import group
from penstock.errors import ConfigError
from penstock.train.auto_plan import choose_plan
from penstock.train.config.config import from_mapping

SMALL = {"model": {"width": 32, "layers": 4, "hidden": 64}, "data": {"sequence": 16}, "train": {"batch": 8}}


def test_the_plan_is_of_the_ranks_that_were_given():
    lines: list[str] = []
    config = from_mapping({**SMALL, "parallel": {"pp": 2}})
    planned = choose_plan(config, lines.append)
    assert planned.parallel.pp == 2
    assert config.train.batch % planned.schedule.microbatches == 0
    assert (planned.model, planned.train, planned.data) == (config.model, config.train, config.data)
    assert any("ms a step expected" in line for line in lines)


@pytest.mark.parametrize("parallel", [{"dp": 2}, {"tp": 2}])
def test_processes_are_planned_elsewhere(parallel: dict[str, int]):
    with pytest.raises(ConfigError, match="penstock doctor --measure"):
        choose_plan(from_mapping({**SMALL, "parallel": parallel}), print)


def test_a_resumed_run_keeps_its_layout():
    result = CliRunner().invoke(group, ["train", "--plan", "auto", "--resume", "auto"])
    assert result.exit_code == 2
    assert "--plan chooses the layout of a new run" in result.output


@pytest.mark.slow
def test_a_planned_run_trains(tmp_path):
    sets = [
        f"train.folder={tmp_path}",
        "train.name=run",
        "train.steps=2",
        "train.eval_batches=1",
        "sample.length=2",
    ]
    sets += ["model.width=32", "model.layers=4", "model.hidden=64", "data.sequence=16", "train.batch=8"]
    result = CliRunner().invoke(group, ["train", *sets, "--ranks", "2", "--plan", "auto", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["steps"] == 2
