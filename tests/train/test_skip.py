"""Steps that are NaN or infinite: no weight changes on any rank, and a resumed run skips the same steps."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.base.errors import NonFiniteError
from penstock.huggingface import weights
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.train import loop
from penstock.train.config.config import Config
from tests.support.lanes import exhaustive, slow
from tests.support.tiny_run import text_folder, tiny
from tests.support.trainer import Said, config_of, lines, same, stopped_at
from tests.support.unsplit import unsplit

BAD = (1, 2)


def train(config: Config, bad: Collection[int]) -> list[str]:
    """Train with a loss that is NaN in some batches, counted from 0."""
    build = loop.build_pipeline

    def built(config: Config, language: Any, *rest: Any) -> Pipeline:
        made: list[Pipeline] = []

        def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
            spoiled = torch.is_grad_enabled() and made[0].steps in bad
            loss: Tensor = language.loss_fn(logits, target)
            return loss * math.nan if spoiled else loss

        made.append(build(config, replace(language, loss_fn=loss_fn), *rest))
        return made[0]

    said = Said()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "build_pipeline", built)
        loop.train(config, lambda steps, leads: said)
    return said.lines


def in_a_process(rank: int, config: Config, bad: Collection[int]) -> list[str]:
    torch.set_num_threads(1)
    return train(config, bad)


# With replicas, all skip what one of them cannot do.
@pytest.mark.parametrize(
    "where",
    [
        "pp2",
        *slow("pp2 of two batches", "pp2 dp2 in processes"),
        *exhaustive("pp2 dp2 of two batches in processes"),
    ],
)
def test_skipped_steps_change_nothing(where: str, tmp_path: Path, processes: LocalProcesses):
    parallel = {"pp": 2, "dp": 2 if "dp2" in where else 1}
    batches = 2 if "two batches" in where else 1
    bad = (3, 4) if batches == 2 else BAD  # the last batch of one step, and the first of the next
    told = {"steps": 5, "skip_nonfinite": 2, "log_every": 1, "accumulate": batches}
    config = tiny(tmp_path, text_folder(tmp_path), parallel=parallel, train=told, runtime={"threads": 1})
    said = processes.run(4, in_a_process, config, bad)[0] if "processes" in where else train(config, bad)
    folder = tmp_path / "runs" / "tiny"
    losses, norms, last, bits = unsplit(config, BAD)
    seen = lines(folder, "train")
    assert [line["step"] for line in seen] == [1, 4, 5]
    assert [line["loss"] for line in seen] == pytest.approx(losses, rel=1e-5)
    assert [line["grad_norm"] for line in seen] == pytest.approx(norms, rel=1e-4)
    skipped = [(line["step"], line["stage"], line["in_a_row"]) for line in lines(folder, "skipped")]
    assert skipped == [(2, 1, 1), (3, 1, 2)]
    assert lines(folder, "final")[0]["held_out_bits"] == pytest.approx(bits, abs=1e-4)
    saved = weights.load(folder)
    for name, value in last.items():
        if parallel["dp"] == 1:
            assert torch.equal(saved[name], value), name
        torch.testing.assert_close(saved[name], value, rtol=1e-3, atol=1e-4)
    assert any(re.match(r"step 2: the loss of microbatch \d is NaN or infinite;", line) for line in said)


def test_one_more_than_is_allowed_stops_the_run(tmp_path: Path):
    config = tiny(tmp_path, text_folder(tmp_path), train={"steps": 5, "skip_nonfinite": 1})
    with pytest.raises(
        NonFiniteError, match=r"step 3: .* train.skip_nonfinite is 1, and this is step number 2 in a row"
    ):
        train(config, BAD)
    assert [line["step"] for line in lines(tmp_path / "runs" / "tiny", "train")] == [1]


@pytest.mark.slow
def test_what_is_skipped_is_skipped_the_same_after_a_resume(tmp_path: Path):
    text = text_folder(tmp_path)
    told = {"skip_nonfinite": 2}
    train(config_of(tmp_path, text, "once", 5, train=told), BAD)
    folder = tmp_path / "runs" / "again"
    train(config_of(tmp_path, text, "again", 5, train=told), BAD)
    stopped_at(tmp_path, folder, 2)
    with pytest.raises(NonFiniteError, match=r"step 4: .* this is step number 3 in a row"):
        train(config_of(tmp_path, text, "again", 5, str(folder), train=told), (*BAD, 3))
    train(
        config_of(tmp_path, text, "again", 5, str(folder / "checkpoints" / "step-00000002"), train=told), BAD
    )
    same(folder, tmp_path / "runs" / "once")
