from __future__ import annotations

import importlib.util
import math
import re
import socket
import urllib.request
from pathlib import Path
from types import ModuleType

import pytest
import torch

import penstock
from penstock.train.config.file import load
from tests.support.launchers import free_port
from tests.support.tiny_run import text_folder, tiny
from tests.support.trainer import config_of, numbers_by_name, run, stopped_at

EXAMPLES = Path(__file__).parents[2] / "examples"


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_loop_of_ones_own_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    module = loaded("own_loop")
    monkeypatch.setattr(module, "STEPS", 50)
    module.main()
    out = capsys.readouterr().out
    assert "step 50  loss 0." in out
    assert "accuracy on new points: " in out


@pytest.mark.slow
def test_a_loader_of_ones_own_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    module = loaded("own_loader")
    monkeypatch.setattr(module, "EPOCHS", 2)
    monkeypatch.setattr(module, "ROWS", 512)
    module.main()
    out = capsys.readouterr().out
    first, second = (float(number) for number in re.findall(r"loss ([\d.]+)", out))
    assert second < first < 3
    assert "right letters of answers: " in out


@pytest.mark.slow
def test_a_policy_gets_more_of_its_reward(capsys: pytest.CaptureFixture[str]):
    loaded("grpo").main()
    rewards = [float(number) for number in re.findall(r"reward ([\d.]+)", capsys.readouterr().out)]
    assert len(rewards) == 10
    assert sum(rewards[-3:]) > sum(rewards[:3])


@pytest.mark.slow
def test_preference_pairs_train_as_in_plain_pytorch(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("transformers")
    module = loaded("dpo")
    generator = torch.Generator().manual_seed(0)
    batches = [module.preferences(generator) for _ in range(module.BATCHES)]
    model, plain = module.small_model(), module.small_model()
    reference = module.small_model().eval()
    losses = module.train(model, batches)

    expected = []
    optimizer = torch.optim.AdamW(plain.parameters(), lr=module.LEARNING_RATE)
    for batch in batches * module.EPOCHS:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        labels = batch["labels"]
        answers = labels[:, 1:] != -100
        chosen = labels[:, 1:].clamp(min=0).unsqueeze(2)

        def answer(
            logits: torch.Tensor, chosen: torch.Tensor = chosen, answers: torch.Tensor = answers
        ) -> torch.Tensor:
            return (logits[:, :-1].log_softmax(2).gather(2, chosen).squeeze(2) * answers).sum(1)

        with torch.no_grad():
            before = answer(reference(**inputs).logits)
        ratio = answer(plain(**inputs).logits) - before
        margin = module.BETA * (ratio[0::2] - ratio[1::2])
        loss = (1 + (-margin).exp()).log().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())

    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)  # the reference prefers nothing to itself
    assert losses[-1] < 0.9 * losses[0]
    assert losses == pytest.approx(expected, rel=1e-5)
    # AdamW divides a gradient by its own size, so where one is near zero, the order of a sum, which depends on
    # the processor, decides what part of the learning rate an element moves by. A wrong gradient moves all of them.
    total = len(batches) * module.EPOCHS * module.LEARNING_RATE
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=1e-5, atol=1e-3 * total, msg=lambda text, name=name: name + text
        )

    module.main()
    printed = [float(number) for number in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert printed == pytest.approx(losses, abs=1e-4)


@pytest.fixture
def in_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run finds the examples' modules in the current folder, and no settings of theirs in the environment."""
    monkeypatch.chdir(EXAMPLES)
    of_mlflow = (f"MLFLOW_{name}" for name in ("TRACKING_URI", "ALLOW_FILE_STORE", "DISABLE_TELEMETRY"))
    for name in (*of_mlflow, "PROMETHEUS_PORT"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)


@pytest.mark.slow
@pytest.mark.usefixtures("in_examples")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_mlflow_keeps_every_number_in_the_runs_folder_and_a_resumed_run_continues(tmp_path: Path):
    tracking = pytest.importorskip("mlflow.tracking")
    told, text = {"callbacks": "to_mlflow:MLflow", "trace_every": 0}, text_folder(tmp_path)
    run(config_of(tmp_path, text, "again", 4, train=told))
    folder = tmp_path / "runs" / "again"
    stopped_at(tmp_path, folder, 2)
    run(config_of(tmp_path, text, "again", 6, str(folder), train=told))
    client = tracking.MlflowClient(tracking_uri=(folder / "mlruns").as_uri())
    (experiment,) = client.search_experiments(filter_string="name = 'penstock'")
    (kept,) = client.search_runs([experiment.experiment_id])
    assert (kept.info.run_name, kept.info.status) == ("again", "FINISHED")
    assert kept.data.params["train.steps"] == "4"
    assert set(kept.data.metrics) == {name for name, _ in numbers_by_name(folder)}
    history = client.get_metric_history(kept.info.run_id, "train/loss")
    assert {point.step: point.value for point in history} == {
        step: value for (name, step), value in numbers_by_name(folder).items() if name == "train/loss"
    }
    pictures = client.list_artifacts(kept.info.run_id, "timeline")
    assert [picture.path for picture in pictures] == [f"timeline/step-{n:06}.png" for n in (1, 3, 4, 6)]


def gauges(text: str) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


@pytest.mark.slow
@pytest.mark.usefixtures("in_examples")
def test_prometheus_finds_the_last_line_of_metrics_in_a_file(tmp_path: Path):
    pytest.importorskip("prometheus_client")
    run(tiny(tmp_path, text_folder(tmp_path), train={"callbacks": "to_prometheus:Prometheus"}))
    folder = tmp_path / "runs" / "tiny"
    found, last = gauges((folder / "metrics.prom").read_text()), numbers_by_name(folder)
    assert found['penstock_train_loss{run="tiny"}'] == pytest.approx(last["train/loss", 3])
    assert found['penstock_train_rss{rank="0",run="tiny"}'] == last["train/rss/rank_0", 3]
    bits = found['penstock_held_out_held_out_bits{run="tiny"}']
    assert bits == pytest.approx(last["held_out/held_out_bits", 3])
    assert (found['penstock_step{run="tiny"}'], found['penstock_running{run="tiny"}']) == (3, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("in_examples")
def test_prometheus_asks_an_endpoint_until_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("prometheus_client")
    port = int(free_port())
    monkeypatch.setenv("PROMETHEUS_PORT", str(port))
    board = loaded("to_prometheus").Prometheus()
    board.on_start(penstock.StartEvent(tmp_path, steps=9))
    board.on_step(penstock.StepEvent(step=4, loss=0.25, rss=(1, 2)))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        found = gauges(answer.read().decode())
    name = tmp_path.name
    assert found[f'penstock_train_loss{{run="{name}"}}'] == 0.25
    assert found[f'penstock_train_rss{{rank="1",run="{name}"}}'] == 2
    assert found[f'penstock_running{{run="{name}"}}'] == 1
    board.on_end(penstock.EndEvent(outcome="done", step=9))
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
    assert not (tmp_path / "metrics.prom").exists()


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_configs_are_sound(path: Path):
    assert load(path).train.name == path.stem
