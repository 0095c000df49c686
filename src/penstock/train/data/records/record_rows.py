"""Samples of records: one record a row, or several packed into one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from penstock.base.errors import DataError
from penstock.huggingface.loss import IGNORED
from penstock.train.data.records.packing import pack
from penstock.train.data.records.record_encoder import CONTEXT
from penstock.train.data.records.record_store import RecordStore
from penstock.train.data.samples.batches import Row, blank
from penstock.train.data.samples.epochs import shuffled

Numbers = npt.NDArray[np.int64]


class RecordSamples:
    """Rows of records; see `penstock.train.data.samples.batches.Samples`.

    A text of more tokens than a row continues in further ones, which begin with the last token of the one before, so that
    each token is predicted once. Completions and chats lose their end; those without a trained token left are left out.

    Args:
        store: the store of the records.
        chosen: numbers of the records to read, in order; shape (n,).
        sequence: length of a row in tokens.
        seed: seed of the order.
        packing: whether a row has several records.

    Attributes:
        cut: number of records of more than `sequence` tokens.
        unreached: number of records left out because all their trained tokens were cut off.
        longest: tokens of the longest record.
        used: share of the rows' tokens that are no padding.
    """

    masked = True

    def __init__(self, store: RecordStore, chosen: Numbers, sequence: int, seed: int, packing: bool) -> None:
        self._store, self._sequence, self._seed = store, sequence, seed
        starts, lengths = store.starts[chosen], store.lengths()[chosen]
        self.cut = int((lengths > sequence).sum())
        self.longest = int(lengths.max(initial=0))
        self.unreached = 0
        sizes = int(store.sizes[chosen].sum())
        self.size: int | None = sizes
        if store.kind == "text":
            starts, lengths = _continued(starts, lengths, sequence)
        else:
            reached = store.targets[chosen] < np.minimum(lengths, sequence)
            self.unreached = int(len(reached) - reached.sum())
            starts, lengths = starts[reached], np.minimum(lengths[reached], sequence)
            self.size = None if self.cut else sizes
        self._starts, self._lengths = starts, lengths
        if packing:
            self._order, self._begins = pack(lengths, sequence)
        else:
            self._order, self._begins = np.arange(len(lengths)), np.arange(len(lengths) + 1)
        self.used = float(lengths.sum()) / max(1, self.per_epoch * sequence)

    @property
    def per_epoch(self) -> int:
        return len(self._begins) - 1

    def read(self, samples: Numbers) -> list[Row]:
        return [self._row(int(n)) for n in shuffled(samples, self.per_epoch, self._seed)]

    def spread(self, count: int) -> list[Row]:
        count = min(count, self.per_epoch)
        return [self._row(int(n)) for n in np.linspace(0, self.per_epoch - 1, count).astype(np.int64)]

    def once(self) -> Iterator[Row]:
        for n in range(self.per_epoch):
            yield self._row(n)

    def _row(self, number: int) -> Row:
        row, at = blank(self._sequence), 0
        for item in self._order[self._begins[number] : self._begins[number + 1]].tolist():
            start, length = int(self._starts[item]), int(self._lengths[item])
            stored = self._store.read(start, length)
            if len(stored) != length:
                raise DataError(f"{self._store.folder} became shorter while it was being read")
            tokens = (stored & ~CONTEXT).astype(np.int64)
            row.tokens[at : at + length] = tokens
            # The first token of a record follows from nothing.
            row.labels[at + 1 : at + length] = np.where(stored[1:] < CONTEXT, tokens[1:], IGNORED)
            row.positions[at : at + length] = np.arange(length)
            at += length
        row.positions[at:] = np.arange(self._sequence - at)
        return row


def _continued(starts: Numbers, lengths: Numbers, sequence: int) -> tuple[Numbers, Numbers]:
    """Return start and length of the rows that texts take; each but a text's first repeats one token."""
    step = max(1, sequence - 1)
    pieces = np.maximum(1, -(-(lengths - 1) // step))
    first = np.repeat(np.cumsum(pieces) - pieces, pieces)
    skip = (np.arange(int(pieces.sum())) - first) * step
    return np.repeat(starts, pieces) + skip, np.minimum(np.repeat(lengths, pieces) - skip, sequence)
