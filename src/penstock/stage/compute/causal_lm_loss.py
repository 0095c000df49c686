"""Loss of causal language models with labels in Hugging Face's convention, and the number of labels that it uses.

``labels[:, i]`` is the token at position i, and the logits at position i predict the token at i + 1: the loss shifts the
labels. Positions with the label -100 are ignored.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from penstock.stage.compute.linear_cross_entropy import IGNORED
from penstock.stage.compute.shifted_loss import shifts


def mean_over_targets(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy in nats over the targets that are not -100; 0 if all are.

    Args:
        logits: tensor of shape (batch, sequence, vocabulary); computed in float32.
        targets: int64 tensor of shape (batch, sequence), not shifted.
    """
    total = F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return total / (targets != IGNORED).sum().clamp(min=1)


def valid_targets(targets: Tensor) -> int:
    """Return the number of targets that are not -100."""
    return int((targets != IGNORED).sum())


@shifts(mean_over_targets)
def causal_lm_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy in nats over the labels that are not ignored; 0 if all are.

    It equals ``model(input_ids, labels=labels).loss`` in transformers. A `Pipeline` with this loss weighs each microbatch by
    its `valid_tokens` unless another `reduction` is given, so that every token of the batch has the same weight.

    Args:
        logits: tensor of shape (batch, sequence, vocabulary) and any floating-point dtype; computed in float32.
        labels: int64 tensor of shape (batch, sequence); -100 is ignored.
    """
    return mean_over_targets(logits, F.pad(labels[:, 1:], (0, 1), value=IGNORED))


@shifts(valid_targets)
def valid_tokens(labels: Tensor) -> int:
    """Return the number of labels that `causal_lm_loss` uses: those after the first position that are not -100."""
    return int((labels[:, 1:] != IGNORED).sum())
