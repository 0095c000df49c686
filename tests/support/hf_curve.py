"""The loss curve of plain transformers, which `penstock train` of a Hugging Face model must have."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from penstock.train.config.config import Config
from penstock.train.data.run_data import open_data, training_batch
from penstock.train.model.trainable import build_model
from tests.support.trainer import lines
from tests.support.unsplit import adamw


def plain_losses(config: Config) -> list[float]:
    """The same training as one would write it with transformers: whole batches, labels, the model's own loss."""
    language = build_model(config)
    text = open_data(config, language)
    model = AutoModelForCausalLM.from_pretrained(config.model.path).train()
    optimizer, scheduler = adamw(model.named_parameters(), config.optim, config.train.steps)
    losses = []
    for step in range(config.train.steps):
        batch = training_batch(text, config, language, step)
        loss = model(input_ids=batch.x, labels=batch.y).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses


def assert_same_curve(config: Config, falls_to: float = 0.7) -> None:
    expected = plain_losses(config)
    seen = [line["loss"] for line in lines(Path(config.train.folder) / config.train.name, "train")]
    assert len(seen) == config.train.steps
    assert expected[-1] < falls_to * expected[0]
    worst = max(abs(a - b) for a, b in zip(seen, expected, strict=True))
    print(
        f"loss {expected[0]:.4f} to {expected[-1]:.4f} in {len(seen)} steps; largest difference {worst:.1e}"
    )
    assert worst < 1e-5
