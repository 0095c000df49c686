"""A resumed run has the weights, losses and metrics of a run that was never stopped."""

from __future__ import annotations

import os
import re
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.base.errors import ConfigError, DataError
from penstock.base.run_lock import LOCK
from penstock.checkpoint.find import damage, read_manifest, steps_in
from penstock.checkpoint.manifest import MANIFEST, digest_of_config, dump
from penstock.huggingface import weights
from penstock.runtime.workers.pool import LocalProcesses
from penstock.train.config.config import Config
from penstock.train.loop import train
from penstock.train.run_log import Reporter
from tests.support.tiny_run import text_folder
from tests.support.trainer import config_of, metrics, run, same, stopped_at


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("trained")
    run(config_of(root, text_folder(root), "straight", 6))
    return root


@pytest.fixture
def straight(tmp_path: Path, trained: Path) -> Path:
    """A run of 6 steps, in one go."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path / "runs" / "straight"


def test_a_second_run_in_the_folder_is_refused_and_the_first_is_not_disturbed(tmp_path: Path):
    """Both would end with 0, and delete each other's unfinished checkpoints."""
    config = config_of(tmp_path, text_folder(tmp_path), "busy", 4)
    again = config_of(tmp_path, tmp_path / "text", "busy", 4, resume="auto")

    class Second(Reporter):
        refused: list[str]

        def step(self, done: int, loss: float) -> None:
            with pytest.raises(ConfigError, match=f"in use by process {os.getpid()} on host ") as error:
                run(again)
            self.refused.append(str(error.value))

    second = Second()
    second.refused = []
    train(config, lambda steps, leads: second)
    folder = tmp_path / "runs" / "busy"
    assert len(second.refused) == 4
    assert all("\n" not in line for line in second.refused)
    sound = [(step, damage(path, read_manifest(path))) for step, path in steps_in(folder / "checkpoints")]
    assert sound == [(4, []), (2, [])]
    assert not (folder / LOCK).exists()


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"pp": 2}, {"pp": 1}, {"pp": 4}], ids=str)
def test_a_run_that_goes_on_is_the_run_that_was_never_stopped(tmp_path: Path, straight: Path, layout):
    text = tmp_path / "text"
    folder = tmp_path / "runs" / "again"
    run(config_of(tmp_path, text, "again", 6))
    stopped_at(tmp_path, folder, 4)
    said = run(config_of(tmp_path, text, "again", 6, str(folder), parallel=layout))
    assert f"resuming from {folder / 'checkpoints' / 'step-00000004'}" in said
    same(folder, straight)
    kept = tomllib.loads((folder / "config.toml").read_text())
    assert kept["parallel"]["pp"] == layout["pp"]
    assert kept["train"]["resume"] == ""


def in_processes(rank: int, config: Config) -> None:
    torch.set_num_threads(1)
    run(config)


@pytest.mark.slow
def test_it_goes_on_in_processes(tmp_path: Path, straight: Path, processes: LocalProcesses):
    run(config_of(tmp_path, tmp_path / "text", "again", 6))
    folder = tmp_path / "runs" / "again"
    stopped_at(tmp_path, folder, 2)
    processes.run(2, in_processes, config_of(tmp_path, tmp_path / "text", "again", 6, str(folder)))
    same(folder, straight)
    assert [step for step, _ in steps_in(folder / "checkpoints")] == [6, 4, 2]


def test_auto_starts_a_run_and_goes_on_with_it(tmp_path: Path):
    text = text_folder(tmp_path)
    said = run(config_of(tmp_path, text, "auto", 4, "auto"))
    assert "no checkpoint to resume from: the run starts at its first step" in said
    said = run(config_of(tmp_path, text, "auto", 6, "auto"))
    folder = tmp_path / "runs" / "auto"
    assert f"resuming from {folder / 'checkpoints' / 'step-00000004'}" in said
    assert [line["step"] for line in metrics(folder) if line["kind"] == "train"] == [1, 2, 3, 4, 5, 6]


def test_the_last_step_is_saved_whatever_its_number(tmp_path: Path, straight: Path):
    run(config_of(tmp_path, tmp_path / "text", "again", 5))
    folder = tmp_path / "runs" / "again"
    assert [step for step, _ in steps_in(folder / "checkpoints")] == [5, 4, 2]
    said = run(config_of(tmp_path, tmp_path / "text", "again", 6, str(folder)))
    assert f"resuming from {folder / 'checkpoints' / 'step-00000005'}" in said
    assert [line["step"] for line in metrics(folder) if line["kind"] == "train"] == [1, 2, 3, 4, 5, 6]


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_finished_run_without_a_checkpoint_is_not_trained_again(tmp_path: Path, straight: Path):
    shutil.rmtree(straight / "checkpoints")
    before = files_of(straight)
    config = config_of(tmp_path, tmp_path / "text", "straight", 6, "auto", optim={"lr": 1e-3})
    with pytest.raises(ConfigError, match=r"a different run: optim.lr was 0.004 and is 0.001"):
        run(config)
    assert files_of(straight) == before
    config = config_of(tmp_path, tmp_path / "text", "straight", 6, "auto")
    (straight / "sample.txt").unlink()
    assert any("is finished" in line for line in run(config))
    after = files_of(straight)
    kept = ("model.safetensors", "metrics.jsonl", "sample.txt")
    assert all(after[straight / name] == before[straight / name] for name in kept)
    assert not any((straight / "checkpoints").glob("*"))
    (straight / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="is finished and has no checkpoint to resume from"):
        run(config)


@pytest.mark.slow
@pytest.mark.parametrize("in_ranks", [False, True], ids=["threads", "processes"])
def test_with_nothing_left_to_do_what_is_missing_is_written(
    tmp_path: Path, straight: Path, processes: LocalProcesses, in_ranks: bool
):
    config = config_of(tmp_path, tmp_path / "text", "straight", 6, str(straight), train={"report": True})
    before, weights_before = files_of(straight), weights.load(straight)
    for name in ("model.safetensors", "sample.txt"):
        (straight / name).unlink()
    if in_ranks:
        processes.run(2, in_processes, config)
    else:
        assert any("all 6 steps are done" in line for line in run(config))
    after, now = files_of(straight), weights.load(straight)
    kept = [
        path for path in before if path.name in ("metrics.jsonl", "sample.txt") or "checkpoints" in path.parts
    ]
    assert len(kept) > 2
    assert all(after[path] == before[path] for path in kept)
    assert (straight / "report.html").is_file()
    assert now.keys() == weights_before.keys()
    assert all(torch.equal(now[name], weight) for name, weight in weights_before.items())


def test_a_run_that_ended_before_its_last_line_is_ended(tmp_path: Path, straight: Path):
    """Killed after its last step: evaluated, sampled and closed, without a step."""
    kept = metrics(straight)
    path = straight / "metrics.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    run(config_of(tmp_path, tmp_path / "text", "straight", 6, str(straight)))
    assert metrics(straight) == kept


def test_a_damaged_checkpoint_is_told_and_set_aside(tmp_path: Path, straight: Path):
    newest = straight / "checkpoints" / "step-00000006"
    damaged = next(newest.glob("stage-*"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    kept = metrics(straight)
    said = run(config_of(tmp_path, tmp_path / "text", "straight", 6, str(straight)))
    assert any(line.startswith(f"refused: {damaged}") for line in said)
    assert f"resuming from {straight / 'checkpoints' / 'step-00000004'}" in said
    assert (straight / "checkpoints" / "step-00000006.set-aside").is_dir()
    assert metrics(straight) == kept


def test_an_earlier_checkpoint_can_be_chosen(tmp_path: Path, straight: Path):
    kept = metrics(straight)
    chosen = straight / "checkpoints" / "step-00000002"
    said = run(config_of(tmp_path, tmp_path / "text", "straight", 6, str(chosen)))
    assert f"resuming from {chosen}" in said
    assert metrics(straight) == kept


@pytest.mark.parametrize(
    ("steps", "sections", "said"),
    [
        (5, {}, "train.steps must be at least 6, the step of .*, got 5; give more steps"),
        (8, {"optim": {"lr": 0.5}}, r"belongs to a different run: optim.lr was 0.004 and is 0.5"),
        (8, {"train": {"seed": 4}}, r"belongs to a different run: train.seed was 0 and is 4"),
        (8, {"model": {"width": 32}}, "does not fit|a different run"),
        (8, {"train": {"accumulate": 2}}, r"belongs to a different run: train.accumulate was 1 and is 2"),
        (
            8,
            {"train": {"reduction": "sum"}},
            r"belongs to a different run: train.reduction was 'mean' and is 'sum'",
        ),
        (
            8,
            {"runtime": {"precision": "bf16"}},
            r"belongs to a different run: runtime.precision was 'fp32' and is 'bf16'",
        ),
        (
            8,
            {"optim": {"name": "SGD", "lr": 0.004}},
            r"belongs to a different run: optim.name was 'AdamW' and is 'SGD'",
        ),
    ],
)
def test_what_cannot_go_on_is_refused_and_the_run_stays_as_it_is(
    tmp_path, straight: Path, steps, sections, said
):
    before = {path: path.read_bytes() for path in straight.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=said):
        run(config_of(tmp_path, tmp_path / "text", "straight", steps, str(straight), **sections))
    assert {path: path.read_bytes() for path in straight.rglob("*") if path.is_file()} == before


def test_a_restart_of_a_finished_run_ends_well(
    tmp_path: Path, straight: Path, monkeypatch: pytest.MonkeyPatch
):
    """A process can die between the run's last write and its own end; the launcher then restarts the run."""
    kept = metrics(straight)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    said = run(config_of(tmp_path, tmp_path / "text", "straight", 6, "auto"))
    assert any(line.startswith("resuming from") for line in said)
    assert metrics(straight) == kept


def test_data_that_was_moved_is_the_same_data(tmp_path: Path, straight: Path):
    text = (tmp_path / "text").rename(tmp_path / "elsewhere")
    said = run(config_of(tmp_path, text, "straight", 8, str(straight)))
    assert any(line.startswith("resuming from") for line in said)


def grown(text: Path) -> str:
    (text / "more.txt").write_text("def value\n" * 20)
    return "the (training|held-out) file 'more.txt' is new"


def rewritten(text: Path) -> str:
    path = text / "file_3.txt"
    path.write_text(path.read_text().replace("return", "RETURN"))
    return "the (training|held-out) file 'file_3.txt' has other tokens"


def shortened(text: Path) -> str:
    path = text / "file_4.txt"
    path.write_bytes(path.read_bytes()[:-1])
    return r"the (training|held-out) file 'file_4.txt' had \d+ tokens and has \d+"


@pytest.mark.slow
@pytest.mark.parametrize("change", [grown, rewritten, shortened])
def test_other_data_is_refused_by_name_or_accepted_once(tmp_path: Path, straight: Path, change):
    said = change(tmp_path / "text")
    before = {path: path.read_bytes() for path in straight.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=rf"the data is not what .*step-00000006 was made with: .*{said}"):
        run(config_of(tmp_path, tmp_path / "text", "straight", 8, str(straight)))
    assert {path: path.read_bytes() for path in straight.rglob("*") if path.is_file()} == before
    accepted = {"data": {"changed": "accept"}}
    told = run(config_of(tmp_path, tmp_path / "text", "straight", 8, str(straight), **accepted))
    assert any(
        re.match(rf"data accepted that .*step-00000006 was not made with: .*{said}", line) for line in told
    )
    assert tomllib.loads((straight / "config.toml").read_text())["data"]["changed"] == "refuse"
    # From there on it is the run's data.
    told = run(config_of(tmp_path, tmp_path / "text", "straight", 10, str(straight)))
    assert not any("was not made with" in line for line in told)


def test_a_checkpoint_that_does_not_know_its_data_is_gone_on_from_with_a_word(
    tmp_path: Path, trained: Path, straight: Path
):
    path = steps_in(straight / "checkpoints")[0][1]
    manifest = read_manifest(path)
    extra = {key: value for key, value in manifest.values["extra"].items() if key != "data"}
    (path / MANIFEST).write_bytes(dump(replace(manifest, values={**manifest.values, "extra": extra})))
    said = run(config_of(tmp_path, trained / "text", "straight", 8, str(straight)))
    assert f"{path} has no digest of its data, so it is unknown if the data is the same" in said


def test_a_checkpoint_that_is_older_than_a_key_has_its_default(tmp_path: Path, trained: Path, straight: Path):
    path = steps_in(straight / "checkpoints")[0][1]
    manifest = read_manifest(path)
    config = {section: dict(table) for section, table in manifest.config.items()}
    del config["optim"]["lr_schedule"], config["train"]["accumulate"], config["runtime"]["precision"]
    older = replace(manifest, config=config, config_sha256=digest_of_config(config))
    (path / MANIFEST).write_bytes(dump(older))
    with pytest.raises(ConfigError, match=r"a different run: optim.lr_schedule was 'cosine' and is 'linear'"):
        run(
            config_of(
                tmp_path, trained / "text", "straight", 8, str(straight), optim={"lr_schedule": "linear"}
            )
        )
    said = run(config_of(tmp_path, trained / "text", "straight", 8, str(straight)))
    assert f"resuming from {path}" in said


def with_other_data_on_rank_1(rank: int, config: Config, other: Path) -> str:
    torch.set_num_threads(1)
    if rank == 1:
        config = replace(config, data=replace(config.data, path=str(other)))
    with pytest.raises(ConfigError) as info:
        run(config)
    return str(info.value)


def test_processes_that_read_other_data_are_refused(tmp_path: Path, processes: LocalProcesses):
    text = text_folder(tmp_path)
    (tmp_path / "copy").mkdir()
    other = text_folder(tmp_path / "copy")
    rewritten(other)
    told = processes.run(2, with_other_data_on_rank_1, config_of(tmp_path, text, "two", 2), other)
    assert told[0] == told[1]
    assert re.search(r"the data .* is 10 files with .* on rank 0 .* 10 files with .* on rank 1", told[0])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("extra", [{"loss": "low"}, {"skipped_in_a_row": -1}, {"data": {}}])
def test_a_checkpoint_of_something_else_is_refused(tmp_path, straight: Path, extra):
    path = steps_in(straight / "checkpoints")[0][1]
    manifest = read_manifest(path)
    values = {**manifest.values, "extra": {**manifest.values["extra"], **extra}}
    (path / MANIFEST).write_bytes(dump(replace(manifest, values=values)))
    with pytest.raises(DataError, match=r"is of no run of penstock train|does not say which data it is of"):
        run(config_of(tmp_path, tmp_path / "text", "straight", 8, str(straight)))


def test_there_must_be_a_run(tmp_path: Path):
    text = text_folder(tmp_path)
    with pytest.raises(ConfigError, match="neither the folder of a run"):
        run(config_of(tmp_path, text, "x", 4, str(tmp_path / "none")))
    with pytest.raises(ConfigError, match=r"train\.name, which is not set"):
        run(config_of(tmp_path, text, "", 4, "auto"))
