"""The trainer's optimizer: weight decay by parameter, and a learning rate that depends on the step alone."""

from __future__ import annotations

import math
from typing import Any

import torch

from penstock.runtime.flow.conditions import flow_problem
from penstock.runtime.optim.grad_scaler import GradScaler
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.pipeline import Pipeline
from penstock.simulate.costs import Costs
from penstock.simulate.steps import simulate_steps
from penstock.train.config.config import Config
from penstock.train.config.optimizers import has_weight_decay, keywords, optimizer_class
from penstock.train.config.sections.optim_section import OptimConfig

MIN_GAIN = 0.005
"""Least share of a step that flowing has to save; less does not pay for the copies of the weights."""


def decays(name: str, parameter: torch.Tensor) -> bool:
    """Return whether weight decay applies: to matrices, but not to vectors (norms, biases) or embeddings.

    Embeddings are recognized by their names in Penstock's own model and in those of Hugging Face.
    """
    return parameter.ndim >= 2 and not any(word in name for word in ("embed", "wte", "wpe"))


def build_optimizer(pipe: Pipeline, config: Config) -> PipelineOptimizer:
    """Return the optimizer of a run, with one group of parameters that decay and one of those that do not.

    With ``parallel.zero``, parameters must then be read through `pipe`. Steps flow into each other if ``schedule.flow`` is
    "on", or if it is "auto" and that is possible and saves time.

    Args:
        pipe: pipeline whose parameters to train.
        config: a resolved config, with the number of steps.
    """
    optim, train, precision = config.optim, config.train, config.runtime.precision
    zero, flow = config.parallel.zero, config.schedule.flow
    scaler = None
    if precision == "fp16":
        scaler = GradScaler(init_scale=optim.loss_scale, growth_interval=optim.loss_scale_interval)
    decay: dict[str, Any] = {"weight_decay": 0.0} if has_weight_decay(optim.name) else {}
    possible = train.accumulate == 1 and scaler is None
    return PipelineOptimizer(
        pipe,
        optimizer_class(optim.name),
        groups=[{"match": decays, "weight_decay": optim.weight_decay}] if decay else None,
        accumulate=train.accumulate,
        clip=optim.clip or math.inf,
        lr_factor=lambda step: lr_factor(step, train.steps, optim),
        scaler=scaler,
        main_weights=precision == "bf16-weights",
        zero="overlap" if zero else False,
        flow=flow == "on" or (flow == "auto" and possible and gains_by_flow(pipe, zero)),
        **keywords(optim),
        **decay,
    )


def gains_by_flow(pipe: Pipeline, zero: bool) -> bool:
    """Return whether the steps of a pipeline can flow, and would take less time, by a simulation with equal costs."""
    if flow_problem(pipe, zero=zero):
        return False
    return simulate_steps(pipe.schedule, Costs.of(pipe.schedule.placement, 1, 1, 1), 3).gain >= MIN_GAIN


def lr_factor(step: int, steps: int, config: OptimConfig) -> float:
    """Return the share of the highest rate: linear warm-up, then half a cosine (1608.03983) or a line down to ``final_lr``,
    or the highest rate.

    Args:
        step: number of the step, from 0 to steps - 1.
        steps: number of steps of the run.
        config: ``[optim]`` section, with the warm-up and the last rate.
    """
    warmup = round(config.warmup * steps)
    if step < warmup:
        return (step + 1) / warmup
    if config.lr_schedule == "constant":
        return 1.0
    done = (step - warmup) / max(1, steps - 1 - warmup)
    if config.lr_schedule == "linear":
        return config.final_lr + (1 - config.final_lr) * (1 - done)
    return config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * done))
