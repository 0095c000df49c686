"""Mixtures of transformers whose experts are divided over processes: plain PyTorch's numbers, and folders that load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer

import penstock
from penstock import MeshShape
from penstock.parallel.dtensor import full_tensor
from penstock.runtime.workers.pool import LocalProcesses
from tests.huggingface.test_mixtures import batch, model, plain
from tests.huggingface.test_trainer import arguments, assert_close, rows
from tests.support.groups import run_cases

pytestmark = pytest.mark.slow
FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe", "olmoe")


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
    cases = [(family, schedule) for family in FAMILIES for schedule in ("1f1b", "zb-h1")]
    for (family, schedule), by_rank in zip(cases, run_cases(processes, 2, divided, cases), strict=True):
        losses, gradients = plain(model(family))
        for loss, found in by_rank:
            assert loss == pytest.approx(sum(losses) / 2, rel=1e-6), (family, schedule)
            assert found.keys() == {name for name, grad in gradients.items() if grad is not None}
            for name, gradient in found.items():
                largest = float(gradients[name].abs().max())
                torch.testing.assert_close(gradient, gradients[name], rtol=1e-4, atol=1e-5 * largest + 1e-8)


def trained(rank: int, folder: Path, family: str, resume: str | None) -> list[dict[str, Any]]:
    trainer = penstock.PipelineTrainer(
        model=model(family),
        args=arguments(folder, save_strategy="steps", save_steps=3),
        train_dataset=rows(48),
        pipeline={"ranks": 2, "microbatches": 2, "report": False, "ep": 2},
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / "saved"))
    return [line for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_trainer_with_divided_experts_logs_saves_and_resumes_as_plain_trainer(
    tmp_path: Path, processes: LocalProcesses, family: str
):
    args = arguments(tmp_path / "plain", per_device_train_batch_size=16)  # the rows of both replicas
    trainer = Trainer(model=model(family), args=args, train_dataset=rows(48))
    trainer.train()
    logged = [line for line in trainer.state.log_history if "loss" in line]
    for told in processes.run(4, trained, tmp_path / "ours", family, None, timeout=300):
        assert_close(told, logged)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours" / "saved").state_dict()
    # AdamW moves a weight by the sign of its gradient at first, so a last bit of a small gradient is as large as the rate.
    for name, weight in trainer.model.state_dict().items():
        torch.testing.assert_close(loaded[name], weight, rtol=1e-3, atol=1e-4)
    checkpoint = str(tmp_path / "ours" / "checkpoint-3")
    resumed = processes.run(4, trained, tmp_path / "again", family, checkpoint, timeout=300)
    plainly = Trainer(model=model(family), args=args, train_dataset=rows(48))
    plainly.train(resume_from_checkpoint=checkpoint)
    assert_close(resumed[0], [line for line in plainly.state.log_history if "loss" in line])


def refusal(rank: int, folder: Path) -> str:
    try:
        penstock.PipelineTrainer(
            model=model("mixtral"),
            args=arguments(folder, optim="adafactor"),
            train_dataset=rows(8),
            pipeline={"ranks": 1, "microbatches": 2, "report": False, "ep": 2},
        )
    except penstock.ConfigError as error:
        return str(error)
    return ""


def test_an_optimizer_of_whole_matrices_is_refused(tmp_path: Path, processes: LocalProcesses):
    for said in processes.run(2, refusal, tmp_path):
        assert said.startswith("optim='adafactor' cannot be used with ep = 2")
