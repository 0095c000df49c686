"""A full disk: training continues without the files that could not be written, or ends with one clear line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from penstock.base.errors import PenstockError, StoppedError
from penstock.checkpoint.find import steps_in
from penstock.trace.metrics_writer import MetricsWriter
from penstock.train.loop import train
from tests.support.full_disk import files_of_at_most
from tests.support.tiny_run import text_folder
from tests.support.trainer import Said, config_of, lines, run, stopped_at


@pytest.mark.slow
def test_training_goes_on_and_ends_with_one_line(tmp_path: Path):
    text = text_folder(tmp_path)
    config = config_of(tmp_path, text, "full", 4, train={"keep_last": 0})
    run(config)
    folder = tmp_path / "runs" / "full"
    stopped_at(tmp_path, folder, 2)
    shutil.rmtree(folder / "traces")
    (folder / "traces").touch()
    said = Said()
    again = config_of(tmp_path, text, "full", 4, str(folder), train={"keep_last": 0, "report": True})
    error = rf"^cannot write the weights {folder / 'model.safetensors'}: "
    with files_of_at_most(4_000), pytest.raises(PenstockError, match=error):
        train(again, lambda steps, leads: said)
    told = "\n".join(said.lines)
    step = folder / "checkpoints" / "step-00000004"
    assert f"no checkpoint was written in {step}: {step.parent}/.step-00000004.unfinished/" in told
    trace = folder / "traces" / "step-000004.npz"
    assert f"cannot write the trace {trace}: File exists. Training continues" in told
    assert [line["step"] for line in lines(folder, "train")] == [1, 2, 3, 4]
    assert [step for step, _ in steps_in(folder / "checkpoints")] == [2]
    assert not list(folder.glob("*.unfinished"))
    said_at_last = run(again)
    assert said_at_last[-1].startswith("no report: ")
    assert (folder / "model.safetensors").exists()
    assert [step for step, _ in steps_in(folder / "checkpoints")] == [4, 2]


def test_what_was_stopped_but_not_saved_says_so(tmp_path: Path):
    config = config_of(tmp_path, text_folder(tmp_path), "full", 4, train={"checkpoint_every": 0})
    asked = iter([False, True])
    said = "stopped after step 1, but no checkpoint was written in "
    with files_of_at_most(4_000), pytest.raises(PenstockError, match=said) as raised:
        train(config, lambda steps, leads: Said(), stopping=lambda: next(asked))
    assert not isinstance(raised.value, StoppedError)


def test_lines_of_metrics_that_are_not_taken_are_told_once(tmp_path: Path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    said: list[str] = []
    with MetricsWriter(tmp_path, say=said.append) as metrics:
        metrics.write("train", step=1, loss=0.5)
        metrics.write("train", step=2, loss=0.5)
    assert said == [f"{tmp_path / 'metrics.jsonl'} lacks lines: No space left on device. Training continues"]


def test_of_a_line_that_is_not_taken_nothing_stays(tmp_path: Path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.write("train", step=1, loss=0.5)
        size = (tmp_path / "metrics.jsonl").stat().st_size
        with files_of_at_most(size + 10):
            metrics.write("train", step=2, loss=0.5)
        metrics.write("train", step=3, loss=0.5)
    assert [line["step"] for line in lines(tmp_path, "train")] == [1, 3]
