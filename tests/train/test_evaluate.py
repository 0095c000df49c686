"""`penstock eval` gives the loss of the unsplit model, at every layout and for every kind of model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.base.errors import ConfigError
from penstock.cli.eval import command
from penstock.huggingface import weights
from penstock.runtime.workers.pool import LocalProcesses
from penstock.train.evaluate import evaluate
from penstock.train.model.sampling import read_config, unsplit_model
from penstock.train.model.trainable import build_model
from tests.support import records
from tests.support.tiny_run import text_folder
from tests.support.trainer import config_of, run


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("chatty")
    records.folder(root, template=records.MARKED)
    records.write_lines(root / "chats.jsonl", records.chats(20))
    return root


def by_transformers(root: Path) -> tuple[float, int, int]:
    """Loss of the assistant's tokens with transformers alone, their number, and the bytes of their text."""
    model = AutoModelForCausalLM.from_pretrained(root / "llama-chat").eval()
    tokenizer = AutoTokenizer.from_pretrained(root / "llama-chat")
    nats = tokens = size = 0.0
    for line in (root / "chats.jsonl").read_text().splitlines():
        chat = tokenizer.apply_chat_template(
            json.loads(line)["messages"],
            return_dict=True,
            return_assistant_tokens_mask=True,
            return_tensors="pt",
        )
        ids, mask = chat["input_ids"], chat["assistant_masks"].bool()
        labels = torch.where(mask, ids, -100)
        with torch.no_grad():
            nats += model(ids, labels=labels).loss.item() * int(mask.sum())
        tokens += int(mask.sum())
        size += len(tokenizer.decode(ids[mask]).encode())
    return nats, int(tokens), int(size)


@pytest.mark.parametrize("packing", [False, True])
def test_a_chat_file_is_evaluated_on_its_masked_tokens(chatty: Path, packing: bool):
    nats, tokens, size = by_transformers(chatty)
    (result,) = evaluate(
        chatty / "llama-chat",
        [str(chatty / "chats.jsonl")],
        ["data.sequence=256", f"data.packing={str(packing).lower()}", "parallel.pp=3", "train.batch=6",
         "schedule.microbatches=3"],
    ) or [None]  # fmt: skip
    assert result is not None
    assert result.tokens == tokens
    assert result.loss == pytest.approx(nats / tokens, rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    assert result.bits_per_byte == pytest.approx(nats / math.log(2) / size, rel=1e-5)


def test_cut_records_are_counted_once(chatty: Path):
    (result,) = evaluate(chatty / "llama-chat", [str(chatty / "chats.jsonl")], ["data.sequence=60"]) or [None]
    assert result is not None
    (note,) = (note for note in result.notes if "more than" in note)
    assert 0 < int(note.split()[0]) <= 20
    assert note.split()[1:3] == ["of", "20"]
    assert not any("padding" in note for note in result.notes)
    assert result.bits_per_byte is None


def in_a_process(rank: int, folder: Path, data: Path) -> float | None:
    torch.set_num_threads(1)
    results = evaluate(folder, [str(data)], ["parallel.dp=2", "parallel.pp=1", "data.sequence=256"])
    return None if results is None else results[0].loss


def test_processes_give_the_same_loss_on_the_leader(chatty: Path, processes: LocalProcesses):
    nats, tokens, _ = by_transformers(chatty)
    leader, other = processes.run(2, in_a_process, chatty / "llama-chat", chatty / "chats.jsonl")
    assert leader == pytest.approx(nats / tokens, rel=1e-5)
    assert other is None


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
    last, first = (
        evaluate(folder / "checkpoints" / f"step-0000000{step}", [str(text)], []) for step in (4, 2)
    )
    assert last is not None
    assert first is not None
    assert last[0].loss == pytest.approx(result.loss, rel=1e-6)
    assert first[0].loss != pytest.approx(result.loss, rel=1e-3)


def test_the_command_prints_a_table_or_json_and_takes_the_held_out_data_by_default(own: Path):
    folder, text = own / "runs" / "own", own / "text"
    result = CliRunner().invoke(command, [str(folder), str(text), "--ranks", "1"])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[0].split() == [
        "data", "tokens", "loss", "perplexity", "bits/token", "bits/byte",
    ]  # fmt: skip
    assert result.output.splitlines()[1].startswith(str(text))
    result = CliRunner().invoke(command, [str(folder), "--json"])
    (held_out,) = json.loads(result.output)["results"]
    last = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][-1]
    assert held_out["data"] == "held-out data of the run"
    assert held_out["bits_per_token"] == pytest.approx(
        last["held_out_bits"], rel=0.2
    )  # all of it, not a sample


def test_what_cannot_be_evaluated_is_refused(own: Path, chatty: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="is neither the folder of a run"):
        evaluate(tmp_path, ["x"], [])
    with pytest.raises(ConfigError, match="is not a run, which would have held-out data; give files"):
        evaluate(chatty / "llama-chat", [], [])
    assert not (chatty / "runs").exists()
