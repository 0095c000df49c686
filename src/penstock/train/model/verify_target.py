"""The default models of ``penstock verify``."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from penstock.train.config.sections import ModelConfig
from penstock.train.model.llama import layers, next_token_loss
from penstock.verify import VerifyTarget

SEQUENCE = 16
CONFIG = ModelConfig(vocabulary=64, width=32, layers=8, heads=4, kv_heads=2, hidden=64)


def small_llama() -> VerifyTarget:
    """Return a Llama-style decoder of 8 blocks on random tokens, with two sequences a microbatch."""
    return VerifyTarget(layers(CONFIG), next_token_loss, _batch)


def small_mixture() -> VerifyTarget:
    """Return the decoder of `small_llama` with eight experts in each block, and two for each token."""
    config = replace(CONFIG, experts=8, expert_hidden=32)
    return VerifyTarget(layers(config), next_token_loss, _batch)


def _batch(step: int, microbatches: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, CONFIG.vocabulary, (2 * microbatches, SEQUENCE + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]
