from __future__ import annotations

import math
import os
import stat
from pathlib import Path

import pytest
import torch

from penstock.base.errors import ConfigError, DataError, NonFiniteError
from penstock.huggingface import weights
from penstock.schedule.families import FAMILIES
from penstock.train.config.file import load
from penstock.train.data.run_data import bigram_baseline, open_data
from penstock.train.model import llama
from penstock.train.model.llama import next_token_loss
from penstock.train.model.trainable import build_model
from tests.support.lanes import exhaustive, slow
from tests.support.tiny_run import text_folder, tiny
from tests.support.trainer import lines, quietly
from tests.support.unsplit import unsplit

# One that keeps microbatches in order; one that splits the backward, and one of both directions.
SCHEDULES = ("1f1b", "zb-h1", "dualpipe")
OTHERS = [name for name in FAMILIES if name not in SCHEDULES]


@pytest.mark.parametrize("name", [SCHEDULES[0], *slow(*SCHEDULES[1:]), *exhaustive(*OTHERS)])
def test_training_in_threads_is_the_unsplit_loop(tmp_path: Path, name: str):
    config = tiny(tmp_path, text_folder(tmp_path), schedule={"name": name}, model={"layers": 8})
    outcome = quietly(config)
    losses, norms, last, bits = unsplit(config)
    folder = tmp_path / "runs" / "tiny"
    seen = {key: [line[key] for line in lines(folder, "train")] for key in ("loss", "grad_norm")}
    saved = weights.load(folder)
    assert saved.keys() == last.keys()
    assert outcome.held_out_bits == pytest.approx(bits, abs=1e-5)
    if FAMILIES[name].in_order:
        assert seen == {"loss": losses, "grad_norm": norms}
        assert all(torch.equal(saved[n], w) for n, w in last.items())
    else:  # only the order of summation differs
        assert seen["loss"] == pytest.approx(losses, abs=1e-5)
        assert seen["grad_norm"] == pytest.approx(norms, rel=1e-5)


@pytest.mark.slow
def test_training_by_an_own_schedule_is_the_unsplit_loop(tmp_path: Path):
    own = {"name": "tests.support.own_schedules:folded"}
    config = tiny(tmp_path, text_folder(tmp_path), schedule=own, model={"layers": 8})
    quietly(config)
    losses, norms, _, _ = unsplit(config)
    folder = tmp_path / "runs" / "tiny"
    seen = {key: [line[key] for line in lines(folder, "train")] for key in ("loss", "grad_norm")}
    assert seen == {"loss": losses, "grad_norm": norms}
    assert "virtual_stages = 2" in (folder / "config.toml").read_text()


@pytest.mark.slow
def test_a_run_leaves_a_complete_folder(tmp_path: Path):
    config = tiny(tmp_path, text_folder(tmp_path), train={"eval_every": 2, "log_every": 2, "report": True})
    torch.set_num_threads(3)
    outcome = quietly(config)
    assert torch.get_num_threads() == 3
    folder = tmp_path / "runs" / "tiny"
    files = {"config.toml", "metrics.jsonl", "model.safetensors", "report.html", "run.json", "sample.txt"}
    assert {path.name for path in folder.iterdir()} == {"checkpoints", "logs", "traces"} | files
    mask = os.umask(0)
    os.umask(mask)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()}
    assert modes == {0o666 & ~mask}
    kept = load(folder / "config.toml")
    assert (kept.parallel.pp, kept.parallel.virtual_stages, kept.sample.prompt) == (2, 1, "def ")
    assert [line["step"] for line in lines(folder, "train")] == [2, 3]
    assert [line["step"] for line in lines(folder, "held_out")] == [2, 3]
    assert sorted(path.name for path in (folder / "logs").iterdir()) == ["rank-0.log"]
    assert lines(folder, "train")[0].keys() == {
        "time", "step", "loss", "lr", "grad_norm", "tokens_per_second", "step_seconds", "samples", "tokens", "bubble",
        "rss", "rss_peak", "seconds",
    }  # fmt: skip
    assert all(0 <= line["bubble"] < 1 and line["tokens_per_second"] > 0 for line in lines(folder, "train"))
    (final,) = lines(folder, "final")
    del final["time"]
    others = ("folder", "steps", "unit", "sample", "report")
    assert final == {k: v for k, v in vars(outcome).items() if k not in others} | {"step": 3}
    assert (folder / "sample.txt").read_text() == outcome.sample + "\n"
    assert outcome.sample.startswith("def ")


def test_an_existing_run_folder_is_refused_before_anything_is_written(tmp_path: Path):
    config = tiny(tmp_path, text_folder(tmp_path))
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    with pytest.raises(ConfigError, match="already exists"):
        quietly(config)
    assert list((tmp_path / "runs" / "tiny").iterdir()) == []


@pytest.mark.parametrize(
    ("sections", "error", "said"),
    [
        ({"data": {"path": "/nowhere/at/all"}}, DataError, "there is no file or folder"),
        ({"data": {"sequence": 5000}}, DataError, "a sample takes 5001"),
        ({"model": {"vocabulary": 100}, "sample": {"prompt": "1"}}, DataError, "model.vocabulary is 100"),
        ({"model": {"vocabulary": 1000}, "sample": {"prompt": "def"}}, ConfigError, "must be token numbers"),
        ({"parallel": {"pp": 7}}, ConfigError, "7 stages"),
        ({"schedule": {"name": "2f2b"}}, ConfigError, "no schedule family '2f2b'"),
        ({"runtime": {"device": "toaster"}}, ConfigError, "device must be one of cpu, cuda, .*got 'toaster'"),
        ({"runtime": {"device": "meta"}}, ConfigError, "device must be one of cpu, cuda, .*got 'meta'"),
        ({"runtime": {"device": "cuda:99"}}, ConfigError, "runtime.device is cuda:99, but PyTorch finds"),
    ],
)
def test_bad_input_leaves_nothing_behind(tmp_path: Path, sections, error: type[Exception], said: str):
    config = tiny(tmp_path, text_folder(tmp_path), **sections)
    with pytest.raises(error, match=said):
        quietly(config)
    assert not (tmp_path / "runs").exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_training_on_a_gpu_is_close_to_the_unsplit_loop(tmp_path: Path):
    config = tiny(tmp_path, text_folder(tmp_path), runtime={"device": "cuda"})
    quietly(config)
    losses, _, _, _ = unsplit(config)
    seen = [line["loss"] for line in lines(tmp_path / "runs" / "tiny", "train")]
    assert seen == pytest.approx(losses, rel=1e-4)


def test_a_loss_that_is_no_number_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls = []

    def broken(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return next_token_loss(logits, target) * (math.nan if len(calls) > 4 else 1.0)

    monkeypatch.setattr(llama, "next_token_loss", broken)
    with pytest.raises(NonFiniteError, match="step 2: the loss of microbatch 0 is NaN or infinite"):
        quietly(tiny(tmp_path, text_folder(tmp_path)))
    assert [line["step"] for line in lines(tmp_path / "runs" / "tiny", "train")] == [1]


def test_held_out_samples_come_from_held_out_files_only(tmp_path: Path):
    data = text_folder(tmp_path)
    config = tiny(tmp_path, data)
    text = open_data(config, build_model(config))
    trained = {document.path for document in text.training.corpus.documents}
    kept = "\0".join(p.read_text() for p in sorted(data.iterdir()) if p not in trained) + "\0"
    assert len(trained) == 8
    for batch in text.held_out:
        assert all(bytes(row.tolist()).decode() in kept for row in batch.x)


def test_there_is_no_bigram_table_of_other_tokens_than_bytes(tmp_path: Path):
    config = tiny(tmp_path, text_folder(tmp_path), model={"vocabulary": 300}, sample={"prompt": "1"})
    assert bigram_baseline(open_data(config, build_model(config)), build_model(config)) is None
