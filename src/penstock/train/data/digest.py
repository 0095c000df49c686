"""A digest of a run's data: which files, how many tokens each, and the tokens; kept in checkpoints, compared at resume.

What it costs is bounded. Of a corpus of up to 8,388,608 tokens (512 pieces of 16,384) every token is hashed. Of a larger one
512 pieces of 16,384 tokens are, spread evenly from its first token to its last. For the training and the held-out files
together that is 128 MiB to hash and 1,024 places to read at most, on every process, and 100 KB in a checkpoint. So a file
that was added, removed, renamed or has another number of tokens is always found. Other tokens in a file of the same size
are always found in a small corpus, and in a large one where a piece is read; a file written anew or shuffled is.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from penstock.errors import DataError
from penstock.train.data.corpus import Corpus

PIECES, PIECE = 512, 16_384
_LISTED = 1024
_SHOWN = 5
_AT_ONCE = 1 << 20
_HEX = 16  # digits of a piece's digest


@dataclass(frozen=True)
class CorpusDigest:
    """Of the files that are trained on, or of those that are held out.

    Attributes:
        files, tokens: how many.
        names: digest of the files' names and sizes in tokens.
        pieces: digests of pieces of tokens, one after another.
        listed: (name, tokens) of the files; empty where there are more than 1,024.
    """

    files: int
    tokens: int
    names: str
    pieces: str
    listed: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class DataDigest:
    """Of all the data of a run."""

    training: CorpusDigest
    held_out: CorpusDigest

    @staticmethod
    def of(training: Corpus, held_out: Corpus) -> DataDigest:
        """Read what has to be read, and no more than the module's docstring says.

        Raises:
            DataError: a file cannot be read.
        """
        return DataDigest(_digest(training), _digest(held_out))

    def values(self) -> dict[str, Any]:
        """As a checkpoint keeps it: numbers, texts, lists and dictionaries."""
        return {
            role: {**asdict(part), "listed": [list(pair) for pair in part.listed]}
            for role, part in self._parts().items()
        }

    @staticmethod
    def from_values(values: object) -> DataDigest:
        """What `values` gave.

        Raises:
            DataError: it is something else.
        """
        if not isinstance(values, dict) or values.keys() != {"training", "held_out"}:
            raise DataError(f"it is no digest of data: {values!r:.80}")
        return DataDigest(_parsed(values["training"]), _parsed(values["held_out"]))

    @property
    def short(self) -> str:
        """One line that differs where the data differs: files, tokens and a digest of all."""
        digest = hashlib.blake2b(repr(self).encode(), digest_size=8).hexdigest()
        files, tokens = (
            sum(getattr(part, key) for part in self._parts().values()) for key in ("files", "tokens")
        )
        return f"{files:,} files with {tokens:,} tokens, digest {digest}"

    def changes(self, before: DataDigest) -> list[str]:
        """What is not as it was in an earlier run, a few words each; nothing if all is."""
        old, now = before._parts(), self._parts()
        found = [change for role in now for change in _changes(role.replace("_", "-"), old[role], now[role])]
        more = len(found) - _SHOWN
        return [*found[:_SHOWN], f"and {more:,} more such differences"] if more > 0 else found

    def _parts(self) -> dict[str, CorpusDigest]:
        return {"training": self.training, "held_out": self.held_out}


def _digest(corpus: Corpus) -> CorpusDigest:
    files = [(corpus.name_of(document), len(document)) for document in corpus.documents]
    names = hashlib.blake2b(digest_size=16)
    for (name, _), document in zip(files, corpus.documents, strict=True):
        names.update(f"{len(name)}:{name}:{document.start}:{document.stop}:{document.end_mark};".encode())
    listed = tuple(files) if len(files) <= _LISTED else ()
    pieces = [_hash(corpus, *place) for place in _places(len(corpus), listed)]
    return CorpusDigest(len(files), len(corpus), names.hexdigest(), "".join(pieces), listed)


def _hash(corpus: Corpus, start: int, length: int) -> str:
    digest = hashlib.blake2b(digest_size=_HEX // 2)
    for at in range(start, start + length, _AT_ONCE):
        digest.update(corpus.read(at, min(_AT_ONCE, start + length - at)).astype("<i8").data)
    return digest.hexdigest()


def _places(tokens: int, listed: Sequence[tuple[str, int]]) -> list[tuple[int, int]]:
    """(start, length) of the pieces: the files, where all fit; else all tokens; else some, from the first to the last."""
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
        found = [f"the {role} file {name!r} is gone" for name in old if name not in new]
        found += [f"the {role} file {name!r} is new" for name in new if name not in old]
        found += [
            f"the {role} file {name!r} had {old[name]:,} tokens and has {new[name]:,}"
            for name in new
            if old.get(name, new[name]) != new[name]
        ]
        return found or [f"the {role} files are divided otherwise"]
    found = [
        _where(role, now, *place)
        for n, place in enumerate(_places(now.tokens, now.listed))
        if before.pieces[_HEX * n : _HEX * (n + 1)] != now.pieces[_HEX * n : _HEX * (n + 1)]
    ]
    return list(dict.fromkeys(found))


def _where(role: str, digest: CorpusDigest, start: int, length: int) -> str:
    """What to call the files that have a part of these tokens."""
    if not digest.listed:
        return f"the {role} files have other tokens, {start:,} to {start + length - 1:,} of {digest.tokens:,}"
    stops = list(accumulate(size for _, size in digest.listed))
    first, last = (digest.listed[bisect_right(stops, at)][0] for at in (start, start + length - 1))
    if first == last:
        return f"the {role} file {first!r} has other tokens"
    return f"the {role} files from {first!r} to {last!r} have other tokens"


def _parsed(values: Any) -> CorpusDigest:
    kinds = {"files": int, "tokens": int, "names": str, "pieces": str, "listed": list}
    if not isinstance(values, dict) or values.keys() != kinds.keys():
        raise DataError(f"it is no digest of data: {values!r:.80}")
    listed = values["listed"]
    if not all(type(values[key]) is kind for key, kind in kinds.items()) or not all(
        isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) and type(pair[1]) is int
        for pair in listed
    ):
        raise DataError(f"it is no digest of data: {values!r:.80}")
    return CorpusDigest(**{**values, "listed": tuple((name, tokens) for name, tokens in listed)})
