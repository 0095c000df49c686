"""A small language model in parts, whole, partly frozen or in bfloat16, for optimizers and weights that are divided."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock.train.config.sections import ModelConfig
from penstock.train.model.llama import layers

CONFIG = ModelConfig(vocabulary=32, width=16, layers=4, heads=4, kv_heads=2, hidden=32)
GROUPS = [{"match": r"norm|embedding", "weight_decay": 0.0, "lr": 0.02}]
ROWS = 8


def tokens(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    found = torch.randint(0, 32, (ROWS, 9), generator=generator)
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


def parts(dtype: torch.dtype = torch.float32) -> list[tuple[str, nn.Module]]:
    torch.manual_seed(0)
    return [(layer.name, layer.build().to(dtype)) for layer in layers(CONFIG)]


def half_frozen() -> list[tuple[str, nn.Module]]:
    made = parts()
    for _, part in made[1:3]:
        part.requires_grad_(False)
    return made


def in_bf16() -> list[tuple[str, nn.Module]]:
    return parts(torch.bfloat16)
