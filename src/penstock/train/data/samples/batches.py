"""Batches of training and evaluation samples, as pure functions of the step.

A sample's number alone says what it is, from 0 without a limit: an epoch has each row once, in an order of its own. So the
state of the data is the number of steps done, and batches are the same on every process, at every layout and after every
restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.base.errors import DataError
from penstock.huggingface.loss import IGNORED

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Row:
    """A sample.

    Attributes:
        tokens: tokens; int64, shape (sequence,).
        labels: label of each token, which is the token or -100, and of the one after the last; shape (sequence + 1,).
    """

    tokens: Numbers
    labels: Numbers


@dataclass(frozen=True)
class Batch:
    """A batch for `Pipeline.step`.

    Attributes:
        x: tokens, int64 (batch, sequence).
        y: target of each token, as the model's loss takes it, int64 (batch, sequence).
        valid: number of tokens that the loss counts.
    """

    x: Tensor
    y: Tensor
    valid: int


def blank(sequence: int) -> Row:
    """Return a row without labels, which fills a batch up."""
    return Row(
        np.zeros(sequence, np.int64),
        np.full(sequence + 1, IGNORED, np.int64),
    )


def batch_of(rows: Sequence[Row], vocabulary: int, *, target_is_input: bool) -> Batch:
    """Return the batch of some rows.

    Args:
        target_is_input: whether the loss shifts its target, so that it is the labels of the tokens themselves; else it is
            those of the tokens that follow.
    """
    tokens, labels = np.stack([row.tokens for row in rows]), np.stack([row.labels for row in rows])
    smallest, largest = int(tokens.min()), max(int(tokens.max()), int(labels.max()))
    if smallest < 0 or largest >= vocabulary:
        token = smallest if smallest < 0 else largest
        raise DataError(f"the data has a token {token}; model.vocabulary is {vocabulary}")
    y = labels[:, :-1] if target_is_input else labels[:, 1:]
    valid = int(((y[:, 1:] if target_is_input else y) != IGNORED).sum())
    return Batch(torch.from_numpy(tokens), torch.from_numpy(np.ascontiguousarray(y)), valid)
