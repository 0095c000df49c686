"""`penstock train --plan auto` measures, chooses and trains."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.base.errors import ConfigError
from penstock.cli import group
from penstock.runtime.workers.pool import LocalProcesses
from penstock.train import auto_plan
from penstock.train.auto_plan import choose_plan
from penstock.train.config.config import Config, from_mapping
from penstock.train.config.file import load
from tests.support.commands import python

SMALL = {"model": {"width": 32, "layers": 4, "hidden": 64}, "data": {"sequence": 16}, "train": {"batch": 8}}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"parallel": {"tp": 2}}, "a mesh of pp 2 x dp 1 x tp 2 needs 4 processes"),
        ({"parallel": {"pp": 64}}, "the model's 4 blocks cannot be split into 64 stages; take at most 4 pipeline ranks"),
        ({"runtime": {"device": "gpu"}}, r"runtime.device must be one of cpu, cuda"),
    ],
)  # fmt: skip
def test_runs_that_cannot_be_measured_are_refused(sections: dict[str, dict[str, object]], message: str):
    with pytest.raises(ConfigError, match=message):
        choose_plan(from_mapping({**SMALL, **sections}), print)


def test_processes_on_other_machines_are_refused(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="2 of 4 processes are on others; plan it by `penstock plan`"):
        choose_plan(from_mapping(SMALL), print)
    with pytest.raises(ConfigError, match=r"parallel\.tp must be 1, got 2"):
        choose_plan(from_mapping({**SMALL, "parallel": {"tp": 2}}), print)


def test_only_new_runs_are_planned():
    result = CliRunner().invoke(group, ["train", "--plan", "auto", "--resume", "auto"])
    assert result.exit_code == 2
    assert "a resumed run keeps its layout" in " ".join(result.output.split())


def plan_of_replicas(rank: int) -> Config:
    """Return the plan that a process of two replicas takes; only the first one reports it."""
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:  # what is measured need not be steady
        patch.setattr(auto_plan, "_SECONDS", 0.2)
        patch.setattr(auto_plan, "measure_cluster", partial(auto_plan.measure_cluster, rounds=3))
        planned = choose_plan(from_mapping({**SMALL, "parallel": {"dp": 2, "zero": True}}), lines.append)
    assert len(lines) == (2 if rank == 0 else 0)
    return planned


@pytest.mark.slow
def test_replicas_in_processes_take_the_same_plan(processes: LocalProcesses):
    first, second = processes.run(2, plan_of_replicas)
    assert first == second
    assert (first.parallel.pp, first.parallel.dp, first.parallel.zero) == (1, 2, True)
    assert first.schedule.microbatches % 2 == 0


@pytest.mark.exhaustive  # beside the processes above
def test_a_run_under_torchrun_is_planned_once_for_all_processes(tmp_path: Path):
    folder = [f"train.folder={tmp_path}", "train.name=run", "train.steps=2", "train.eval_batches=1"]
    given = [f"{section}.{key}={value}" for section, table in SMALL.items() for key, value in table.items()]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = ["-m", "penstock", "train", *folder, *given, "train.report=false", "sample.length=2"]
    done = python([*launch, *words, "--plan", "auto"], tmp_path, seconds=500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("measuring the model's layers with 2 ranks busy") == 1
    assert "ms per step expected" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("planned pp=2,dp=1,tp=1,")]
    ran = load(tmp_path / "run" / "config.toml")
    assert f"schedule={ran.schedule.name}" in line
    assert ran.train.batch % ran.schedule.microbatches == 0
    assert f"microbatch={ran.train.batch // ran.schedule.microbatches}" in line
    assert ran.parallel.pp == 2
    assert (ran.model, ran.train.batch) == (from_mapping(SMALL).model, 8)


@pytest.mark.exhaustive
def test_a_planned_run_of_threads_trains():
    lines: list[str] = []
    planned = choose_plan(from_mapping({**SMALL, "parallel": {"pp": 2}}), lines.append)
    assert planned.parallel.pp == 2
    assert any("ms per step expected" in line for line in lines)
