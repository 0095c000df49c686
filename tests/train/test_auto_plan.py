"""`penstock train --plan auto` measures, chooses and trains."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from penstock.base.errors import ConfigError
from penstock.runtime.workers.pool import LocalProcesses
from penstock.train import auto_plan
from penstock.train.auto_plan import choose_plan
from penstock.train.config.config import Config, from_mapping
from penstock.train.config.file import load
from penstock.train.run_folder import keep_config
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


def test_processes_on_other_machines_are_refused():
    auto_plan._require_one_machine(["one"] * 4)
    with pytest.raises(ConfigError, match="2 of 4 processes are on others; plan it by `penstock plan`"):
        auto_plan._require_one_machine(["one", "one", "other", "other"])


def of_run(folder: Path, **sections: dict[str, object]) -> Config:
    """Return the config with which the run of the folder is started, and started again."""
    train = {"folder": str(folder.parent), "name": folder.name, "resume": "auto", "batch": 8}
    return from_mapping({**SMALL, **sections, "train": train})


def test_a_run_that_is_resumed_on_as_many_ranks_keeps_its_layout(tmp_path: Path):
    folder, lines = tmp_path / "run", list[str]()
    layout: dict[str, dict[str, object]] = {
        "schedule": {"name": "gpipe", "microbatches": 2, "split": [1, 3]},
        "parallel": {"pp": 2, "virtual_stages": 1},
        "runtime": {"recompute": "full"},
    }
    before = of_run(folder, **layout)
    folder.mkdir()
    keep_config(folder, before)
    given = of_run(folder, runtime={"timeout": 90.0})
    planned = choose_plan(given, lines.append)
    assert (planned.schedule, planned.parallel, planned.runtime.recompute) == (
        before.schedule,
        before.parallel,
        "full",
    )
    assert (planned.runtime.timeout, planned.train) == (90.0, given.train)
    assert lines == ["the layout stays that of the last start, which had 2 ranks too"]
    with pytest.raises(ConfigError, match="cannot be split into 64 stages"):  # planned again
        choose_plan(of_run(folder, parallel={"pp": 64}), lines.append)


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
