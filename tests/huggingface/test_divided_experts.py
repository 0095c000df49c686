"""Mixtures of transformers whose experts are divided over processes: plain PyTorch's numbers, and folders that load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import penstock
from penstock import MeshShape
from penstock.parallel.dtensor import full_tensor
from penstock.runtime.workers.pool import LocalProcesses
from tests.huggingface.test_mixtures import batch, model
from tests.support import hf_trainer
from tests.support.groups import run_cases
from tests.support.hf_models import plainly
from tests.support.hf_trainer import arguments, assert_close

pytestmark = pytest.mark.slow
# Experts in other modules, shared experts beside them, biases, dense blocks before them.
CASES = [(f, "1f1b") for f in ("mixtral", "qwen2_moe", "gpt_oss", "glm4_moe")] + [("deepseek_v3", "zb-h1")]


def divided(rank: int, family: str, schedule: str) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradients of a step of two replicas that divide the experts."""
    ids, mask = batch()
    with penstock.Pipeline(
        penstock.from_transformers(model(family)), penstock.causal_lm_loss, microbatches=1, schedule=schedule,
        mesh=MeshShape(dp=2, ep=2), timeout=120,
    ) as pipe:  # fmt: skip
        loss = pipe.step(ids, ids, attention_mask=mask).loss
        assert loss is not None
        grads = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
        return float(loss), {name: full_tensor(grad).clone() for name, grad in grads.items()}


def test_families_have_the_losses_and_gradients_of_plain_pytorch(processes: LocalProcesses):
    ids, mask = batch()
    for (family, _), by_rank in zip(CASES, run_cases(processes, 2, divided, CASES), strict=True):
        expected = plainly(model(family), {"input_ids": ids, "attention_mask": mask, "labels": ids}, 2)
        gradients = {name: grad for name, grad in expected.gradients.items() if grad is not None}
        for loss, found in by_rank:
            assert loss == pytest.approx(expected.loss, rel=1e-6), family
            assert found.keys() == gradients.keys()
            for name, gradient in found.items():
                largest = float(gradients[name].abs().max())
                torch.testing.assert_close(gradient, gradients[name], rtol=1e-4, atol=1e-5 * largest + 1e-8)


def make(folder: Path, pipeline: dict[str, Any] | None, **changes: Any) -> Any:
    data = hf_trainer.rows(48)
    return hf_trainer.trainer(model("mixtral"), arguments(folder, **changes), pipeline, train_dataset=data)


def test_a_trainer_with_divided_experts_logs_saves_and_resumes_as_plain_trainer(
    tmp_path: Path, processes: LocalProcesses
):
    plain = hf_trainer.run(0, make, tmp_path / "plain", None, hf_trainer.DOUBLE)
    saving = {"save_strategy": "steps", "save_steps": 2}
    given = (make, tmp_path / "ours", {"ranks": 2, "microbatches": 2, "report": False, "ep": 2}, saving)
    for told in processes.run(4, hf_trainer.run, *given, timeout=300):
        assert_close(told.logged, plain.logged)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours" / "saved").state_dict()
    # AdamW moves a weight by the sign of its gradient at first, so a last bit of a small gradient is as large as the rate.
    for name, weight in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "plain" / "saved").state_dict().items()
    ):
        torch.testing.assert_close(loaded[name], weight, rtol=1e-3, atol=1e-4)
    checkpoint = str(tmp_path / "ours" / "checkpoint-2")
    resumed = processes.run(4, hf_trainer.run, *given, checkpoint, timeout=300)
    again = hf_trainer.run(0, make, tmp_path / "again", None, hf_trainer.DOUBLE, checkpoint)
    assert_close(resumed[0].logged, again.logged)


def refusal(rank: int, folder: Path) -> str:
    try:
        make(folder, {"ranks": 1, "microbatches": 2, "report": False, "ep": 2}, optim="adafactor")
    except penstock.ConfigError as error:
        return str(error)
    return ""


def test_an_optimizer_of_whole_matrices_is_refused(tmp_path: Path, processes: LocalProcesses):
    for said in processes.run(2, refusal, tmp_path):
        assert said.startswith("optim='adafactor' cannot be used with ep = 2")
