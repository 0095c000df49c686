"""Plain Trainer and one with a pipeline on the same small model and rows, and how their runs are compared."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

import penstock
from tests.support import hf_models

VOCABULARY, TOKENS = 64, 12
PIPELINE = {"ranks": 2, "microbatches": 4, "schedule": "zb-v", "report": False}


def rows(count: int) -> list[dict[str, Tensor]]:
    """Rows of padded lengths, with labels on a part of each, so that microbatches have other numbers of targets."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(2, VOCABULARY, (count, TOKENS), generator=generator)
    labels = torch.where(torch.arange(TOKENS) < torch.arange(count)[:, None] % 7, -100, ids)
    return [{"input_ids": ids[n], "labels": labels[n]} for n in range(count)]


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    """Three steps are an epoch of the default rows; its last batch has 4 rows."""
    given: dict[str, Any] = {
        "max_steps": 3, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "learning_rate": 1e-3,
        "logging_steps": 1, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "seed": 5, "use_cpu": True,
        **changes,
    }  # fmt: skip
    return TrainingArguments(str(folder), **given)


def model(family: str = "llama", **changes: Any) -> Any:
    return hf_models.model(family, **{"vocab_size": VOCABULARY, **changes})


def adapted() -> Any:
    import peft

    net = model()
    torch.manual_seed(1)
    return peft.get_peft_model(net, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))


def trainer(
    net: Any, args: TrainingArguments, pipeline: dict[str, Any] | None, kind: Any = None, **given: Any
) -> Any:
    """Make a trainer: plain Trainer for no pipeline, unless another class is given."""
    given = {"train_dataset": rows(20), "eval_dataset": rows(10), **given}
    if pipeline is not None:
        kind, given["pipeline"] = kind or penstock.PipelineTrainer, pipeline
    return (kind or Trainer)(model=net, args=args, **given)


def logged(trainer: Any, resume: Any = None) -> list[dict[str, Any]]:
    """Train, and return the lines with losses."""
    trainer.train(resume_from_checkpoint=resume)
    return [line for line in trainer.state.log_history if "loss" in line]


def assert_close(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        assert one["learning_rate"] == other["learning_rate"]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    """Compare all weights but the biases of keys: their gradient is 0, and what rounding leaves of it Adam makes a step."""
    ours, theirs = (
        {name: value for name, value in net.state_dict().items() if "c_attn.bias" not in name}
        for net in (one, other)
    )
    assert hf_models.distance(ours, theirs) < 2e-6


def assert_trained_alike(ours: Any, theirs: Any) -> tuple[dict[str, float], dict[str, float]]:
    """Train both, compare losses, gradient norms, weights and the loss of an evaluation; return both evaluations."""
    expected = logged(theirs)
    assert_close(logged(ours), expected)
    assert_same_weights(ours.model, theirs.model)
    one, other = ours.evaluate(), theirs.evaluate()
    assert one["eval_loss"] == pytest.approx(other["eval_loss"], rel=1e-5)
    return one, other


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


class Run(NamedTuple):
    """What a run of a trainer logged and evaluated, and whether its process leads."""

    logged: list[dict[str, Any]]
    evaluated: dict[str, float]
    leads: bool


def run(
    rank: int,
    make: Callable[..., Any],
    folder: Path,
    pipeline: dict[str, Any] | None,
    changes: dict[str, Any],
    resume: Any = None,
) -> Run:
    """Train with what ``make(folder, pipeline, **changes)`` returns, save the model, and evaluate it."""
    warnings.filterwarnings("ignore", "layer .* of the model's parameters")
    made = make(folder, pipeline, **changes)
    lines = logged(made, resume)
    made.save_model(str(folder / "saved"))
    evaluated = {name: value for name, value in made.evaluate().items() if "per_second" not in name}
    del evaluated["eval_runtime"]
    return Run(lines, evaluated, made.is_world_process_zero())


def saved(folder: Path, name: str = "model.safetensors") -> dict[str, Tensor]:
    return load_file(folder / "saved" / name)


def assert_as_plain(folder: Path, told: list[Run], plain: Run, name: str = "model.safetensors") -> None:
    """Compare losses, gradient norms, the weights that were saved, and evaluations on all ranks."""
    assert_close(told[0].logged, plain.logged)
    assert hf_models.distance(saved(folder / "piped", name), saved(folder / "plain", name)) < 2e-6
    for run in told:
        assert run.logged == told[0].logged
        assert run.evaluated == pytest.approx(plain.evaluated, rel=1e-5)


class Both(Trainer):
    """A plain trainer in which SGD has the matrices of the blocks."""

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = super().create_optimizer(*args, **kwargs)
        taken = [p for name, p in self.model.named_parameters() if is_of_sgd(name, p)]
        ids = {id(p) for p in taken}
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in ids]
        sgd = torch.optim.SGD(taken, lr=0.05, momentum=0.9)
        optimizer.register_step_post_hook(lambda *_: sgd.step())
        return optimizer


def is_of_sgd(name: str, parameter: Tensor) -> bool:
    return "mlp" in name and parameter.dim() == 2


OWN = [{"match": is_of_sgd, "optimizer": torch.optim.SGD, "lr": 0.05, "momentum": 0.9}]
"""The same groups in a pipeline."""
DOUBLE = {"per_device_train_batch_size": 16, "per_device_eval_batch_size": 16}
"""Batches with the rows of two replicas."""
CONSTANT = {"lr_scheduler_type": "constant", "gradient_accumulation_steps": 2, "max_grad_norm": 0.1}
