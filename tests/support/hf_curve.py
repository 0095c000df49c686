"""The loss curve of plain transformers, which `penstock train` of a Hugging Face model must have."""

from __future__ import annotations

from collections.abc import Collection
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


def by_microbatches(
    config: Config, kept: Collection[int] = ()
) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """The same training over microbatches: losses, and the weights after the kept steps and the last one."""
    language = build_model(config)
    text, m = open_data(config, language), config.schedule.microbatches
    model = AutoModelForCausalLM.from_pretrained(config.model.path).train()
    optimizer, scheduler = adamw(model.named_parameters(), config.optim, config.train.steps)
    losses, weights = [], []
    for step in range(config.train.steps):
        parts = []
        for x in training_batch(text, config, language, step).x.chunk(m):
            loss = model(input_ids=x, labels=x).loss
            (loss / m).backward()
            parts.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(torch.stack(parts).mean().item())
        if step + 1 in (*kept, config.train.steps):
            weights.append({name: value.clone() for name, value in model.state_dict().items()})
    return losses, weights


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
