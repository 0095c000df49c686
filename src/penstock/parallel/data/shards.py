"""Parameters whose update is divided among the replicas (ZeRO stage 1, 1910.02054, section 5.1).

Parameters live in flat buffers laid out like the buckets of their gradients. The gradients' sums are shared out instead of
given to all: each replica gets its part of every bucket, updates that part of the parameters, and the parts are
collected, first those that the next forward needs first, while it may already run.

What an optimizer is given are the pieces of parameters that are in this replica's parts. A piece is a parameter of its own,
so that options, counts of steps and absent gradients stay those of the parameter it is a piece of.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.errors import PenstockError
from penstock.parallel.data.bucket import BucketEntry
from penstock.parallel.data.buckets import GradientBuckets
from penstock.parallel.data.layout import BUCKET_BYTES, FIRST_BUCKET_BYTES
from penstock.parallel.data.leftovers import Missing
from penstock.parallel.data.reducer import Handle, Reducer, part_of
from penstock.parallel.data.reduction_stream import ReductionStream
from penstock.parallel.data.shard_slice import ShardSlice, joined
from penstock.parallel.dtensor import gradient_dtype, local, move


class ShardedParameter(NamedTuple):
    """A parameter and what of it is updated here.

    Attributes:
        entry: its place in the buckets.
        piece: which elements, of the part that this process holds if the parameter is cut over others.
        own: those elements as a parameter of their own, which shares the whole one's memory; None if there are none.
        at: where they begin in this replica's part of the bucket.
    """

    entry: BucketEntry
    piece: ShardSlice
    own: nn.Parameter | None
    at: int


class Shards:
    """The parameters of a replica in flat buffers; every replica makes one at the same time.

    Args:
        parameters: (name, parameter) pairs; those that require no gradient are left out.
        reducer: this replica's end of the communicator.
        order, bucket_bytes, first_bucket_bytes, divisor, missing, reduce_dtype, groups, dynamic: as for `GradientBuckets`.

    Attributes:
        buckets: of the gradients.
        parts: one for each parameter.

    Raises:
        ConfigError: what `GradientBuckets` refuses.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, Tensor]],
        reducer: Reducer,
        *,
        order: Sequence[Tensor] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
        divisor: float | None = None,
        missing: Missing = "error",
        reduce_dtype: torch.dtype | None = None,
        groups: Mapping[Tensor, Hashable] | None = None,
        dynamic: bool = False,
    ) -> None:
        named = list(parameters)
        self.reducer = reducer
        self.buckets = GradientBuckets(
            named, reducer, order=order, bucket_bytes=bucket_bytes, first_bucket_bytes=first_bucket_bytes,
            divisor=divisor, missing=missing, reduce_dtype=reduce_dtype, rebuild=False, sharded=True, dynamic=dynamic,
            groups={p: (p.dtype, (groups or {}).get(p)) for _, p in named},
        )  # fmt: skip
        self._flats: list[Tensor] = []
        self._streams = [ReductionStream(b.plan.device) for b in self.buckets.buckets]
        self._coming: dict[int, Handle] = {}
        self._fresh = False
        by_index: dict[int, ShardedParameter] = {}
        for bucket in self.buckets.buckets:
            members = [self.buckets.entries[m] for m in bucket.plan.members]
            dtype = members[0].parameter.dtype
            flat = torch.zeros(bucket.plan.elements, dtype=dtype, device=bucket.plan.device)
            self._flats.append(flat)
            for entry, start in zip(members, bucket.plan.starts, strict=True):
                by_index[entry.index] = self._place(entry, flat, start)
        self.parts = [by_index[n] for n in range(len(self.buckets.entries))]
        self._part = {id(part.entry.parameter): part for part in self.parts}

    def _place(self, entry: BucketEntry, flat: Tensor, start: int) -> ShardedParameter:
        """Move a parameter into its bucket's buffer; `start` is where it begins there."""
        view = entry.view
        place = flat.as_strided(view.shape, view.stride(), view.storage_offset())
        place.copy_(local(entry.parameter).detach())
        move(entry.parameter, place)
        mine = part_of(flat, self.reducer.rank, self.reducer.size)
        begin = self.reducer.rank * mine.numel()
        at = min(max(0, start - begin), mine.numel())
        count = max(0, min(mine.numel(), start - begin + view.numel()) - at)
        piece = ShardSlice(tuple(view.shape), view.stride(), max(0, begin - start) if count else 0, count)
        own = None
        if count:
            own = nn.Parameter(mine[at : at + count])
            if hasattr(own, "grad_dtype"):
                own.grad_dtype = gradient_dtype(entry.parameter)
        return ShardedParameter(entry, piece, own, at)

    def part(self, parameter: Tensor) -> ShardedParameter | None:
        """What of a parameter is updated here; None if it is not among them."""
        return self._part.get(id(parameter))

    @property
    def fresh(self) -> bool:
        """Whether there are sums that have been neither used nor let go of."""
        return self._fresh

    def owned(self) -> list[nn.Parameter]:
        """All pieces of this replica."""
        return [part.own for part in self.parts if part.own is not None]

    def require_used(self) -> None:
        """Refuse to go on where the next backward would write over sums that nobody has used.

        Raises:
            PenstockError: there are such.
        """
        if self._fresh:
            raise PenstockError(
                "the last step's gradients are shared out and wait for the optimizer's step() or zero_grad(); to add up "
                "those of several steps, reduce them in the last one only"
            )

    def finish(self) -> None:
        """As `GradientBuckets.finish`; afterwards the pieces have gradients, and whole parameters have none.

        A piece of a parameter for which no replica had a gradient has none.
        """
        self.buckets.finish()
        rank, size = self.reducer.rank, self.reducer.size
        for entry, piece, own, at in self.parts:
            if own is not None:
                sums = part_of(self.buckets.buckets[entry.bucket].flat, rank, size)
                own.grad = None if entry.parameter.grad is None else sums[at : at + piece.count]
            entry.parameter.grad = None
        self._fresh = True

    def drop(self) -> None:
        """Let go of all gradients."""
        for part in self.parts:
            part.entry.parameter.grad = None
            if part.own is not None:
                part.own.grad = None
        self._fresh = False

    def collect(self) -> None:
        """After an update of the pieces: begin to fill in the others' parts of the parameters."""
        for number in reversed(range(len(self._flats))):  # the first layers' are in the last buckets
            stream, flat = self._streams[number], self._flats[number]
            stream.admit(flat, [stream.here()])
            with stream.inside():
                self._coming[number] = self.reducer.gather(flat)

    def wait(self, parameter: Tensor) -> None:
        """Until a parameter has its new value; others are ignored."""
        part = self._part.get(id(parameter))
        if part is not None:
            self._wait(part.entry.bucket)

    def wait_all(self) -> None:
        """Until every parameter has its new value."""
        for number in list(self._coming):
            self._wait(number)

    def waiter(self, parameters: Iterable[Tensor]) -> Callable[[], None]:
        """What waits for these parameters, at next to no cost where nothing is on its way."""
        found = {self._part[id(p)].entry.bucket for p in parameters if id(p) in self._part}
        numbers = sorted(found, reverse=True)

        def wait() -> None:
            for number in numbers if self._coming else ():
                self._wait(number)

        return wait

    def _wait(self, number: int) -> None:
        handle = self._coming.pop(number, None)
        if handle is not None:
            with self._streams[number].inside():
                handle.wait()
            self._streams[number].join()

    def join(
        self, entries: Callable[[ShardedParameter], Mapping[str, Any] | None], keep: bool = True
    ) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Make whole what every replica keeps for its pieces, a bucket at a time; every replica calls it.

        Args:
            entries: of a piece of this replica; None for nothing.
            keep: False only gives this replica's to the others.

        Yields:
            (parameter, entries), the tensors among them on the CPU, of the part that this process holds of a parameter that
            is cut; nothing for parameters no replica has any for.
        """
        for bucket in self.buckets.buckets:
            here = [self.parts[m] for m in bucket.plan.members]
            mine = {}
            for part in here:
                found = entries(part) if part.own is not None else None
                if found is not None:
                    mine[part.entry.index] = (part.piece, {k: _on_cpu(v) for k, v in found.items()})
            rows = self.reducer.share(mine)
            for part in here if keep else ():
                pieces = [row[part.entry.index] for row in rows if part.entry.index in row]
                if pieces:
                    yield part.entry.parameter, joined(pieces)


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value
