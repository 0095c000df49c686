"""Losses that models of transformers compute themselves, by chunks where it is a causal model's, and of a whole step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from penstock.base.errors import BatchError, ConfigError
from penstock.huggingface.heads import (
    CAUSAL,
    IMAGE_CLASSES,
    IMAGES,
    MASKED,
    QUESTIONS,
    SEQUENCE,
    head_of,
)
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
        config: the model's config.
        first: name of the model's first input.
        passes_items: whether the model's forward passes a number of targets on to its loss (default False).
        shifts: whether a causal model's labels are the tokens' own, which it shifts (default True).
    """

    ignore_index = IGNORED

    def __init__(self, model: Any, head: str) -> None:
        self._loss, self.config = model.loss_function, model.config
        self.head = {IMAGES: CAUSAL, IMAGE_CLASSES: SEQUENCE}.get(head, head)
        self.first, self.passes_items = model.main_input_name, False
        self.shifts = self.head == CAUSAL

    def __call__(self, logits: Tensor, labels: Tensor, divisor: Tensor | int | None = None) -> Tensor:
        """Return the mean over the targets; with a divisor, their sum divided by it."""
        loss: Tensor
        if self.head == QUESTIONS:
            return self._of_answers(logits, labels, divisor)
        if self.head in (CAUSAL, MASKED):
            loss = self._loss(
                logits=logits,
                labels=labels,
                **({} if self.shifts or self.head == MASKED else {"shift_labels": labels}),
                vocab_size=self.config.get_text_config().vocab_size,
                num_items_in_batch=divisor,
            )
            return loss
        loss = self._loss(
            logits=logits,
            labels=labels,
            pooled_logits=logits,
            config=self.config,
            num_items_in_batch=divisor,
        )
        # The library takes a number of targets for cross entropy alone, and has found out by now which loss it is.
        if (
            divisor is None
            or self.head != SEQUENCE
            or self.config.problem_type == "single_label_classification"
        ):
            return loss
        return loss * (len(labels) / divisor)

    def _of_answers(self, logits: Tensor, labels: Tensor, divisor: Tensor | int | None) -> Tensor:
        if not isinstance(labels, FakeTensor) and bool((labels >= logits.shape[1]).any()):
            raise BatchError(
                f"an answer begins or ends at {int(labels.max())}, outside of its row of {logits.shape[1]} tokens, and the "
                "model would leave it out of its mean; give the position of a token, such as 0 for no answer"
            )
        loss: Tensor = self._loss(*logits.unbind(-1), *labels.unbind(-1))
        return loss if divisor is None else loss * (len(labels) / divisor)

    def takes_items(self, labels: Tensor) -> bool:
        """Return whether the model divides its loss of labels by a number of targets that it is given."""
        if self.head == SEQUENCE and (self.config.num_labels == 1 or labels.is_floating_point()):
            return False  # the library has no such loss for numbers
        return self.head == CAUSAL or (self.passes_items and self.head != QUESTIONS)

    def count(self, labels: Tensor) -> Tensor:
        """Return the number of targets: labels that are not -100, or rows where labels are numbers or answers."""
        if labels.is_floating_point() or self.head == QUESTIONS:
            return torch.tensor(len(labels), device=labels.device)
        return ((labels[:, 1:] if self.shifts else labels) != IGNORED).sum()


class StepLoss:
    """A model's own loss, summed over a microbatch's targets and divided by the number of targets of the whole step.

    Args:
        smoother: Trainer's label smoother, whose loss takes the place of the model's; None for none.
        shifts: whether a causal model's labels are the tokens' own, which the loss shifts.

    Attributes:
        divisor: number of targets of the whole step.
    """

    def __init__(self, model: Any, smoother: Any, shifts: bool) -> None:
        head = head_of(model)
        if head == IMAGES and smoother is not None:
            raise ConfigError(
                "label_smoothing_factor must be 0 with a model of images and text: Trainer does not shift the labels of its "
                "class, so that each token would be trained to predict itself"
            )
        if head == QUESTIONS and smoother is not None:
            raise ConfigError(
                "label_smoothing_factor must be 0 with a model for question answering: Trainer smooths labels alone"
            )
        self.own, self.smoother = ModelLoss(model, head), smoother
        self.own.shifts &= shifts
        self.divisor: Tensor | int = 1
        self._chunked: LinearCrossEntropy | None = None
        if self.own.head == CAUSAL:
            self._chunked = chunked_loss(model, 0.0 if smoother is None else smoother.epsilon)
            if not shifts and self._chunked is not None:
                self._chunked = self._chunked.without_shift
        self.postpones_logits = self._chunked is not None

    def __call__(self, logits: Tensor, target: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        labels = target
        if isinstance(target, tuple):
            labels, counts = target
            logits, labels = logits[counts], labels[counts]
        assert isinstance(labels, Tensor)
        if not len(labels):  # only rows that fill up the batch
            return logits.sum()
        if self._chunked is not None:
            return self._chunked(logits, labels) * (self.own.count(labels) / self.divisor)
        if self.smoother is None:
            return self.own(logits, labels, self.divisor)
        smoothed: Tensor = self.smoother(
            {"logits": logits}, labels, shift_labels=self.own.shifts, num_items_in_batch=self.divisor
        )
        return smoothed
