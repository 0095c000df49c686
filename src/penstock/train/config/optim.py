"""The trainer's optimizer: weight decay by parameter, and a learning rate that depends on the step alone."""

from __future__ import annotations

import math
import re
from inspect import signature
from typing import Any

import torch

from penstock.runtime.optim.grad_scaler import GradScaler
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.pipeline import Pipeline
from penstock.train.config.config import Config
from penstock.train.config.optimizers import has_weight_decay, keywords, matrices_class, optimizer_class
from penstock.train.config.sections import OptimConfig

_HEAD = re.compile(r"(^|\.)(lm_)?head\.")


def decays(name: str, parameter: torch.Tensor) -> bool:
    """Return whether weight decay applies: to matrices, but not to vectors (norms, biases) or embeddings.

    Embeddings are recognized by their names in Penstock's own model and in Hugging Face models.
    """
    return parameter.ndim >= 2 and not any(word in name for word in ("embed", "wte", "wpe"))


def is_of_blocks(name: str, parameter: torch.Tensor) -> bool:
    """Return whether a parameter is a matrix, and not an embedding's or the head's."""
    return parameter.ndim == 2 and decays(name, parameter) and not _HEAD.search(name)


def build_optimizer(pipe: Pipeline, config: Config) -> PipelineOptimizer:
    """Return the optimizer of a run, with a group for parameters that decay and one for those that do not.

    With ``optim.matrices``, the matrices of the blocks are in one before them.

    With ``parallel.zero``, parameters must then be read through `pipe`.
    """
    optim, train, precision = config.optim, config.train, config.runtime.precision
    scaler = None
    if precision == "fp16":
        scaler = GradScaler(init_scale=optim.loss_scale, growth_interval=optim.loss_scale_interval)
    decay: dict[str, Any] = {"weight_decay": 0.0} if has_weight_decay(optim.name) else {}
    groups: list[dict[str, Any]] = [{"match": decays, "weight_decay": optim.weight_decay}] if decay else []
    if optim.matrices:
        kind = matrices_class(optim.matrices)
        chosen = {"weight_decay": optim.weight_decay} if "weight_decay" in signature(kind).parameters else {}
        groups.insert(0, {"match": is_of_blocks, "optimizer": kind, "lr": optim.matrices_lr, **chosen})
    return PipelineOptimizer(
        pipe,
        optimizer_class(optim.name),
        groups=groups or None,
        accumulate=train.accumulate,
        clip=optim.clip or math.inf,
        lr_factor=lambda step: lr_factor(step, train.steps, optim),
        scaler=scaler,
        main_weights=precision == "bf16-weights",
        zero="overlap" if config.parallel.zero or config.parallel.shard != "none" else False,
        **keywords(optim),
        **decay,
    )


def lr_factor(step: int, steps: int, config: OptimConfig) -> float:
    """Return the share of the highest rate: linear warm-up, then half a cosine (1608.03983) or a line down to ``final_lr``,
    or the highest rate.
    """
    warmup = round(config.warmup * steps)
    if step < warmup:
        return (step + 1) / warmup  # not 0 in the first step, which would train nothing
    if config.lr_schedule == "constant":
        return 1.0
    # Steps count from 0, so the last one has exactly `final_lr`.
    done = (step - warmup) / max(1, steps - 1 - warmup)
    if config.lr_schedule == "linear":
        return config.final_lr + (1 - config.final_lr) * (1 - done)
    return config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * done))
