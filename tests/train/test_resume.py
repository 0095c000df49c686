"""A resumed run has the weights, losses and metrics of a run that was never stopped."""

from __future__ import annotations

import os
import re
import shutil
import tomllib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.base.errors import ConfigError, DataError
from penstock.base.run_lock import LOCK
from penstock.checkpoint.find import damage, read_manifest, steps_in
from penstock.checkpoint.manifest import MANIFEST, digest_of_config, dump
from penstock.huggingface import weights
from penstock.train.config.config import Config, from_mapping
from penstock.train.loop import train
from penstock.train.resume import config_changes
from penstock.train.run_log import Reporter
from tests.support.lanes import exhaustive
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
@pytest.mark.parametrize("ranks", [4, *exhaustive(1, 2)])
def test_a_run_that_goes_on_is_the_run_that_was_never_stopped(tmp_path: Path, straight: Path, ranks: int):
    text = tmp_path / "text"
    folder = tmp_path / "runs" / "again"
    run(config_of(tmp_path, text, "again", 6))
    stopped_at(tmp_path, folder, 4)
    said = run(config_of(tmp_path, text, "again", 6, str(folder), parallel={"pp": ranks}))
    assert f"resuming from {folder / 'checkpoints' / 'step-00000004'}" in said
    same(folder, straight)
    kept = tomllib.loads((folder / "config.toml").read_text())
    assert kept["parallel"]["pp"] == ranks
    assert kept["train"]["resume"] == ""


def test_auto_starts_a_run_whose_last_step_is_saved_and_goes_on_with_it(tmp_path: Path):
    text, folder = text_folder(tmp_path), tmp_path / "runs" / "auto"
    said = run(config_of(tmp_path, text, "auto", 5, "auto"))
    assert "no checkpoint to resume from: the run starts at its first step" in said
    assert [step for step, _ in steps_in(folder / "checkpoints")] == [5, 4, 2]
    said = run(config_of(tmp_path, text, "auto", 6, "auto"))
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


def test_a_restart_of_a_finished_run_writes_what_is_missing(
    tmp_path: Path, straight: Path, monkeypatch: pytest.MonkeyPatch
):
    """A process can die between the run's last write and its own end; the launcher then restarts the run."""
    before, weights_before = files_of(straight), weights.load(straight)
    for name in ("model.safetensors", "sample.txt"):
        (straight / name).unlink()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    said = run(config_of(tmp_path, tmp_path / "text", "straight", 6, "auto"))
    assert any(line.startswith("resuming from") for line in said)
    assert any("all 6 steps are done" in line for line in said)
    after, now = files_of(straight), weights.load(straight)
    kept = [
        path for path in before if path.name in ("metrics.jsonl", "sample.txt") or "checkpoints" in path.parts
    ]
    assert len(kept) > 2
    assert all(after[path] == before[path] for path in kept)
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
    whole = shutil.copytree(straight, tmp_path / "runs" / "whole")
    chosen = straight / "checkpoints" / "step-00000002"
    said = run(config_of(tmp_path, tmp_path / "text", "straight", 6, str(chosen)))
    assert f"resuming from {chosen}" in said
    same(straight, whole)


@pytest.mark.parametrize(
    ("steps", "sections", "said"),
    [
        (5, {}, "train.steps must be at least 6, the step of .*, got 5; give more steps"),
        (8, {"optim": {"lr": 0.5}}, "belongs to a different run: optim.lr was 0.004 and is 0.5"),
        (8, {"train": {"seed": 4}}, "belongs to a different run: train.seed was 0 and is 4"),
        (8, {"model": {"width": 32}}, "does not fit|a different run"),
        (
            8,
            {"train": {"accumulate": 2, "reduction": "sum"}},
            "accumulate was 1 and is 2.*'mean' and is 'sum'",
        ),
        (8, {"runtime": {"precision": "bf16"}}, "runtime.precision was 'fp32' and is 'bf16'"),
        (8, {"optim": {"name": "SGD", "lr": 0.004}}, "optim.name was 'AdamW' and is 'SGD'"),
    ],
)
def test_what_cannot_go_on_is_refused_and_the_run_stays_as_it_is(
    tmp_path: Path, straight: Path, steps: int, sections: dict, said: str
):
    before = files_of(straight)
    with pytest.raises(ConfigError, match=said):
        run(config_of(tmp_path, tmp_path / "text", "straight", steps, str(straight), **sections))
    assert files_of(straight) == before


def test_data_that_was_moved_is_the_same_data(tmp_path: Path, straight: Path):
    text = (tmp_path / "text").rename(tmp_path / "elsewhere")
    said = run(config_of(tmp_path, text, "straight", 8, str(straight)))
    assert any(line.startswith("resuming from") for line in said)


def test_other_data_is_refused_by_name_or_accepted_once(tmp_path: Path, straight: Path):
    path = tmp_path / "text" / "file_3.txt"
    path.write_text(path.read_text().replace("return", "RETURN"))
    said, before = "the (training|held-out) file 'file_3.txt' has other tokens", files_of(straight)
    with pytest.raises(ConfigError, match=rf"the data is not what .*step-00000006 was made with: .*{said}"):
        run(config_of(tmp_path, tmp_path / "text", "straight", 8, str(straight)))
    assert files_of(straight) == before
    accepted = {"data": {"changed": "accept"}}
    told = run(config_of(tmp_path, tmp_path / "text", "straight", 8, str(straight), **accepted))
    line = rf"data accepted that .*step-00000006 was not made with: .*{said}"
    assert any(re.match(line, text) for text in told)
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
    optim = {"lr_schedule": "linear"}
    with pytest.raises(ConfigError, match=r"a different run: optim.lr_schedule was 'cosine' and is 'linear'"):
        run(config_of(tmp_path, trained / "text", "straight", 8, str(straight), optim=optim))
    said = run(config_of(tmp_path, trained / "text", "straight", 8, str(straight)))
    assert f"resuming from {path}" in said


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


def with_data(**data: Any) -> Config:
    return from_mapping({"data": data})


def changes(before: Config, now: Config, knows_data: bool = True) -> list[str]:
    return config_changes(asdict(before), now, knows_data=knows_data)


def test_keys_are_compared_one_by_one():
    before, now = (
        with_data(path="a.txt", sequence=64),
        with_data(path="b.txt", sequence=32, text_field="body"),
    )
    said = ["data.text_field was 'text' and is 'body'", "data.sequence was 64 and is 32"]
    assert changes(before, now) == said
    assert changes(before, now, knows_data=False) == ["data.path was 'a.txt' and is 'b.txt'", *said]


def test_held_out_files_may_move_and_not_appear():
    one, two, none = (with_data(held_out_path=path) for path in ("a.txt", "b.txt", ""))
    assert changes(one, two) == []
    assert changes(one, none) == ["data.held_out_path was 'a.txt' and is ''"]
    assert changes(none, two) == ["data.held_out_path was '' and is 'b.txt'"]


def test_keys_that_are_newer_than_the_checkpoint_have_their_defaults():
    before = asdict(with_data())
    del before["data"]["held_out_path"], before["data"]["text_field"]
    assert config_changes(before, with_data(), knows_data=True) == []
    assert config_changes({"data": 5}, with_data(), knows_data=True) != []
