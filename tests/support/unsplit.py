"""The trainer's optimizer with torch alone, for loops over an unsplit model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from penstock.train.config.config import OptimConfig
from penstock.train.config.optim import decays, lr_factor


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
