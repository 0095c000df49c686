"""Losses of Hugging Face's models with labels in their convention.

Of a causal language model, ``labels[:, i]`` is the token at position i, and the logits at position i predict the token at
i + 1: the loss shifts the labels. Positions with the label -100 are ignored.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.huggingface.heads import CAUSAL, IMAGES, SEQUENCE
from penstock.stage.compute.linear_cross_entropy import IGNORED, LinearCrossEntropy
from penstock.stage.compute.shifted_loss import shifts

_MANY_CLASSES = 32_000
"""Vocabulary of Llama 2, from which on the logits weigh more than what chunks of them cost."""


def _mean_of_shifted(logits: Tensor, targets: Tensor) -> Tensor:
    total = F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return total / (targets != IGNORED).sum().clamp(min=1)


def _valid_of_shifted(targets: Tensor) -> int:
    return int((targets != IGNORED).sum())


@shifts(_mean_of_shifted)
def causal_lm_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy in nats over the labels that are not ignored; 0 if all are.

    It equals ``model(input_ids, labels=labels).loss`` in transformers. A `Pipeline` with this loss weighs each microbatch by
    its `valid_tokens` unless another `reduction` is given, so that every token of the batch has the same weight.

    Args:
        logits: tensor of shape (batch, sequence, vocabulary) and any floating-point dtype; computed in float32.
        labels: int64 tensor of shape (batch, sequence); -100 is ignored.
    """
    return _mean_of_shifted(logits, F.pad(labels[:, 1:], (0, 1), value=IGNORED))


@shifts(_valid_of_shifted)
def valid_tokens(labels: Tensor) -> int:
    """Return the number of labels that `causal_lm_loss` uses: those after the first position that are not -100."""
    return int((labels[:, 1:] != IGNORED).sum())


def chunked_loss(model: Any, label_smoothing: float = 0.0) -> LinearCrossEntropy | None:
    """Return `causal_lm_loss` by chunks, for a causal language model with a vocabulary of 32,000 or more; None for others.

    Args:
        model: the model; None is returned if its own loss or its head is another.
        label_smoothing: see `LinearCrossEntropy`.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss

    head = model.get_output_embeddings()
    own: Any = model.loss_function
    if own is not ForCausalLMLoss or type(head) is not nn.Linear or head.out_features < _MANY_CLASSES:
        return None
    return LinearCrossEntropy(ignore_index=IGNORED, label_smoothing=label_smoothing, shift=True)


def has_library_loss(model: Any) -> bool:
    """Return whether a model's ``loss_function`` is one of transformers, and so a sum over targets with a divisor."""
    return str(getattr(model.loss_function, "__module__", "")).startswith("transformers.")


class ModelLoss:
    """Loss that a model of transformers computes itself: (logits, labels) → scalar.

    Args:
        model: the model.
        head: its head, one of `HEADS`.

    Attributes:
        shifts: whether a causal model's labels are those of the tokens themselves, which it shifts (default True).
    """

    ignore_index = IGNORED

    def __init__(self, model: Any, head: str) -> None:
        self._loss, self._config = model.loss_function, model.config
        self.head = CAUSAL if head == IMAGES else head
        self.shifts = self.head == CAUSAL

    def __call__(self, logits: Tensor, labels: Tensor, divisor: Tensor | int | None = None) -> Tensor:
        """Return the mean over the targets; with a divisor, their sum divided by it."""
        loss: Tensor
        if self.head == CAUSAL:
            loss = self._loss(
                logits=logits,
                labels=labels,
                **({} if self.shifts else {"shift_labels": labels}),
                vocab_size=self._config.get_text_config().vocab_size,
                num_items_in_batch=divisor,
            )
            return loss
        loss = self._loss(
            logits=logits,
            labels=labels,
            pooled_logits=logits,
            config=self._config,
            num_items_in_batch=divisor,
        )
        # The library takes a number of targets for cross entropy alone, and has found out by now which loss it is.
        if (
            divisor is None
            or self.head != SEQUENCE
            or self._config.problem_type == "single_label_classification"
        ):
            return loss
        return loss * (len(labels) / divisor)

    def count(self, labels: Tensor) -> Tensor:
        """Return the number of targets: labels that are not -100, or rows where labels are numbers with a fraction."""
        if labels.is_floating_point():
            return torch.tensor(len(labels), device=labels.device)
        return ((labels[:, 1:] if self.shifts else labels) != IGNORED).sum()
