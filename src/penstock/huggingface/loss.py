"""The loss of a causal language model with labels as Hugging Face means them.

``labels[:, i]`` is the token at place i, and the logits at place i are to say the token at i + 1: the shift is the
loss's. Places with the label -100 count for nothing.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

IGNORED = -100


def causal_lm_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy in nats over the labels that count; 0 where none does.

    The number transformers gives as ``model(input_ids, labels=labels).loss``. For batches with padding give the
    Pipeline ``reduction=penstock.valid_tokens``, so that every token of the batch weighs the same.

    Args:
        logits: (batch, sequence, vocabulary), of any floating-point dtype; computed in float32 as transformers does.
        labels: int64 (batch, sequence); -100 is ignored.
    """
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    total = F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return total / (targets != IGNORED).sum().clamp(min=1)


def valid_tokens(labels: Tensor) -> int:
    """How many labels count in `causal_lm_loss`: those after the first place that are not -100."""
    return int((labels[:, 1:] != IGNORED).sum())
