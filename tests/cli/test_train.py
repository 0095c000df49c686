from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from penstock.base import host
from penstock.cli import group
from tests.support.commands import python
from tests.support.lanes import exhaustive
from tests.support.launchers import SRUN, free_port
from tests.support.tiny_run import text_folder

LONG = "n" * 5000
"""A name too long for any file system; even to look for it is an error."""

TINY = [
    "model.width=16", "model.layers=2", "model.heads=2", "model.kv_heads=1", "model.hidden=16", "data.sequence=12",
    "schedule.microbatches=2", "train.steps=2", "train.batch=4", "train.eval_batches=1", "train.report=false",
    "sample.length=4",
]  # fmt: skip


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> Result:
    monkeypatch.chdir(folder)
    return CliRunner().invoke(group, ["train", "--set", f"data.path={folder / 'text'}", *TINY, *words])


def test_a_config_file_is_read_and_both_baselines_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text_folder(tmp_path)
    (tmp_path / "my.toml").write_text("[train]\nname = 'first'\n")
    result = run(tmp_path, monkeypatch, "my.toml", "train.report=true")
    assert result.exit_code == 0, result.output
    assert "step 2/2  loss " in result.output
    assert "held-out bits/byte: " in result.output
    assert "; a bigram table: " in result.output
    assert "kept in runs/first" in result.output
    assert result.output.endswith("\nreport: runs/first/report.html\n")
    assert (tmp_path / "runs" / "first" / "report.html").exists()
    assert (tmp_path / "runs" / "first" / "model.safetensors").exists()


def test_json_is_one_object_on_stdout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text_folder(tmp_path)
    result = run(tmp_path, monkeypatch, "--json", "train.name=first", "--ranks", "1")
    outcome = json.loads(result.stdout)
    assert outcome["folder"] == "runs/first"
    assert outcome["held_out_bits"] > 0
    assert "on 1 rank (cpu, " in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("both", [False, *exhaustive(True)], ids=["stdout", "stdout and stderr"])
def test_a_run_outlives_the_reader_of_its_output(tmp_path: Path, both: bool):
    """As ``penstock train | head -1`` does, with and without ``2>&1``."""
    words = ["--set", f"data.path={text_folder(tmp_path)}", *TINY, "train.steps=40", "train.log_every=1"]
    command = [sys.executable, "-m", "penstock", "train", *words, "train.name=read"]
    stderr = subprocess.STDOUT if both else subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("run runs/read: ")
        process.stdout.close()
        said = process.stderr.read() if process.stderr is not None else ""
    assert process.returncode == 0, said
    lost = (
        "penstock: cannot write to stdout: Broken pipe. The run continues, and its folder has its numbers\n"
    )
    assert said == ("" if both else lost)
    lines = (tmp_path / "runs/read/metrics.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    assert kinds == ["train"] * 40 + ["held_out", "final"]
    assert (tmp_path / "runs/read/model.safetensors").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.stepz=3"], "no key train.stepz (did you mean train.steps?)"),
        (
            ["--lr=1e-4"],
            "--lr is not an option; write a key of the config as section.key=VALUE (did you mean optim.lr?)",
        ),
        (["--rank", "2"], "No such option '--rank'. (Did you mean one of: "),
        (["--colour", "2"], "--colour is not an option; write a key of the config as section.key=VALUE"),
        (["steps=2"], "got 'steps=2' (did you mean train.steps?)"),
        (["optim.arguments.momentum=0.9"], "no argument 'momentum' of AdamW"),
        (["--ranks", "0"], "parallel.pp must be greater than or equal to 1"),
        (["absent.toml"], "cannot read the config absent.toml"),
        (["--set", "data.path=/nowhere"], "there is no file or folder /nowhere"),
        (["one.toml", "two.toml"], "give at most one config, got"),
        (["--set", "train.name=.."], "train.name must be a plain name without a path"),
        (["--set", "train.name=a/b", "--resume"], "train.name must be a plain name without a path"),
        (["--set", f"train.name={LONG}"], "of at most 255 bytes, got 'nnn"),
        (["--set", f"data.path={LONG}"], "there is no file or folder nnn"),
        (["--set", f"model.path={LONG}"], "there is no local folder 'nnn"),
        (["--set", f"model.config={LONG}"], "there is no file nnn"),
        (["--set", f"train.resume={LONG}"], "which is neither the folder of a run"),
        (["--set", "parallel.pp=1000000"], "a schedule has at most 100,000 ranks"),
        (["--set", f"schedule.microbatches={10**9}", f"train.batch={10**9}"], "it has 4,000,000,000 ops"),
        (["--set", f"train.batch={2**31 - 16}"], "take about"),
        (["--resume", LONG], "is neither the folder of a run nor a checkpoint in one"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: list[str], said: str, tmp_path: Path, monkeypatch, refused
):
    monkeypatch.chdir(tmp_path)
    assert said in refused("train", *words, usage=True)
    assert list(tmp_path.iterdir()) == []


def test_a_printed_config_is_the_config_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text_folder(tmp_path)
    words = [
        "optim.name=SGD",
        "optim.arguments.momentum=0.9",
        "train.epochs=0.1",
        "train.batch=2",
        "train.name=kept",
    ]
    options = [word for word in TINY if not word.startswith(("train.steps", "train.batch"))]
    monkeypatch.chdir(tmp_path)
    command = ["train", "--set", f"data.path={tmp_path / 'text'}", *options, *words]
    printed = CliRunner().invoke(group, [*command, "--print-config"])
    assert printed.exit_code == 0, printed.output
    assert not (tmp_path / "runs").exists()
    config = tomllib.loads(printed.stdout)
    assert config["optim"]["arguments"] == {"momentum": 0.9}
    assert (config["parallel"]["pp"], config["optim"]["lr"]) == (2, 0.001)
    assert "steps" not in config["train"]
    ran = CliRunner().invoke(group, command)
    assert ran.exit_code == 0, ran.output
    assert "0.1 epochs of " in ran.output
    assert "; SGD with weight decay 0, momentum 0.9" in ran.output
    assert tomllib.loads((tmp_path / "runs/kept/config.toml").read_text()) == config
    (tmp_path / "printed.toml").write_text(printed.stdout)
    again = CliRunner().invoke(group, ["train", "printed.toml", "train.name=again"])
    assert again.exit_code == 0, again.output


def outputs(folder: Path, *options: str, **environments: dict[str, str]) -> list[str]:
    """Return what processes print that train one run, each in its environment."""
    command = [sys.executable, "-m", "penstock", "train", *options, f"data.path={text_folder(folder)}", *TINY]
    started = [
        subprocess.Popen(command, env=environment, cwd=folder, text=True, stdout=subprocess.PIPE)
        for environment in environments.values()
    ]
    try:
        told = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * len(started), told
    return told


@pytest.mark.exhaustive  # a loop under srun is in tests/runtime/start/test_launch_environment.py
def test_under_srun_every_task_is_a_rank_of_one_run(tmp_path: Path):
    step = SRUN | {
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0", "MASTER_PORT": free_port(), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    tasks = {f"task{r}": os.environ | step | {"SLURM_PROCID": r, "SLURM_LOCALID": r} for r in "01"}
    first, second = outputs(tmp_path, "--json", **tasks)
    assert json.loads(first)["steps"] == 2
    assert second == ""
    assert len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.slow
def test_code_2_is_only_for_what_is_refused_before_a_run_begins(tmp_path: Path):
    text_folder(tmp_path)
    words = ["-m", "penstock", "train", f"data.path={tmp_path / 'text'}", *TINY, "train.name=one"]
    no_memory = ["runtime.recompute=auto", "runtime.memory=1"]  # found out in the first step
    begun = python([*words, *no_memory], tmp_path)
    assert begun.returncode == 1, begun.stderr
    assert "may hold 1" in begun.stderr
    assert (tmp_path / "runs" / "one").is_dir()
    assert python(words, tmp_path).returncode == 2  # the folder exists


@pytest.mark.slow
def test_processes_of_two_launchers_on_one_machine_share_its_cores(tmp_path: Path):
    """Each launcher says that its one process is alone on the machine."""
    shared = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "LOCAL_WORLD_SIZE": "1",
    }
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | shared
    first, _ = outputs(tmp_path, **{f"rank{r}": environment | {"RANK": r, "LOCAL_RANK": "0"} for r in "01"})
    threads = max(1, host.cores() // 2)
    assert f"on 2 ranks (cpu, {threads} CPU thread{'s' if threads > 1 else ''} per rank)" in first
