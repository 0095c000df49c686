"""A digest of a run's data: files, their sizes and their tokens; kept in checkpoints, compared at resume.

The cost is bounded. Of a corpus of up to 8,388,608 tokens (512 pieces of 16,384) every token is hashed; of a larger one,
512 pieces of 16,384 tokens, spread evenly from the first token to the last. For the training and the held-out files
together that is at most 128 MiB to hash and 1,024 places to read on every process, and 100 KB in a checkpoint.

A file that was added, removed, renamed or has another number of tokens is always detected. Changed tokens in a file of the
same size are always detected in a small corpus. In a large one they are if a piece contains them, as in a shuffled file.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from penstock.base.errors import DataError
from penstock.train.data.corpus import Corpus

PIECES, PIECE = 512, 16_384
_LISTED = 1024
_SHOWN = 5
# Tokens that are read and hashed at once: 8 MiB as int64.
_AT_ONCE = 1 << 20
_HEX = 16  # digits of a piece's digest


@dataclass(frozen=True)
class CorpusDigest:
    """A digest of the training files, or of the held-out files."""

    files: int
    tokens: int
    names: str
    pieces: str
    listed: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class DataDigest:
    training: CorpusDigest
    held_out: CorpusDigest

    @staticmethod
    def of(training: Corpus, held_out: Corpus) -> DataDigest:
        """Hash the data of both roles; raise DataError if a file cannot be read."""
        return DataDigest(_digest(training), _digest(held_out))

    def values(self) -> dict[str, Any]:
        """Return the digest as a checkpoint keeps it: numbers, strings, lists and dictionaries."""
        return {
            role: {**asdict(digest), "listed": [list(pair) for pair in digest.listed]}
            for role, digest in self._by_role().items()
        }

    @staticmethod
    def from_values(values: object) -> DataDigest:
        """Return the digest that `values` was called on; raise DataError if the values are no digest."""
        if not isinstance(values, dict) or values.keys() != {"training", "held_out"}:
            raise DataError(f"it is not a digest of data: {values!r:.80}")
        return DataDigest(_parse(values["training"]), _parse(values["held_out"]))

    @property
    def short(self) -> str:
        """A line that differs where the data differs: numbers of files and tokens, and a digest."""
        digest = hashlib.blake2b(repr(self).encode(), digest_size=8).hexdigest()
        files, tokens = (
            sum(getattr(digest, key) for digest in self._by_role().values()) for key in ("files", "tokens")
        )
        return f"{files:,} files with {tokens:,} tokens, digest {digest}"

    def changes(self, before: DataDigest) -> list[str]:
        """Return the differences from an earlier run's digest, a phrase each; empty if there are none."""
        old, new = before._by_role(), self._by_role()
        changes = [
            change for role in new for change in _changes(role.replace("_", "-"), old[role], new[role])
        ]
        more = len(changes) - _SHOWN
        return [*changes[:_SHOWN], f"and {more:,} more such differences"] if more > 0 else changes

    def _by_role(self) -> dict[str, CorpusDigest]:
        return {"training": self.training, "held_out": self.held_out}


def _digest(corpus: Corpus) -> CorpusDigest:
    listing = corpus.listing()
    files = [(name, tokens) for name, tokens, _ in listing]
    names = hashlib.blake2b(digest_size=16)
    for name, _, detail in listing:
        names.update(f"{len(name)}:{name}:{detail};".encode())
    listed = tuple(files) if len(files) <= _LISTED else ()
    pieces = [_hash(corpus, *place) for place in _places(len(corpus), listed)]
    return CorpusDigest(len(files), len(corpus), names.hexdigest(), "".join(pieces), listed)


def _hash(corpus: Corpus, start: int, length: int) -> str:
    digest = hashlib.blake2b(digest_size=_HEX // 2)
    for at in range(start, start + length, _AT_ONCE):
        digest.update(corpus.read(at, min(_AT_ONCE, start + length - at)).astype("<i8").data)
    return digest.hexdigest()


def _places(tokens: int, listed: Sequence[tuple[str, int]]) -> list[tuple[int, int]]:
    """Return (start, length) of the pieces: one a file if all fit, else equal parts of all tokens, else a sample."""
    if tokens > PIECES * PIECE:
        return [((tokens - PIECE) * n // (PIECES - 1), PIECE) for n in range(PIECES)]
    if listed:
        stops = accumulate(size for _, size in listed)
        return [(stop - size, size) for stop, (_, size) in zip(stops, listed, strict=True)]
    length = -(-tokens // PIECES)
    return [(start, min(length, tokens - start)) for start in range(0, tokens, length)]


def _changes(role: str, before: CorpusDigest, now: CorpusDigest) -> list[str]:
    if before.names != now.names:
        if not (before.listed and now.listed):
            return [
                f"the {role} files were {before.files:,} with {before.tokens:,} tokens and are {now.files:,} with "
                f"{now.tokens:,}, or have other names or sizes"
            ]
        old, new = dict(before.listed), dict(now.listed)
        changes = [f"the {role} file {name!r} is gone" for name in old if name not in new]
        changes += [f"the {role} file {name!r} is new" for name in new if name not in old]
        changes += [
            f"the {role} file {name!r} had {old[name]:,} tokens and has {new[name]:,}"
            for name in new
            if old.get(name, new[name]) != new[name]
        ]
        return changes or [f"the {role} files are divided differently"]
    changes = [
        _describe_piece(role, now, *place)
        for n, place in enumerate(_places(now.tokens, now.listed))
        if before.pieces[_HEX * n : _HEX * (n + 1)] != now.pieces[_HEX * n : _HEX * (n + 1)]
    ]
    return list(dict.fromkeys(changes))


def _describe_piece(role: str, digest: CorpusDigest, start: int, length: int) -> str:
    if not digest.listed:
        return f"the {role} files have other tokens, {start:,} to {start + length - 1:,} of {digest.tokens:,}"
    stops = list(accumulate(size for _, size in digest.listed))
    first, last = (digest.listed[bisect_right(stops, at)][0] for at in (start, start + length - 1))
    if first == last:
        return f"the {role} file {first!r} has other tokens"
    return f"the {role} files from {first!r} to {last!r} have other tokens"


def _parse(values: Any) -> CorpusDigest:
    types = {"files": int, "tokens": int, "names": str, "pieces": str, "listed": list}
    if not isinstance(values, dict) or values.keys() != types.keys():
        raise DataError(f"it is not a digest of data: {values!r:.80}")
    listed = values["listed"]
    if not all(type(values[key]) is expected for key, expected in types.items()) or not all(
        isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) and type(pair[1]) is int
        for pair in listed
    ):
        raise DataError(f"it is not a digest of data: {values!r:.80}")
    return CorpusDigest(**{**values, "listed": tuple((name, tokens) for name, tokens in listed)})
