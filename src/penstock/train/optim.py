"""AdamW with weight decay by name, and a learning rate that is a function of the step alone."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from penstock.train.config import OptimConfig


def decays(name: str, parameter: torch.Tensor) -> bool:
    """Whether weight decay applies: to matrices, and neither to vectors (norms, biases) nor to embeddings.

    Embeddings are told by the names they have in Penstock's own model and in those of Hugging Face.
    """
    return parameter.ndim >= 2 and not any(word in name for word in ("embed", "wte", "wpe"))


def build_optimizer(
    parameters: Iterable[tuple[str, torch.nn.Parameter]], config: OptimConfig
) -> torch.optim.AdamW:
    """AdamW (1711.05101) over named parameters in two groups, with weight decay and without.

    A rank that holds none of one kind has one group, and a rank without parameters has none to optimise; the
    pipeline gives every rank at least one layer.
    """
    named = list(parameters)
    groups = [
        {"params": [p for n, p in named if decays(n, p)], "weight_decay": config.weight_decay},
        {"params": [p for n, p in named if not decays(n, p)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=True,
    )


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """Linear warm-up, then half a cosine down to ``final_lr`` times the highest rate (1608.03983).

    Args:
        step: from 0 to steps - 1.
        steps: of the whole run.
        config: the rates and the length of the warm-up.
    """
    climbing = round(config.warmup * steps)
    if step < climbing:
        return config.lr * (step + 1) / climbing
    done = (step - climbing) / max(1, steps - 1 - climbing)
    return config.lr * (config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * done)))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` in every group from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = rate
