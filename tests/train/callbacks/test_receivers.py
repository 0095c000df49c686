"""TensorBoard and Weights & Biases receive the numbers in ``metrics.jsonl``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import ConfigError
from penstock.show.run import read_run
from penstock.train.callbacks import receivers
from tests.support.tiny_run import text_folder, tiny
from tests.support.trainer import config_of, numbers_by_name, quietly, run, stopped_at
from tests.support.waiting import until


def accumulated(folder: Path) -> Any:
    from tensorboard.backend.event_processing import event_accumulator

    found = event_accumulator.EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return found


def test_tensorboard_has_every_number_and_the_timeline_of_every_traced_step(tmp_path: Path):
    config = tiny(tmp_path, text_folder(tmp_path), train={"loggers": "tensorboard"})
    quietly(config)
    folder = tmp_path / "runs" / "tiny"
    found = accumulated(folder)
    told = numbers_by_name(folder)
    tags = found.Tags()
    seen = {(tag, event.step): event.value for tag in tags["scalars"] for event in found.Scalars(tag)}
    assert seen == pytest.approx(told, rel=1e-6)
    assert ("train/loss", 3) in seen
    assert ("held_out/held_out_bits", 3) in seen
    assert tags["images"] == ["timeline"]
    pictures = found.Images("timeline")
    assert [picture.step for picture in pictures] == [1, 3]
    assert all(picture.encoded_image_string.startswith(b"\x89PNG") for picture in pictures)


@pytest.mark.slow
def test_what_a_run_does_anew_replaces_what_it_had_told_before(tmp_path: Path):
    told = {"loggers": "tensorboard", "trace_every": 1}
    text = text_folder(tmp_path)
    run(config_of(tmp_path, text, "again", 6, train=told))
    folder = tmp_path / "runs" / "again"
    stopped_at(tmp_path, folder, 2)
    shorter = {**told, "trace_every": 0}
    run(config_of(tmp_path, text, "again", 6, str(folder), train=shorter))
    found = accumulated(folder)
    assert [event.step for event in found.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    assert [picture.step for picture in found.Images("timeline")] == [1, 2, 3, 6]
    assert list(read_run(folder).traces) == [1, 2, 3, 6]


@pytest.mark.slow
def test_weights_and_biases_offline_keeps_the_run_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = tiny(tmp_path, text_folder(tmp_path), train={"loggers": "wandb"})
    quietly(config)
    (run,) = (tmp_path / "runs" / "tiny" / "wandb").glob("offline-run-*")
    (kept,) = run.glob("*.wandb")
    wanted = (b"train/loss", b"held_out/held_out_bits", b"final/seconds")
    # W&B's own process writes the file, and may go on when the run is finished.
    until(lambda: all(name in kept.read_bytes() for name in wanted))
    assert len(list((run / "files" / "media" / "images").glob("timeline*.png"))) == 2


def test_a_logger_that_is_not_installed_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(receivers, "find_spec", lambda name: None if name == "wandb" else find_spec(name))
    config = tiny(tmp_path, text_folder(tmp_path), train={"loggers": "wandb"})
    with pytest.raises(
        ConfigError, match=r"names wandb, but wandb is not installed: pip install 'penstock-torch\[wandb\]'"
    ):
        quietly(config)
    assert not (tmp_path / "runs").exists()
