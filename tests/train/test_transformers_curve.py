"""``penstock train`` of a Hugging Face model against a plain loop with transformers, loss by loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.runtime.workers.pool import LocalProcesses
from penstock.train.config.config import Config
from penstock.train.data.training_text import batch_of, open_text
from penstock.train.loop import train
from penstock.train.model.trainable import language_of
from penstock.train.report.progress import Silent
from tests.support import hf_folders
from tests.support.tiny_run import WORDS, text_folder, tiny
from tests.support.unsplit import adamw

STEPS = 50
MODELS = {"gpt2": True, "llama": False}
"""Family, and whether embedding and head are one."""


def config_of(root: Path, family: str, ranks: int) -> Config:
    model = hf_folders.folder(root, family, tied=MODELS[family])
    return tiny(
        root,
        text_folder(root),
        model={"path": str(model)},
        optim={"lr": 4e-3},
        parallel={"pp": ranks},
        train={"steps": STEPS},
        runtime={"threads": 1},
    )


def plain_losses(config: Config) -> list[float]:
    """The same training as one would write it with transformers: whole batches, labels, the model's own loss."""
    language = language_of(config)
    text = open_text(config, language)
    model = AutoModelForCausalLM.from_pretrained(config.model.path).train()
    optimizer, scheduler = adamw(model.named_parameters(), config.optim, config.train.steps)
    losses = []
    for step in range(config.train.steps):
        tokens, _ = batch_of(text, config, language, step)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses


def assert_same_curve(config: Config, falls_to: float = 0.7) -> None:
    expected = plain_losses(config)
    seen = [line["loss"] for line in hf_folders.lines(Path(config.train.folder) / config.train.name, "train")]
    assert len(seen) == config.train.steps
    assert expected[-1] < falls_to * expected[0]
    worst = max(abs(a - b) for a, b in zip(seen, expected, strict=True))
    print(
        f"loss {expected[0]:.4f} to {expected[-1]:.4f} in {len(seen)} steps; largest difference {worst:.1e}"
    )
    assert worst < 1e-5


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", MODELS)
def test_threads_give_the_curve_of_plain_transformers(family: str, ranks: int, tmp_path: Path):
    config = config_of(tmp_path, family, ranks)
    outcome = train(config, lambda steps, leads: Silent())
    assert_same_curve(config)
    assert outcome is not None
    run = Path(outcome.folder)
    again = AutoModelForCausalLM.from_pretrained(run)
    tokens, _ = batch_of(open_text(config, language_of(config)), config, language_of(config), 0)
    assert again(tokens, labels=tokens).loss.item() < 0.7 * hf_folders.lines(run, "train")[0]["loss"]
    assert (run / "tokenizer.json").is_file()
    assert set(outcome.sample.split()) <= set(WORDS) | {"<unknown>"}


def in_processes(rank: int, config: Config) -> None:
    train(config, lambda steps, leads: Silent())


@pytest.mark.parametrize(("family", "ranks"), [("gpt2", 4), ("llama", 2)])
def test_processes_give_the_curve_of_plain_transformers(
    family: str, ranks: int, tmp_path: Path, processes: LocalProcesses
):
    config = config_of(tmp_path, family, ranks)
    processes.run(ranks, in_processes, config)
    assert_same_curve(config)
