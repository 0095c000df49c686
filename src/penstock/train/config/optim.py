"""The trainer's AdamW: weight decay by parameter, and a learning rate that depends on the step alone."""

from __future__ import annotations

import math

import torch

from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.pipeline import Pipeline
from penstock.train.config.config import OptimConfig


def decays(name: str, parameter: torch.Tensor) -> bool:
    """Return whether weight decay applies: to matrices, but not to vectors (norms, biases) or embeddings.

    Embeddings are recognized by their names in Penstock's own model and in those of Hugging Face.
    """
    return parameter.ndim >= 2 and not any(word in name for word in ("embed", "wte", "wpe"))


def build_optimizer(pipe: Pipeline, config: OptimConfig, steps: int, zero: bool = False) -> PipelineOptimizer:
    """Return AdamW (1711.05101) with one group of parameters that decay and one of those that do not.

    Args:
        pipe: pipeline whose parameters to train.
        config: ``[optim]`` section.
        steps: number of steps of the run.
        zero: divide state and work among the replicas (default False); parameters must then be read through `pipe`.
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
    """Return the share of the highest rate: linear warm-up, then half a cosine down to ``final_lr`` (1608.03983).

    Args:
        step: number of the step, from 0 to steps - 1.
        steps: number of steps of the run.
        config: ``[optim]`` section, with the warm-up and the last rate.
    """
    warmup = round(config.warmup * steps)
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - 1 - warmup)
    return config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * done))
