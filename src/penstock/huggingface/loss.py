"""Losses that models of transformers compute themselves, and the one by chunks that equals a causal model's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from penstock.huggingface.heads import CAUSAL, IMAGES, SEQUENCE
from penstock.stage.compute.linear_cross_entropy import IGNORED, LinearCrossEntropy

_MANY_CLASSES = 32_000
"""Vocabulary of Llama 2, from which on the logits weigh more than what chunks of them cost."""


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
