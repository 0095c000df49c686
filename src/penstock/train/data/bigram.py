"""A baseline that predicts each byte from the previous one."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from penstock.train.data.corpus import Corpus

_MAX_TOKENS = 1 << 30


def bigram_counts(corpus: Corpus, vocabulary: int) -> npt.NDArray[np.int64]:
    """Count the pairs of consecutive tokens, shape (vocabulary, vocabulary), over the first 2^30 tokens at most."""
    counts = np.zeros(vocabulary * vocabulary, np.int64)
    read = 0
    for tokens in corpus.chunks():
        counts += np.bincount(tokens[:-1] * vocabulary + tokens[1:], minlength=len(counts))
        read += len(tokens) - 1
        if read >= _MAX_TOKENS:
            break
    return counts.reshape(vocabulary, vocabulary)


def bigram_bits(counts: npt.NDArray[np.int64], x: npt.NDArray[np.int64], y: npt.NDArray[np.int64]) -> float:
    """Return the mean bits per token of y after x, by the counts with one added to each (Laplace)."""
    smoothed = counts + 1
    surprise = np.log(smoothed.sum(axis=1))[x] - np.log(smoothed)[x, y]
    return float(surprise.mean() / math.log(2))
