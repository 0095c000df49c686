"""The loss curve of transformers and peft alone, which `penstock train` with ``[lora]`` must have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import penstock
from penstock.train.config.config import Config
from penstock.train.data.run_data import open_data, training_batch
from penstock.train.model.trainable import build_model
from tests.support.unsplit import adamw


@dataclass(frozen=True)
class PlainRun:
    """Losses by step, and the model after the last."""

    losses: list[float]
    model: Any


def initial_adapters(config: Config, folder: Path) -> Path:
    """Save the adapters that a run with this config begins with."""
    model = build_model(config)
    with penstock.Pipeline(model.layers, model.loss_fn, microbatches=1) as pipe:
        penstock.save_adapters(pipe, folder)
    return folder


def train_with_peft(config: Config, adapters: Path) -> PlainRun:
    """Train as one would with transformers and peft: whole batches, labels, the model's own loss."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    trainable = build_model(config)
    data = open_data(config, trainable)
    base = AutoModelForCausalLM.from_pretrained(config.model.path)
    model = PeftModel.from_pretrained(base, adapters, is_trainable=True).train()
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer, scheduler = adamw(trained, config.optim, config.train.steps)
    losses = []
    for step in range(config.train.steps):
        batch = training_batch(data, config, trainable, step)
        loss = model(input_ids=batch.x, labels=batch.y, **batch.named).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for _, p in trained], config.optim.clip)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return PlainRun(losses, model.eval())


def largest_difference(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))
