"""``penstock train`` of a Hugging Face model against a plain loop with transformers, loss by loss."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from penstock.runtime.workers.pool import LocalProcesses
from penstock.train.config.config import Config
from penstock.train.data.run_data import open_data, training_batch
from penstock.train.loop import train
from penstock.train.model.trainable import build_model
from penstock.train.run_log import Reporter
from tests.support import hf_folders
from tests.support.hf_curve import assert_same_curve
from tests.support.lanes import exhaustive
from tests.support.tiny_run import WORDS, text_folder, tiny
from tests.support.trainer import lines

pytestmark = pytest.mark.slow

STEPS = 50
MODELS = {"gpt2": True, "llama": False}
"""Family, and whether embedding and head are one."""


def config_of(root: Path, family: str, ranks: int) -> Config:
    model = hf_folders.folder(root, family, tied=MODELS[family])
    return tiny(
        root, text_folder(root), model={"path": str(model)}, optim={"lr": 4e-3}, parallel={"pp": ranks},
        train={"steps": STEPS}, runtime={"threads": 1},
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [2, *exhaustive(4)])
@pytest.mark.parametrize("family", MODELS)
def test_threads_give_the_curve_of_plain_transformers(family: str, ranks: int, tmp_path: Path):
    config = config_of(tmp_path, family, ranks)
    outcome = train(config, lambda steps, leads: Reporter())
    assert_same_curve(config)
    assert outcome is not None
    run = Path(outcome.folder)
    again = AutoModelForCausalLM.from_pretrained(run)
    tokens = training_batch(open_data(config, build_model(config)), config, build_model(config), 0).x
    assert again(tokens, labels=tokens).loss.item() < 0.7 * lines(run, "train")[0]["loss"]
    assert (run / "tokenizer.json").is_file()
    assert set(outcome.sample.split()) <= set(WORDS) | {"<unknown>"}


def in_processes(rank: int, config: Config) -> None:
    train(config, lambda steps, leads: Reporter())


@pytest.mark.parametrize(("family", "ranks"), exhaustive(("gpt2", 4), ("llama", 2)))
def test_processes_give_the_curve_of_plain_transformers(
    family: str, ranks: int, tmp_path: Path, processes: LocalProcesses
):
    config = config_of(tmp_path, family, ranks)
    processes.run(ranks, in_processes, config)
    assert_same_curve(config)
