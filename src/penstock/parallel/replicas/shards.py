"""Parameters whose update is divided among the replicas (ZeRO stage 1, 1910.02054, section 5.1).

Parameters are in flat buffers laid out like the buckets of their gradients. The gradients are reduce-scattered: each
replica gets the sums of its part of every bucket, and updates that part of the parameters. Then the parts are all-gathered,
in the order in which the next forward needs them, while it may already run.

An optimizer that needs whole matrices, such as Muon, gets them from buckets that one replica owns: their sums are reduced to
the owner, which updates these parameters and broadcasts them.

The optimizer gets the shards of parameters that are in this replica's parts. Each shard is a separate parameter, so that
options, step counts and absent gradients are the same as without shards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from penstock.base.errors import PenstockError
from penstock.parallel.dtensor import from_local_like, gradient_dtype, local, set_local
from penstock.parallel.replicas.bucket import Bucket, BucketEntry, ReductionStream
from penstock.parallel.replicas.buckets import GradientBuckets
from penstock.parallel.replicas.divided_gradient import (
    Change,
    DividedGradient,
    require_not_replaced,
)
from penstock.parallel.replicas.layout import BucketPlan
from penstock.parallel.replicas.reducer import GroupReducer, Handle
from penstock.parallel.replicas.shard_slice import ShardSlice, join_shards


class ShardedParameter(NamedTuple):
    """A parameter and the shard of it that this replica updates.

    Attributes:
        slice: elements of the shard, in the local tensor if the parameter is a DTensor.
        shard: parameter of these elements, which shares the full one's memory; None if there are none.
    """

    entry: BucketEntry
    slice: ShardSlice
    shard: nn.Parameter | None


def choose_owners(
    parameters: Iterable[Tensor], groups: Mapping[Tensor, Hashable], size: int
) -> dict[Tensor, int]:
    """Return the replica that updates each of some whole parameters: the costliest first, to the one with the least so far.

    Args:
        groups: parameter → key of a group that other ranks hold, too, and whose owners must not depend on other groups.
    """
    by_group: dict[Hashable, list[Tensor]] = {}
    for parameter in parameters:
        by_group.setdefault(groups.get(parameter), []).append(parameter)
    alone = by_group.pop(None, [])
    owners: dict[Tensor, int] = {}
    loads = [0] * size
    for members in (*by_group.values(), alone):
        counted = loads if members is alone else [0] * size
        for parameter in sorted(members, key=_cost, reverse=True):
            owner = owners[parameter] = counted.index(min(counted))
            counted[owner] += _cost(parameter)
        if counted is not loads:
            loads = [sum(pair) for pair in zip(loads, counted, strict=True)]
    return owners


def _cost(parameter: Tensor) -> int:
    """Return what an update of a matrix costs: rows x columns x the smaller of both, as Muon's products with itself."""
    return parameter.numel() * (min(parameter.shape) if parameter.dim() > 1 else 1)


class SharedBucket(Protocol):
    """Parameters that are divided among the replicas together.

    Attributes:
        plan: their places in a buffer.
        reducer: communicator of the replicas.
    """

    @property
    def plan(self) -> BucketPlan: ...

    @property
    def reducer(self) -> GroupReducer: ...


class Shards(ABC):
    """Parameters of a replica, with the shards of them that it updates.

    Attributes:
        sharded: every parameter with its shard.
    """

    def __init__(self, sharded: Sequence[ShardedParameter], buckets: Sequence[SharedBucket]) -> None:
        self.sharded = sharded
        self._shared_buckets = buckets
        self._by_id = {id(each.entry.parameter): each for each in sharded}
        self._marks: dict[int, DividedGradient] = {}  # by parameter; empty while a step runs

    def find(self, parameter: Tensor) -> ShardedParameter | None:
        """Return a parameter's entry in `sharded`; None if it has none."""
        return self._by_id.get(id(parameter))

    def owned(self) -> list[nn.Parameter]:
        return [sharded.shard for sharded in self.sharded if sharded.shard is not None]

    def mark(self) -> None:
        """Put a `DividedGradient` into ``.grad`` of the parameters whose sums are in the shards, after a step."""
        for entry, _, shard in self.sharded:
            parameter, absent = entry.parameter, shard is not None and shard.grad is None
            if parameter.requires_grad and parameter.grad is None and not absent:
                parameter.grad = self._marks[entry.index] = DividedGradient(parameter, entry.name)

    def unmark(self) -> None:
        """Take the marks away, as a step needs ``.grad``."""
        for entry, *_ in self.sharded:
            if isinstance(entry.parameter.grad, DividedGradient):
                entry.parameter.grad = None
        self._marks.clear()

    def changes(self) -> dict[str, Change]:
        """Return by name which gradients the program has changed since the last step; drop those that it has dropped."""
        changes: dict[str, Change] = {}
        for each in self.sharded:
            grad, mark = each.entry.parameter.grad, self._marks.get(each.entry.index)
            if grad is None and mark is not None:
                self._drop_one(each)
                changes[each.entry.name] = "dropped"
            elif grad is not mark and each.entry.parameter.requires_grad:
                changes[each.entry.name] = "replaced"
        return changes

    def _drop_one(self, each: ShardedParameter) -> None:
        """Drop the gradient of one parameter."""
        if each.shard is not None:
            each.shard.grad = None

    def require_kept(self) -> None:
        """Raise if the next step would not see gradients that the program has put in place of divided ones."""
        if self._marks:
            changes = self.changes()
            try:
                require_not_replaced(changes)
            except PenstockError:
                self.drop()  # since the step has begun for the others, whose sums are taken
                raise

    @abstractmethod
    def require_used(self) -> None:
        """Check that the next backward would not overwrite unused reduced gradients."""

    @abstractmethod
    def finish(self) -> None:
        """End the backward of a step: the shards have their gradients then, if any replica has one."""

    @abstractmethod
    def drop(self) -> None:
        """Drop all gradients."""

    @abstractmethod
    def collect(self) -> None:
        """Start to gather the other replicas' parts of the parameters, after an update of the shards."""

    @abstractmethod
    def wait_all(self) -> None:
        """Wait for all values that are being gathered."""

    def gather_all(self) -> None:
        """Have all values in memory until the next step or update; every replica calls it."""
        self.wait_all()

    @abstractmethod
    def written(self) -> None:
        """Take over values that were written into parameters, or that a program gave them by ``p.data = ...``."""

    sharded_weights = False
    """True if this replica keeps only a part of the values between steps."""

    def in_memory(self, parameter: Tensor) -> bool:
        """Return whether all values of a parameter are in memory."""
        return True

    def join(
        self, entries: Callable[[ShardedParameter], Mapping[str, Any] | None], keep: bool = True
    ) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Join the optimizer state of all shards, a bucket at a time; every replica calls it.

        Args:
            keep: whether to yield the joined state (default True); False only sends this replica's state to the others.

        Yields:
            (parameter, state entries), with tensors on the CPU, and of the local shape if the parameter is a DTensor;
            nothing for a parameter without state on any replica.
        """
        for bucket in self._shared_buckets:
            members = [self.sharded[m] for m in bucket.plan.members]
            local_states = {}
            for sharded in members:
                state = entries(sharded) if sharded.shard is not None else None
                if state is not None:
                    cpu_state = {k: _on_cpu(v) for k, v in state.items()}
                    local_states[sharded.entry.index] = (sharded.slice, cpu_state)
            rows = bucket.reducer.gather(local_states)
            for sharded in members if keep else ():
                shards = [row[sharded.entry.index] for row in rows if sharded.entry.index in row]
                if shards:
                    yield sharded.entry.parameter, join_shards(shards)


class OptimizerShards(Shards):
    """Shards of parameters whose values every replica has; every replica makes them at the same time.

    Args:
        whole: those of the parameters that one replica updates as a whole.
        reducers: communicators of experts; see `GradientBuckets`.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, Tensor]],
        reducer: GroupReducer,
        *,
        groups: Mapping[Tensor, Hashable],
        whole: Collection[Tensor] = (),
        reducers: Mapping[Tensor, GroupReducer] | None = None,
        **options: int,
    ) -> None:
        named = list(parameters)
        # A parameter has the place of its gradient, so buckets have parameters of one dtype.
        by_dtype = {p: (p.dtype, groups.get(p)) for _, p in named}
        kept = set(whole)
        owners = choose_owners((p for _, p in named if p in kept), groups, reducer.size)
        self.buckets = GradientBuckets(
            named, reducer, sharded=True, groups=by_dtype, owners=owners, reducers=reducers, **options
        )
        self._flats: list[Tensor] = []
        self._memory: dict[int, Tensor] = {}  # of the values, by parameter
        self._streams = [ReductionStream(b.plan.device) for b in self.buckets.buckets]
        self._coming: dict[int, Handle] = {}  # all-gathers in progress, by bucket
        self._unused_sums = False
        by_index: dict[int, ShardedParameter] = {}
        for bucket in self.buckets.buckets:
            members = [self.buckets.entries[m] for m in bucket.plan.members]
            dtype = members[0].parameter.dtype
            flat = torch.zeros(bucket.plan.elements, dtype=dtype, device=bucket.plan.device)
            self._flats.append(flat)
            for entry, start in zip(members, bucket.plan.starts, strict=True):
                by_index[entry.index] = self._place(entry, flat, start, bucket)
        super().__init__([by_index[n] for n in range(len(by_index))], self.buckets.buckets)

    def _place(self, entry: BucketEntry, flat: Tensor, start: int, bucket: Bucket) -> ShardedParameter:
        """Move a parameter into its bucket's buffer at offset `start`, and make its shard."""
        view = entry.view
        memory = flat.as_strided(view.shape, view.stride(), view.storage_offset())
        memory.copy_(local(entry.parameter).detach())
        set_local(entry.parameter, memory)
        self._memory[entry.index] = memory
        rank, owner = bucket.reducer.rank, bucket.plan.owner
        each = flat.numel() // bucket.reducer.size
        begin, end = rank * each, (rank + 1) * each
        if owner is not None:
            begin, end = 0, flat.numel() if owner == rank else 0
        elements = ShardSlice.between(view, begin - start, end - start, owner is not None)
        shard = None
        if elements.count:
            shard = nn.Parameter(_piece(entry, elements, memory))
            shard.grad_dtype = gradient_dtype(entry.parameter)
        return ShardedParameter(entry, elements, shard)

    def require_used(self) -> None:
        """Check that the next backward would not overwrite unused reduced gradients."""
        if self._marks and list(self.changes().values()) == ["dropped"] * len(self._marks):
            self._unused_sums = False
        if self._unused_sums:
            raise PenstockError(
                "the last step's gradients are divided among the replicas, and wait for the optimizer's step() or "
                "zero_grad(); to accumulate over several steps, reduce gradients in the last one only"
            )

    def finish(self) -> None:
        """Call `GradientBuckets.finish`, then move the gradients from the full parameters to the shards.

        If no replica had a gradient for a parameter, its shards get none.
        """
        self.buckets.finish()
        for entry, elements, shard in self.sharded:
            if shard is not None:
                shard.grad = None if entry.parameter.grad is None else _piece(entry, elements, entry.view)
            entry.parameter.grad = None
        self._unused_sums = True

    def drop(self) -> None:
        for sharded in self.sharded:
            sharded.entry.parameter.grad = None
            if sharded.shard is not None:
                sharded.shard.grad = None
        self._marks.clear()
        self._unused_sums = False

    def collect(self) -> None:
        """Start to gather the other replicas' parts of the parameters, after an update of the shards."""
        for number in reversed(range(len(self._flats))):  # the last buckets have the first layers
            stream, flat = self._streams[number], self._flats[number]
            stream.wait_for(flat, [stream.compute_stream()])
            with stream.use():
                bucket = self.buckets.buckets[number]
                owner, reducer = bucket.plan.owner, bucket.reducer
                self._coming[number] = (
                    reducer.all_gather(flat) if owner is None else reducer.broadcast(flat, owner)
                )

    def wait_all(self) -> None:
        for number in list(self._coming):
            self._wait(number)

    def waiter(self, parameters: Iterable[Tensor]) -> Callable[[], None]:
        """Return a function that waits for these parameters, and costs next to nothing if none is being gathered."""
        buckets = {self._by_id[id(p)].entry.bucket for p in parameters if id(p) in self._by_id}
        numbers = sorted(buckets, reverse=True)

        def wait() -> None:
            for number in numbers if self._coming else ():
                self._wait(number)

        return wait

    def written(self) -> None:
        for entry, _, _ in self.sharded:
            take_back(entry, self._memory[entry.index], counted=True)  # which the shards share

    def _wait(self, number: int) -> None:
        handle = self._coming.pop(number, None)
        if handle is not None:
            with self._streams[number].use():
                handle.wait()
            self._streams[number].join()


def take_back(entry: BucketEntry, memory: Tensor, counted: bool) -> None:
    """Give a parameter its place back, with the values of other memory that it was given; a write of it if `counted`."""
    values = local(entry.parameter).detach()
    if values.data_ptr() == memory.data_ptr() or not memory.numel():
        return
    if (values.shape, values.dtype, values.device) != (memory.shape, memory.dtype, memory.device):
        raise PenstockError(
            f"parameter {entry.name} was {memory.dtype} of shape {tuple(memory.shape)} on {memory.device} when the pipeline "
            f"divided it among the replicas, and was made {values.dtype} of shape {tuple(values.shape)} on "
            f"{values.device}; do that before the Pipeline and its optimizer are built"
        )
    set_local(entry.parameter, memory)
    (local(entry.parameter.detach()) if counted else memory).copy_(values)


def _piece(entry: BucketEntry, elements: ShardSlice, memory: Tensor) -> Tensor:
    """Return the slice of a tensor like a parameter's local one; one that is whole is distributed as the parameter is."""
    piece = elements.of(memory)
    return from_local_like(piece, entry.parameter) if elements.whole else piece


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value
