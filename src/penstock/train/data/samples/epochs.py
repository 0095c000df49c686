"""Order of samples within an epoch, computed for single samples without the others."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]


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
