"""`penstock train` of the built-in mixture with its experts divided over processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.runtime.workers.pool import LocalProcesses
from penstock.show.run import read_run, write_report
from penstock.train.config.config import Config
from penstock.train.loop import Outcome, train
from penstock.train.run_log import Reporter
from tests.support.tiny_run import text_folder
from tests.support.trainer import config_of, lines, run

MODEL = {"experts": 4, "shared_hidden": 8, "auxiliary_loss": 0.01}
STEPS, TOKENS, CHOSEN = 3, 8 * 12, 2


def in_a_process(rank: int, config: Config) -> Outcome | None:
    torch.set_num_threads(1)
    return train(config, lambda steps, leads: Reporter())


@pytest.mark.slow
def test_losses_are_those_of_one_process_and_the_run_shows_the_load_of_its_experts(
    tmp_path: Path, processes: LocalProcesses
):
    text = text_folder(tmp_path)
    run(config_of(tmp_path, text, "one", STEPS, model=MODEL))
    parallel = {"pp": 2, "dp": 2, "ep": 2, "zero": True}
    processes.run(
        4, in_a_process, config_of(tmp_path, text, "divided", STEPS, model=MODEL, parallel=parallel)
    )
    one, divided = (lines(tmp_path / "runs" / name, "train") for name in ("one", "divided"))
    assert len(divided) == STEPS
    for expected, line in zip(one, divided, strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        assert "expert_tokens" not in expected
        # Two blocks of each of two stages, whose experts two processes divide.
        assert sum(line["expert_tokens"]) == 4 * TOKENS * CHOSEN
        stages = [sum(line["expert_tokens"][:2]), sum(line["expert_tokens"][2:])]
        assert stages == [2 * TOKENS * CHOSEN] * 2
        assert 1 <= line["expert_imbalance"] <= 2
        assert all(0 < seconds < line["step_seconds"] * STEPS for seconds in line["exchange_seconds"])

    folder = tmp_path / "runs" / "divided"
    view = read_run(folder)
    for trace in view.traces.values():
        experts = trace.info["experts"]
        assert list(experts) == [f"blocks.{n}.feed_forward.experts" for n in range(4)]
        assert all(sum(tokens) == TOKENS * CHOSEN for tokens in experts.values())
    page = write_report(view, tmp_path / "page.html").read_text()
    assert "<h2>Experts</h2>" in page
    assert page.count("blocks.0.feed_forward.experts</td>") == len(view.traces)
