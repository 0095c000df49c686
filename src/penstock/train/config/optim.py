"""AdamW with weight decay by name, and a learning rate that is a function of the step alone."""

from __future__ import annotations

import math

import torch

from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.pipeline import Pipeline
from penstock.train.config.config import OptimConfig


def decays(name: str, parameter: torch.Tensor) -> bool:
    """Whether weight decay applies: to matrices, and neither to vectors (norms, biases) nor to embeddings.

    Embeddings are told by the names they have in Penstock's own model and in those of Hugging Face.
    """
    return parameter.ndim >= 2 and not any(word in name for word in ("embed", "wte", "wpe"))


def build_optimizer(pipe: Pipeline, config: OptimConfig, steps: int, zero: bool = False) -> PipelineOptimizer:
    """AdamW (1711.05101) in two groups, with weight decay and without, for a run of so many steps.

    Args:
        pipe: what is trained.
        config: the rates and the decay.
        steps: of the whole run.
        zero: divide state and work among the replicas; parameters must be read through `pipe` then.
    """
    return PipelineOptimizer(
        pipe,
        torch.optim.AdamW,
        groups=[{"match": decays, "weight_decay": config.weight_decay}],
        clip=config.clip or math.inf,
        lr_factor=lambda step: lr_factor(step, steps, config),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        weight_decay=0.0,
        fused=True,
        zero="overlap" if zero else False,
    )


def lr_factor(step: int, steps: int, config: OptimConfig) -> float:
    """The share of the highest rate: linear warm-up, then half a cosine down to ``final_lr`` (1608.03983).

    Args:
        step: from 0 to steps - 1.
        steps: of the whole run.
        config: the last rate and the length of the warm-up.
    """
    climbing = round(config.warmup * steps)
    if step < climbing:
        return (step + 1) / climbing
    done = (step - climbing) / max(1, steps - 1 - climbing)
    return config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * done))
