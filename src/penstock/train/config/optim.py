"""The trainer's AdamW: weight decay by parameter, and a learning rate that depends on the step alone."""

from __future__ import annotations

import math

import torch

from penstock.runtime.flow.conditions import flow_problem
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.pipeline import Pipeline
from penstock.simulate.costs import Costs
from penstock.simulate.steps import simulate_steps
from penstock.train.config.fields import Flow
from penstock.train.config.sections.optim_section import OptimConfig

MIN_GAIN = 0.005
"""Least share of a step that flowing has to save; less does not pay for the copies of the weights."""


def decays(name: str, parameter: torch.Tensor) -> bool:
    """Return whether weight decay applies: to matrices, but not to vectors (norms, biases) or embeddings.

    Embeddings are recognized by their names in Penstock's own model and in those of Hugging Face.
    """
    return parameter.ndim >= 2 and not any(word in name for word in ("embed", "wte", "wpe"))


def build_optimizer(
    pipe: Pipeline, config: OptimConfig, steps: int, zero: bool = False, flow: Flow = "off"
) -> PipelineOptimizer:
    """Return AdamW (1711.05101) with one group of parameters that decay and one of those that do not.

    Args:
        pipe: pipeline whose parameters to train.
        config: ``[optim]`` section.
        steps: number of steps of the run.
        zero: divide state and work among the replicas (default False); parameters must then be read through `pipe`.
        flow: let steps flow into each other: "on", "off" (default), or "auto" if that is possible and saves time.
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
        flow=flow == "on" or (flow == "auto" and gains_by_flow(pipe, zero)),
    )


def gains_by_flow(pipe: Pipeline, zero: bool) -> bool:
    """Return whether the steps of a pipeline can flow, and would take less time, by a simulation with equal costs."""
    if flow_problem(pipe, zero=zero):
        return False
    return simulate_steps(pipe.schedule, Costs.of(pipe.schedule.placement, 1, 1, 1), 3).gain >= MIN_GAIN


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
