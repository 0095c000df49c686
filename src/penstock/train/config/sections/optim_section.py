"""The config section of the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.train.config.fields import Momentum, NotNegativeNumber, Positive, Share, Table


@dataclass(frozen=True)
class OptimConfig(Table):
    """``[optim]``: AdamW and its learning rate.

    Attributes:
        lr: highest learning rate. The default is 0.004, which suits the small model from random weights, but 2e-5 with
            ``model.path``, whose weights a higher rate would destroy, and 2e-4 for adapters (``[lora]``).
        final_lr: last learning rate, as a share of `lr`.
        warmup: share of the steps in which the rate rises linearly.
        weight_decay: weight decay of matrices; vectors and embeddings have none.
        beta1, beta2, epsilon: parameters of AdamW.
        clip: limit of the global gradient norm; 0 for none.
    """

    lr: Positive = 4e-3
    final_lr: Share = 0.05
    warmup: Share = 0.05
    weight_decay: NotNegativeNumber = 0.1
    beta1: Momentum = 0.9
    beta2: Momentum = 0.95
    epsilon: Positive = 1e-8
    clip: NotNegativeNumber = 1.0
