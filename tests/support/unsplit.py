"""The trainer's run with torch alone: its optimizer, and the loop over the unsplit model."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from penstock.stage.module import StageModule
from penstock.train.config.config import Config
from penstock.train.config.optim import decays, lr_factor
from penstock.train.config.sections import OptimConfig
from penstock.train.data.run_data import open_data, training_batch
from penstock.train.model.llama import layers, next_token_loss
from penstock.train.model.trainable import build_model

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def adamw(
    named: Iterable[tuple[str, nn.Parameter]], config: OptimConfig, steps: int
) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """The optimizer and what moves its learning rate after each step."""
    named = list(named)
    betas = {"betas": (config.beta1, config.beta2), "eps": config.epsilon, "fused": True}
    optimizer = getattr(torch.optim, config.name)(
        [
            {"params": [p for n, p in named if decays(n, p)], "weight_decay": config.weight_decay},
            {"params": [p for n, p in named if not decays(n, p)], "weight_decay": 0.0},
        ],
        lr=config.lr,
        **(betas if config.name == "AdamW" else config.arguments),
    )
    return optimizer, LambdaLR(optimizer, lambda step: lr_factor(step, steps, config))


def unsplit(
    config: Config, skipped: Collection[int] = ()
) -> tuple[list[float], list[float], dict[str, torch.Tensor], float]:
    """The same run in plain PyTorch, with some steps left out: losses, gradient norms, last weights, held-out bits."""
    train, precision, m = config.train, config.runtime.precision, config.schedule.microbatches
    text = open_data(config, build_model(config))
    model: Any = StageModule(layers(config.model, train.seed))
    if precision == "bf16-weights":
        model = model.bfloat16()
        for p in model.parameters():
            p.grad_dtype = torch.float32
    named = list(StageModule.whole_model_parameters(model))
    # Weights that the optimizer updates: fp32 copies of those in bf16.
    mains = [(n, nn.Parameter(p.detach().float()) if p.dtype == torch.bfloat16 else p) for n, p in named]
    optimizer, scheduler = adamw(mains, config.optim, train.steps)
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=config.optim.loss_scale,
        growth_interval=config.optim.loss_scale_interval,
        enabled=precision == "fp16",
    )

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", AUTOCAST.get(precision), enabled=precision in AUTOCAST):
            return next_token_loss(model(x), y)

    losses, norms = [], []
    for step in range(train.steps):
        if step in skipped:
            continue
        of_batches = []
        grads = [torch.zeros_like(main) for _, main in mains]
        for number in range(step * train.accumulate, (step + 1) * train.accumulate):
            batch = training_batch(text, config, build_model(config), number)
            parts = []
            for a, b in zip(batch.x.chunk(m), batch.y.chunk(m), strict=True):
                loss = loss_of(a, b)
                scaler.scale(loss / m).backward()
                parts.append(loss.detach())
                for grad, (_, p) in zip(grads, named, strict=True):
                    grad += p.grad
                    p.grad = None
            of_batches.append(torch.stack(parts).mean().item())
        for grad, (_, main) in zip(grads, mains, strict=True):
            main.grad = grad / train.accumulate
        scaler.unscale_(optimizer)
        if all(main.grad.isfinite().all() for _, main in mains):
            losses.append(sum(of_batches) / len(of_batches))
            norms.append(
                nn.utils.clip_grad_norm_([p for _, p in mains], config.optim.clip or math.inf).item()
            )
            scaler.step(optimizer)
            scheduler.step()
        scaler.update()
        optimizer.zero_grad()
        with torch.no_grad():
            for (_, p), (_, main) in zip(named, mains, strict=True):
                p.copy_(main)
    with torch.no_grad():
        bits = [loss_of(b.x, b.y).item() / math.log(2) for b in text.held_out]
    return losses, norms, {name: p.detach() for name, p in named}, sum(bits) / len(bits)
