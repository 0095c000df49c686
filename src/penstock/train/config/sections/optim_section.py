"""The config section of the optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.train.config.fields import (
    Count,
    LrSchedule,
    Momentum,
    NotNegativeNumber,
    Options,
    Positive,
    Share,
    Table,
    Text,
)


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Table):
    """``[optim]``: the optimizer and its learning rate.

    The defaults are those of AdamW for a small model with random weights. With ``model.path``, they are those of
    fine-tuning: `lr` 2e-5, `weight_decay` 0.01 and `beta2` 0.999. Another optimizer has
    torch's defaults for `lr`, `weight_decay`, `beta1`, `beta2` and `epsilon`; but with ``model.path`` those of Adam's kind
    (such as ``NAdam``) have these rates, too, and `lr` must be given for the rest.

    Attributes:
        name: class of ``torch.optim``, such as ``AdamW``, ``SGD`` or ``Adafactor``. Refused are ``LBFGS``, ``Muon`` and
            ``SparseAdam``, which cannot train a pipeline.
        arguments: further arguments of the class, as in ``[optim.arguments]`` with ``momentum = 0.9``.
        lr: highest learning rate.
        lr_schedule: course of the rate after the warm-up: ``cosine`` or ``linear`` down to `final_lr`, or ``constant``.
        final_lr: last learning rate, as a share of `lr`; ignored if `lr_schedule` is ``constant``.
        warmup: share of the steps in which the rate rises linearly.
        weight_decay: weight decay of matrices; vectors (norms, biases) and embeddings have none.
        beta1, beta2, epsilon: parameters of AdamW and the other optimizers that have ``betas``; those of the others are
            in `arguments`.
        clip: limit of the global gradient norm; 0 for none.
        loss_scale: first factor of the loss with ``runtime.precision = "fp16"``. It is halved when a gradient overflows,
            which skips the step.
        loss_scale_interval: steps in a row without an overflow after which that factor is doubled.
    """

    name: Text = "AdamW"
    arguments: Options = field(default_factory=dict)
    lr: Positive = 4e-3
    lr_schedule: LrSchedule = "cosine"
    final_lr: Share = 0.05
    warmup: Share = 0.05
    weight_decay: NotNegativeNumber = 0.1
    beta1: Momentum = 0.9
    beta2: Momentum = 0.95
    epsilon: Positive = 1e-8
    clip: NotNegativeNumber = 1.0
    loss_scale: Positive = 65536.0
    loss_scale_interval: Count = 2000
