"""`penstock eval` gives the loss of the unsplit model, at every layout and for every kind of model."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner

from penstock.base.errors import ConfigError
from penstock.cli.eval import command
from penstock.huggingface import weights
from penstock.train.config.config import Config
from penstock.train.evaluate import evaluate
from penstock.train.model.sampling import read_config, unsplit_model
from penstock.train.model.trainable import build_model
from tests.support import hf_folders
from tests.support.tiny_run import text_folder
from tests.support.trainer import config_of, metrics, run


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("llama")
    hf_folders.of_bytes(root).rename(root / "model")
    (root / "text.txt").write_text("the cat sat on a mat. éü saw 3 dogs run. " * 20)
    return root


def by_transformers(root: Path) -> tuple[float, int, int]:
    """Loss of the text with transformers alone, in windows of 64 tokens, their number, and the bytes of the text."""
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(root / "model").eval()
    content = (root / "text.txt").read_text()
    ids = Tokenizer.from_file(str(root / "model" / "tokenizer.json")).encode(content).ids
    tokens = torch.tensor([*ids, hf_folders.BYTES_END])
    # A window is 64 tokens with their labels: the first one is context, so 63 are predicted; the next begins with the last.
    windows = [tokens[at : at + 64] for at in range(0, len(tokens) - 1, 64)]
    nats = 0.0
    for window in windows:
        with torch.no_grad():
            loss = model(window[None], labels=window[None]).loss
        nats += loss.item() * (len(window) - 1)
    return nats, sum(len(window) - 1 for window in windows), len(content.encode())


def test_a_text_is_evaluated_in_windows(llama: Path):
    nats, tokens, size = by_transformers(llama)
    layout = ["data.sequence=64", "parallel.pp=3", "train.batch=6", "schedule.microbatches=3"]
    (result,) = evaluate(llama / "model", [str(llama / "text.txt")], layout) or [None]
    assert result is not None
    assert result.tokens == tokens
    assert result.loss == pytest.approx(nats / tokens, rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    assert result.bits_per_byte == pytest.approx(nats / math.log(2) / size, rel=1e-5)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of Penstock's own model, with checkpoints of steps 2 and 4."""
    root = tmp_path_factory.mktemp("own")
    run(config_of(root, text_folder(root), "own", 4, optim={"lr": 0.05}))
    return root


def test_a_run_and_its_checkpoints_are_evaluated(own: Path):
    folder, text = own / "runs" / "own", own / "text" / "file_0.txt"
    config = read_config(folder)
    model = unsplit_model(build_model(config), weights.load(folder))
    tokens = torch.tensor([*text.read_bytes(), 0])
    with torch.no_grad():
        # Windows of 12 tokens side by side, as the run's samples.
        windows = [tokens[at : at + 13] for at in range(0, len(tokens) - 1, 12)]
        nats = sum(F.cross_entropy(model(w[None, :-1])[0], w[1:], reduction="sum").item() for w in windows)
    (result,) = evaluate(folder, [str(text)], ["parallel.pp=4"]) or [None]
    assert result is not None
    assert result.tokens == len(tokens) - 1
    assert result.loss == pytest.approx(nats / (len(tokens) - 1), rel=1e-5)
    assert result.bits_per_byte == result.bits_per_token
    checkpoints = folder / "checkpoints"
    last, first = (evaluate(checkpoints / f"step-0000000{step}", [str(text)], []) for step in (4, 2))
    assert last is not None
    assert first is not None
    assert last[0].loss == pytest.approx(result.loss, rel=1e-6)
    assert first[0].loss != pytest.approx(result.loss, rel=1e-3)


@pytest.mark.slow
def test_the_command_prints_a_table_or_json_and_takes_the_held_out_data_by_default(own: Path):
    folder, text = own / "runs" / "own", own / "text"
    result = CliRunner().invoke(command, [str(folder), str(text), "--ranks", "1"])
    assert result.exit_code == 0, result.output
    columns = ["data", "tokens", "loss", "perplexity", "bits/token", "bits/byte"]
    assert result.output.splitlines()[0].split() == columns
    assert result.output.splitlines()[1].startswith(str(text))
    result = CliRunner().invoke(command, [str(folder), "--json"])
    (held_out,) = json.loads(result.output)["results"]
    last = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][-1]
    assert held_out["data"] == "held-out data of the run"
    # All of it, not a sample.
    assert held_out["bits_per_token"] == pytest.approx(last["held_out_bits"], rel=0.2)


def test_what_cannot_be_evaluated_is_refused(own: Path, llama: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="is neither the folder of a run"):
        evaluate(tmp_path, ["x"], [])
    with pytest.raises(ConfigError, match="is not a run, which would have held-out data; give files"):
        evaluate(llama / "model", [], [])
    assert not (llama / "runs").exists()


def with_held_out(config: Config, path: Path) -> Config:
    return replace(config, data=replace(config.data, held_out_path=str(path)))


def test_a_run_is_evaluated_on_its_held_out_file_and_resumes_with_it(tmp_path: Path):
    text, dev = text_folder(tmp_path), tmp_path / "dev.txt"
    # As many windows as the batch of an evaluation has samples, so that it sees each token once.
    dev.write_text(("the cat sat on a mat. " * 200)[: Config().train.batch * 64])
    data, evaluated = {"sequence": 64}, {"eval_batches": 1, "batch": Config().train.batch}
    run(with_held_out(config_of(tmp_path, text, "tiny", 2, data=data, train=evaluated), dev))
    folder = tmp_path / "runs" / "tiny"
    ((everything,), (again,)) = (evaluate(folder, paths, []) or [None] for paths in ([], [str(dev)]))
    assert everything is not None
    assert again is not None
    assert (everything.loss, everything.tokens) == (again.loss, again.tokens)
    measured = [line["held_out_bits"] for line in metrics(folder) if line["kind"] == "held_out"]
    assert measured[-1] == pytest.approx(everything.bits_per_token, rel=1e-5)

    longer = config_of(tmp_path, text, "tiny", 4, str(folder), data=data, train=evaluated)
    moved = dev.rename(tmp_path / "elsewhere.txt")
    with pytest.raises(ConfigError, match=r"data.held_out_path was '.*dev.txt' and is ''"):
        run(longer)
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "dev.txt"
    other.write_text("a dog saw three cats. " * 40)
    with pytest.raises(ConfigError, match=r"the data is not what .* the held-out file 'dev.txt' had"):
        run(with_held_out(longer, other))
    other.unlink()
    run(with_held_out(longer, moved.rename(other)))
    assert metrics(folder)[-1]["step"] == 4
