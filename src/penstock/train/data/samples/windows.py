"""Samples of one long sequence of tokens: windows of a corpus."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.base.errors import DataError
from penstock.huggingface.loss import IGNORED
from penstock.train.data.corpus import Corpus
from penstock.train.data.samples.batches import Row
from penstock.train.data.samples.epochs import window_positions, windows_per_epoch

Numbers = npt.NDArray[np.int64]


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
