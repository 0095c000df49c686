"""Batches of training and evaluation tokens, as pure functions of the step.

A sample is a window of the corpus. Every epoch visits each window once; order and starting point differ between epochs.
Sample ``step * batch + i`` is the same one on every process and after every restart.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import torch

from penstock.errors import DataError
from penstock.train.data.corpus import Corpus

Positions = npt.NDArray[np.int64]


def check_tokens(corpus: Corpus, role: str, sequence: int) -> None:
    """Raise DataError if a corpus is shorter than one sample and the token after it; `role` names it in the message."""
    if len(corpus) < sequence + 1:
        raise DataError(
            f"the {role} files hold {len(corpus)} tokens; a sample takes {sequence + 1}. "
            "Give more text or a smaller data.sequence"
        )


def train_batch(
    corpus: Corpus, *, seed: int, step: int, batch: int, sequence: int, vocabulary: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of one step: tokens, and for each the token that follows.

    Returns:
        Two int64 tensors of shape (batch, sequence).

    Raises:
        DataError: if a token is outside the vocabulary, or a file can no longer be read.
    """
    samples = np.arange(step * batch, (step + 1) * batch, dtype=np.int64)
    return windows(corpus, sample_positions(samples, len(corpus), sequence, seed), sequence, vocabulary)


def held_out_positions(tokens: int, count: int, sequence: int) -> Positions:
    """Return the starts of `count` samples, spread evenly over `tokens` tokens; they overlap if there are too few."""
    return np.linspace(0, tokens - sequence - 1, count).astype(np.int64)


def windows(
    corpus: Corpus, positions: Positions, sequence: int, vocabulary: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the samples that start at `positions`; shapes and errors are those of `train_batch`."""
    rows = np.stack([corpus.read(int(position), sequence + 1) for position in positions])
    if rows.min() < 0 or rows.max() >= vocabulary:
        token = rows.min() if rows.min() < 0 else rows.max()
        raise DataError(f"the data has a token {token}; model.vocabulary is {vocabulary}")
    tokens = torch.from_numpy(rows)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def sample_positions(samples: Positions, tokens: int, sequence: int, seed: int) -> Positions:
    """Return the position where each sample starts.

    Args:
        samples: numbers of the samples, from 0 without a limit; int64, shape (n,).
        tokens: length of the corpus in tokens.
        sequence: length of a sample in tokens.
        seed: seed of the order of samples.
    """
    slack = min(sequence, tokens - sequence)
    per_epoch = (tokens - slack) // sequence
    epochs, places = np.divmod(samples, per_epoch)
    positions = np.empty_like(samples)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        shift = _hash(seed, "shift", int(epoch)) % slack
        positions[here] = shift + sequence * permute(places[here], per_epoch, seed, int(epoch))
    return positions


def permute(places: Positions, count: int, seed: int, epoch: int) -> Positions:
    """Apply this epoch's permutation of 0..count-1 to some places, without computing the others.

    A Feistel network over the next even power of two; results of `count` or more pass through it again until they are less
    (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
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
