"""TensorBoard, Weights & Biases, MLflow and Prometheus receive the numbers in ``metrics.jsonl``."""

from __future__ import annotations

import json
import socket
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.show.run import read_run
from penstock.train.callbacks import find_callbacks
from penstock.train.callbacks.callback import EndEvent, StartEvent, StepEvent
from penstock.train.callbacks.mlflow_callback import MLflow
from penstock.train.callbacks.prometheus_callback import Prometheus
from penstock.train.config.config import from_mapping
from penstock.train.loop import train
from penstock.train.report.progress import Reporter
from tests.support.launchers import free_port
from tests.support.tiny_run import text_folder, tiny
from tests.support.trainer import config_of, run, stopped_at


def numbers_by_name(folder: Path) -> dict[tuple[str, int], float]:
    """(name, step) → number, of every line of metrics."""
    numbers = {}
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        kind, step = line.pop("kind"), line.pop("step")
        for name, value in line.items():
            if isinstance(value, list):
                numbers |= {(f"{kind}/{name}/rank_{rank}", step): each for rank, each in enumerate(value)}
            elif name != "time" and value is not None:
                numbers[f"{kind}/{name}", step] = value
    return numbers


def test_tensorboard_has_every_number_and_the_timeline_of_every_traced_step(tmp_path: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = tiny(tmp_path, text_folder(tmp_path), train={"loggers": "tensorboard"})
    train(config, lambda steps, leads: Reporter())
    folder = tmp_path / "runs" / "tiny"
    found = accumulator.EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
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


def test_what_a_run_does_anew_replaces_what_it_had_told_before(tmp_path: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    told = {"loggers": "tensorboard", "trace_every": 1}
    text = text_folder(tmp_path)
    run(config_of(tmp_path, text, "again", 6, train=told))
    folder = tmp_path / "runs" / "again"
    stopped_at(tmp_path, folder, 2)
    shorter = {**told, "trace_every": 0}
    run(config_of(tmp_path, text, "again", 6, str(folder), train=shorter))
    found = accumulator.EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    assert [event.step for event in found.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    assert [picture.step for picture in found.Images("timeline")] == [1, 2, 3, 6]
    assert list(read_run(folder).traces) == [1, 2, 3, 6]


def test_weights_and_biases_offline_keeps_the_run_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = tiny(tmp_path, text_folder(tmp_path), train={"loggers": "wandb"})
    train(config, lambda steps, leads: Reporter())
    (run,) = (tmp_path / "runs" / "tiny" / "wandb").glob("offline-run-*")
    (kept,) = run.glob("*.wandb")
    wanted = (b"train/loss", b"held_out/held_out_bits", b"final/seconds")
    limit = (
        time.monotonic() + 60.0
    )  # W&B's own process writes the file, and may go on when the run is finished
    while not all(name in kept.read_bytes() for name in wanted) and time.monotonic() < limit:
        time.sleep(0.05)
    content = kept.read_bytes()
    assert [name for name in wanted if name not in content] == []
    assert len(list((run / "files" / "media" / "images").glob("timeline*.png"))) == 2


@pytest.fixture
def no_tracking_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE", "MLFLOW_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)


@pytest.mark.slow
@pytest.mark.usefixtures("no_tracking_store")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_mlflow_keeps_every_number_in_the_runs_folder_and_a_resumed_run_continues(tmp_path: Path):
    tracking = pytest.importorskip("mlflow.tracking")
    told, text = {"loggers": "mlflow", "trace_every": 0}, text_folder(tmp_path)
    run(config_of(tmp_path, text, "again", 4, train=told))
    folder = tmp_path / "runs" / "again"
    stopped_at(tmp_path, folder, 2)
    run(config_of(tmp_path, text, "again", 6, str(folder), train=told))
    client = tracking.MlflowClient(tracking_uri=(folder / "mlruns").as_uri())
    (experiment,) = client.search_experiments(filter_string="name = 'penstock'")
    (kept,) = client.search_runs([experiment.experiment_id])
    assert kept.info.run_name == "again"
    assert kept.info.status == "FINISHED"
    assert kept.data.params["train.steps"] == "4"
    newest = {name: (step, value) for (name, step), value in sorted(numbers_by_name(folder).items(), key=str)}
    assert set(kept.data.metrics) == set(newest)
    history = client.get_metric_history(kept.info.run_id, "train/loss")
    assert {point.step: point.value for point in history} == {
        step: value for (name, step), value in numbers_by_name(folder).items() if name == "train/loss"
    }
    pictures = client.list_artifacts(kept.info.run_id, "timeline")
    assert [picture.path for picture in pictures] == [f"timeline/step-{n:06}.png" for n in (1, 3, 4, 6)]


@pytest.mark.slow
@pytest.mark.usefixtures("no_tracking_store")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_mlflow_in_an_own_loop_says_how_it_ended(tmp_path: Path):
    tracking = pytest.importorskip("mlflow.tracking")
    board = MLflow()
    board.on_start(StartEvent(tmp_path))
    board.on_step(StepEvent(3, loss=0.5))
    board.on_end(EndEvent("failed", 3, "no more"))
    client = tracking.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("penstock")
    (kept,) = client.search_runs([experiment.experiment_id])
    assert (kept.info.status, kept.data.metrics) == ("FAILED", {"train/loss": 0.5})


def gauges(text: str) -> dict[str, float]:
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if not line.startswith("#")
    }


def test_prometheus_writes_the_last_line_of_metrics_to_a_file(tmp_path: Path):
    pytest.importorskip("prometheus_client")
    train(
        tiny(tmp_path, text_folder(tmp_path), train={"loggers": "prometheus"}),
        lambda steps, leads: Reporter(),
    )
    folder = tmp_path / "runs" / "tiny"
    found = gauges((folder / "metrics.prom").read_text())
    last = numbers_by_name(folder)
    assert found['penstock_train_loss{run="tiny"}'] == pytest.approx(last["train/loss", 3])
    assert found['penstock_train_rss{rank="0",run="tiny"}'] == last["train/rss/rank_0", 3]
    assert found['penstock_held_out_held_out_bits{run="tiny"}'] == pytest.approx(
        last["held_out/held_out_bits", 3]
    )
    assert (found['penstock_step{run="tiny"}'], found['penstock_running{run="tiny"}']) == (3, 0)


def test_prometheus_serves_on_the_loopback_interface_until_the_end(tmp_path: Path):
    pytest.importorskip("prometheus_client")
    port = int(free_port())
    board = Prometheus(port)
    board.on_start(StartEvent(tmp_path, steps=9))
    board.on_step(StepEvent(4, loss=0.25))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        found = gauges(answer.read().decode())
    assert found[f'penstock_train_loss{{run="{tmp_path.name}"}}'] == 0.25
    assert found[f'penstock_running{{run="{tmp_path.name}"}}'] == 1
    other = Prometheus(port)
    with pytest.raises(
        ConfigError, match=rf"cannot serve metrics on port {port} .*Address already in use; give a free"
    ):
        other.on_start(StartEvent(tmp_path))
    board.on_end(EndEvent("done", 9))
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
    assert not (tmp_path / "metrics.prom").exists()


def test_a_logger_that_is_not_installed_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        find_callbacks, "find_spec", lambda name: None if name == "wandb" else find_spec(name)
    )
    config = tiny(tmp_path, text_folder(tmp_path), train={"loggers": "wandb"})
    with pytest.raises(
        ConfigError, match=r"names wandb, but wandb is not installed: pip install 'penstock\[wandb\]'"
    ):
        train(config, lambda steps, leads: Reporter())
    assert not (tmp_path / "runs").exists()


def test_a_logger_that_is_not_known_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"train\.loggers must be names out of tensorboard, wandb, mlflow, prometheus, with commas",
    ):
        from_mapping({"train": {"loggers": "tensorboard, aim"}})
