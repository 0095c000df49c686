"""Batches of training and evaluation samples, as pure functions of the step.

A sample's number alone says what it is, from 0 without a limit: an epoch has each row once, in an order of its own, which
is computed for single samples without the others. So the state of the data is the number of steps done, and batches are the
same on every process, at every layout and after every restart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.base.errors import DataError
from penstock.stage.compute.linear_cross_entropy import IGNORED
from penstock.train.data.corpus import Corpus

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
        target_is_input: whether the loss shifts its target, so that it is the tokens' own labels; else it is the next
            tokens' labels.
    """
    tokens, labels = np.stack([row.tokens for row in rows]), np.stack([row.labels for row in rows])
    smallest, largest = int(tokens.min()), max(int(tokens.max()), int(labels.max()))
    if smallest < 0 or largest >= vocabulary:
        token = smallest if smallest < 0 else largest
        raise DataError(f"the data has a token {token}; model.vocabulary is {vocabulary}")
    y = labels[:, :-1] if target_is_input else labels[:, 1:]
    valid = int(((y[:, 1:] if target_is_input else y) != IGNORED).sum())
    return Batch(torch.from_numpy(tokens), torch.from_numpy(np.ascontiguousarray(y)), valid)


def window_positions(samples: Numbers, tokens: int, sequence: int, seed: int) -> Numbers:
    """Return the position where each sample of one long sequence starts.

    Args:
        samples: numbers of the samples, from 0 without a limit; int64, shape (n,).
    """
    slack = min(sequence, tokens - sequence)
    per_epoch = windows_per_epoch(tokens, sequence)
    epochs, places = np.divmod(samples, per_epoch)
    positions = np.empty_like(samples)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        shift = _hash(seed, "shift", int(epoch)) % slack
        positions[here] = shift + sequence * permute(places[here], per_epoch, seed, int(epoch))
    return positions


def windows_per_epoch(tokens: int, sequence: int) -> int:
    """Return the number of samples of `sequence` tokens in an epoch, whose starting point differs between epochs."""
    return (tokens - min(sequence, tokens - sequence)) // sequence


def permute(places: Numbers, count: int, seed: int, epoch: int) -> Numbers:
    """Apply this epoch's permutation of 0..count-1 to some places, without computing the others.

    A Feistel network over the next even power of two; results of `count` or more pass through it again until they are less
    (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    # Four rounds: with fewer, the halves of the numbers stay related (Luby and Rackoff, 1988).
    keys = [np.uint64(_hash(seed, "order", epoch, turn)) for turn in range(4)]

    def scramble(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = values >> np.uint64(half), values & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        return (left << np.uint64(half)) | right

    out = scramble(places.astype(np.uint64))
    while (outside := out >= count).any():
        out[outside] = scramble(out[outside])
    return out.astype(np.int64)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the finaliser of SplitMix64: every input bit changes every output bit with probability near one half."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _hash(*parts: object) -> int:
    digest = hashlib.sha256(":".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little")


@dataclass(frozen=True)
class WindowSamples:
    """Samples of training and evaluation: windows of a corpus.

    Every epoch visits each window once; order and starting point differ between epochs.
    """

    corpus: Corpus
    sequence: int
    seed: int
    role: str
    size: int | None = None

    def __post_init__(self) -> None:
        if len(self.corpus) < self.sequence + 1:
            raise DataError(
                f"the {self.role} files hold {len(self.corpus)} tokens; a sample takes {self.sequence + 1}. "
                "Give more text or a smaller data.sequence"
            )

    @property
    def per_epoch(self) -> int:
        """Number of samples of an epoch."""
        return windows_per_epoch(len(self.corpus), self.sequence)

    def read(self, samples: Numbers) -> list[Row]:
        """Return the training samples of some numbers, from 0 without a limit, shape (n,)."""
        return self._windows(window_positions(samples, len(self.corpus), self.sequence, self.seed))

    def spread(self, count: int) -> list[Row]:
        """Return `count` windows, which overlap if there are too few tokens."""
        return self._windows(np.linspace(0, len(self.corpus) - self.sequence - 1, count).astype(np.int64))

    def once(self) -> Iterator[Row]:
        """Yield windows side by side; each begins with the last token of the one before."""
        for start in range(0, len(self.corpus) - 1, self.sequence):
            length = min(self.sequence + 1, len(self.corpus) - start)
            labels = np.full(self.sequence + 1, IGNORED, np.int64)
            labels[:length] = self.corpus.read(start, length)
            tokens = np.where(labels == IGNORED, 0, labels)[:-1]
            yield Row(tokens, labels)

    def _windows(self, positions: Numbers) -> list[Row]:
        return [
            Row(tokens[:-1], tokens)
            for tokens in (self.corpus.read(int(position), self.sequence + 1) for position in positions)
        ]
