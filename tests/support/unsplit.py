"""The trainer's run with torch alone: its optimizer, and the loop over the unsplit model."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from penstock.stage.module import StageModule
from penstock.train.config.config import Config
from penstock.train.config.optim import decays, lr_factor
from penstock.train.config.sections.optim_section import OptimConfig
from penstock.train.data.run_data import open_data, training_batch
from penstock.train.model.llama import layers, next_token_loss
from penstock.train.model.trainable import build_model


def adamw(
    named: Iterable[tuple[str, nn.Parameter]], config: OptimConfig, steps: int
) -> tuple[torch.optim.AdamW, LambdaLR]:
    """The optimizer and what moves its learning rate after each step."""
    named = list(named)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in named if decays(n, p)], "weight_decay": config.weight_decay},
            {"params": [p for n, p in named if not decays(n, p)], "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=True,
    )
    return optimizer, LambdaLR(optimizer, lambda step: lr_factor(step, steps, config))


def unsplit(
    config: Config, skipped: Collection[int] = ()
) -> tuple[list[float], list[float], dict[str, torch.Tensor], float]:
    """The same run in plain PyTorch, with some steps left out: losses, gradient norms, last weights, held-out bits."""
    text = open_data(config, build_model(config))
    model = StageModule(layers(config.model, config.train.seed))
    named = list(model.whole_model_parameters())
    optimizer, scheduler = adamw(named, config.optim, config.train.steps)
    losses, norms = [], []
    m = config.schedule.microbatches
    for step in range(config.train.steps):
        if step in skipped:
            continue
        batch = training_batch(text, config, build_model(config), step)
        parts = []
        for a, b in zip(batch.x.chunk(m), batch.y.chunk(m), strict=True):
            loss = next_token_loss(model(a), b)
            (loss / m).backward()
            parts.append(loss.detach())
        losses.append(torch.stack(parts).mean().item())
        norms.append(nn.utils.clip_grad_norm_([p for _, p in named], config.optim.clip).item())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    with torch.no_grad():
        bits = [next_token_loss(model(b.x), b.y).item() / math.log(2) for b in text.held_out]
    return losses, norms, {name: p.detach() for name, p in named}, sum(bits) / len(bits)
