"""Parameters whose gradients, or whose values too, a replica holds in full for a part of a step only (ZeRO stages 2 and 3).

Parameters of one stage are in buckets. Each replica keeps its part of every bucket's values and summed gradients, and
updates it. `unshard` gathers a stage's values from the other replicas, `reshard` drops them, and `complete` sums its
gradients and drops all but this replica's part (see `penstock.schedule.residency`). Replicas call these in the same order.

A parameter without its values keeps its shape, but all its elements are one NaN (0 if it has whole numbers): what reads it
by mistake is not finite, which a step refuses, and a write into it is an error. What is written into values while they are
in memory, by layers or between steps, goes into this replica's part before they are dropped.

Sums of several reductions are added up in fp32 if gradients have 16 bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from penstock.base.errors import PenstockError, TransportError
from penstock.parallel.dtensor import gradient_dtype, local, set_local
from penstock.parallel.participant import Collective, CollectiveKind
from penstock.parallel.replicas import replica_checks
from penstock.parallel.replicas.bucket import BucketEntry, ReductionStream, bucket_order, make_slot
from penstock.parallel.replicas.buckets import FrozenParameters
from penstock.parallel.replicas.divided_gradient import DividedGradient
from penstock.parallel.replicas.layout import BucketPlan, plan_buckets
from penstock.parallel.replicas.reducer import GroupReducer, Handle, part_of
from penstock.parallel.replicas.replica_checks import StepReport
from penstock.parallel.replicas.shard_slice import ShardSlice
from penstock.parallel.replicas.shards import ShardedParameter, Shards, take_back


class StageBucket:
    """Parameters that are gathered together, and whose gradients are reduced together.

    Args:
        comes_and_goes: whether the values are in full only between `unshard` and `reshard`.

    Attributes:
        stage: stage that has them; None if several ranks or stages do.
        trains: whether they have gradients.
        part: this replica's part of the values.
        memory: number of the values' memory, which stays when it is released and allocated again.
        now: clock during a step, on CUDA of the stream that it is called in; None between steps.
        spans: by kind, moments of start and end of the step's collectives, in their order. A collective ends when it is
            waited for, if it was done before.
        total: this replica's part of the sums that are ready for the optimizer, or None.
    """

    def __init__(
        self,
        plan: BucketPlan,
        entries: Sequence[BucketEntry],
        reducer: GroupReducer,
        stage: int | None,
        comes_and_goes: bool,
    ) -> None:
        self.plan, self.entries, self.reducer, self.stage = plan, entries, reducer, stage
        parameter = entries[0].parameter
        self.trains = parameter.requires_grad
        self.total: Tensor | None = None
        self._stream = ReductionStream(plan.device)
        self.now: Callable[[], Any] | None = None
        self.spans: dict[CollectiveKind, list[tuple[Any, Any]]] = {"unshard": [], "reduce": []}
        self._coming: tuple[Handle, Any] | None = None
        self._reducing: tuple[Handle, Any] | None = None
        self._sums: Tensor | None = None
        # The buffer of gradients has memory during a reduction only.
        self._grads = torch.zeros(plan.elements, dtype=plan.dtype, device=plan.device)
        self._values = torch.zeros(plan.elements, dtype=parameter.dtype, device=plan.device)
        self._memory: list[Tensor] = []
        for entry, start in zip(entries, plan.starts, strict=True):
            entry.place(0, self._grads, start)
            view = entry.view
            memory = self._values.as_strided(view.shape, view.stride(), view.storage_offset())
            memory.copy_(local(entry.parameter).detach())
            set_local(entry.parameter, memory)
            self._memory.append(memory)
        _release(self._grads)
        self.memory = _memory_of(self._values)
        self._marked = self._values.is_floating_point() or self._values.is_complex()
        self._absent = torch.full(
            (),
            float("nan") if self._marked else 0,
            dtype=self._values.dtype,
            device=plan.device,
        )
        self._versions: list[int] = []  # of parameters without their values
        self.comes_and_goes, self.full = comes_and_goes, True
        own = part_of(self._values, reducer.rank, reducer.size)
        self.part = own.clone() if comes_and_goes else own

    def piece(self, elements: ShardSlice, start: int, buffer: Tensor) -> Tensor:
        """Return a shard's elements of a buffer of this replica's part."""
        begin = start + elements.first - self.reducer.rank * len(self.part)
        return buffer[begin : begin + elements.count]

    def unshard(self) -> None:
        """Start to gather the values."""
        if self.full:
            return
        self.full = True
        _allocate(self._values)
        part_of(self._values, self.reducer.rank, self.reducer.size).copy_(self.part)
        for entry, memory in zip(self.entries, self._memory, strict=True):
            set_local(entry.parameter, memory)
        self.collect()

    def collect(self) -> None:
        """Start to gather values that are in memory, after an update of this replica's part."""
        self._coming = self._start(self.reducer.all_gather, self._values)

    def wait(self) -> None:
        """Wait for the values."""
        begun, self._coming = self._coming, None
        if begun is not None:
            self._end("unshard", *begun)

    def reshard(self, keep: bool = True) -> None:
        """Drop the values but this replica's part.

        Args:
            keep: whether this replica's part takes over what was written (default True); False if the part is newer.
        """
        if not self.full or not self.comes_and_goes:
            return
        self.wait()
        if keep:
            self.written(counted=False)
        self._drop_values()
        _release(self._values)
        self.full = False

    def _drop_values(self) -> None:
        for entry in self.entries:
            set_local(entry.parameter, self._absent.expand(local(entry.parameter).shape))
        self._versions = [entry.parameter._version for entry in self.entries]

    def written(self, counted: bool = True) -> None:
        """Take over this replica's part of values that were written; see `take_back`.

        Raises:
            PenstockError: if a parameter was written while its values were not in memory.
        """
        if not self.full:
            self._require_absent()
            return
        for entry, memory in zip(self.entries, self._memory, strict=True):
            take_back(entry, memory, counted)
        if self.comes_and_goes:
            self.part.copy_(part_of(self._values, self.reducer.rank, self.reducer.size))

    def _require_absent(self) -> None:
        absent, pointer = self._absent, self._absent.data_ptr()
        # A write through `.data` is not counted; what it writes into is looked at where that waits for no device.
        overwritten = absent.device.type == "cpu" and bool((absent == absent).item()) and self._marked
        for entry, version in zip(self.entries, self._versions, strict=True):
            parameter = entry.parameter
            moved = parameter.numel() and local(parameter).data_ptr() != pointer
            if overwritten or moved or parameter._version != version:
                self._absent.fill_(float("nan") if self._marked else 0)
                self._drop_values()
                which = f"{entry.name} or another" if overwritten else entry.name
                raise PenstockError(
                    f"parameter {which} was written while its values were not in memory (shard='weights'); call "
                    "pipe.gather_weights() on all ranks first. What was written is dropped"
                )

    def reduce(self) -> None:
        """Start to sum the gradients, which leave their parameters."""
        self.settle()
        _allocate(self._grads)
        self._grads.zero_()
        for entry in self.entries:
            if entry.parameter.grad is not None:
                entry.view.copy_(entry.local_grad(entry.parameter.grad))
                entry.parameter.grad = None
                entry.seen += 1
        self._reducing = self._start(self.reducer.reduce_scatter, self._grads)

    def settle(self) -> None:
        """Wait for the sums, and add this replica's part to those of earlier reductions."""
        begun, self._reducing = self._reducing, None
        if begun is None:
            return
        self._end("reduce", *begun)
        part = part_of(self._grads, self.reducer.rank, self.reducer.size)
        if self._sums is None:
            exact = part.dtype if part.dtype.itemsize > 2 else torch.float32
            self._sums = part.to(exact, copy=True)
        else:
            self._sums += part
        _release(self._grads)

    def _start(self, collective: Callable[[Tensor], Handle], flat: Tensor) -> tuple[Handle, Any]:
        """Start a collective, and return it and the moment."""
        self._stream.wait_for(flat, [self._stream.compute_stream()])
        with self._stream.use():
            moment = None if self.now is None else self.now()
            return collective(flat), moment

    def _end(self, kind: CollectiveKind, handle: Handle, start: Any) -> None:
        """Wait for a collective."""
        with self._stream.use():
            handle.wait()
            if start is not None and self.now is not None:
                self.spans[kind].append((start, self.now()))
        self._stream.join()

    def finish(self) -> None:
        """Make `total` of the sums so far."""
        self.settle()
        assert self._sums is not None, "reduced in this step"
        self.total = self._sums.to(self.plan.dtype)

    def drop(self) -> None:
        """Drop the gradients."""
        self._sums = self.total = None
        for entry in self.entries:
            entry.parameter.grad = None
            entry.seen = 0

    def drop_piece(self, elements: ShardSlice, start: int) -> None:
        """Drop a shard's elements of the sums."""
        if self._sums is not None:
            self.piece(elements, start, self._sums).zero_()

    @property
    def has_sums(self) -> bool:
        """True if there are sums, to which those of the next reduction are added."""
        return self._sums is not None

    def abandon(self) -> None:
        """Forget a reduction under way."""
        if self._reducing is not None:
            self._reducing = None
            self._stream.join()

    @property
    def bytes(self) -> int:
        """Bytes of values and gradients that this replica has in memory now."""
        tensors = {self._values.untyped_storage(), self._grads.untyped_storage(), self.part.untyped_storage()}
        tensors |= {t.untyped_storage() for t in (self._sums, self.total) if t is not None}
        grads = [entry.parameter.grad for entry in self.entries]
        grads = [grad for grad in grads if not isinstance(grad, DividedGradient)]  # which has no memory
        sizes = {storage.data_ptr(): storage.nbytes() for storage in tensors if storage.nbytes()}
        return sum(sizes.values()) + sum(local(g).nbytes for g in grads if g is not None)


class ResidentShards(Shards):
    """Shards of parameters that come and go; every replica makes them at the same time.

    Args:
        stage_of: parameter → stage that has it; a parameter that several ranks or stages have is not in it, always in full,
            and its gradients are reduced by `finish`.
        weights: whether the values come and go, and not the gradients alone.
        groups: parameter → key; only parameters of equal keys share a bucket.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, Tensor]],
        reducer: GroupReducer,
        *,
        stage_of: Mapping[Tensor, int],
        weights: bool,
        groups: Mapping[Tensor, Hashable],
        bucket_bytes: int,
    ) -> None:
        named = list(parameters)
        self._reducer = reducer
        self._frozen = FrozenParameters(named)
        replica_checks.require_equal_models(reducer, named)
        entries = [BucketEntry(name, p, n) for n, (name, p) in enumerate(named)]
        slots = [
            make_slot(p, (stage_of.get(p, -1), p.dtype, p.requires_grad, groups.get(p)), None, reducer.size)
            for _, p in named
        ]
        self.buckets: list[StageBucket] = []
        by_index: dict[int, ShardedParameter] = {}
        self._place: dict[int, tuple[StageBucket, int]] = {}
        with torch.no_grad():
            for plan in plan_buckets(slots, bucket_order(entries), bucket_bytes, bucket_bytes):
                members = [entries[n] for n in plan.members]
                stage = stage_of.get(members[0].parameter)
                bucket = StageBucket(plan, members, reducer, stage, weights and stage is not None)
                self.buckets.append(bucket)
                for entry, start in zip(members, plan.starts, strict=True):
                    self._place[entry.index] = bucket, start
                    by_index[entry.index] = _shard(bucket, entry, start)
                bucket.reshard()
        super().__init__([by_index[n] for n in range(len(entries))], self.buckets)
        self._of_stage: dict[int | None, list[StageBucket]] = {}
        for bucket in self.buckets:
            self._of_stage.setdefault(bucket.stage, []).append(bucket)
        self.sharded_weights = weights
        self._memories = {bucket.memory for bucket in self.buckets if bucket.comes_and_goes}
        self._left: deque[Collective] = deque()
        self._dropped: set[int] = set()
        self._carried = 0
        self._step = 0
        self._active = False

    def begin(self, step: int, collectives: Iterable[Collective], now: Callable[[], Any]) -> None:
        """Begin a step, whose calls of `unshard` and `complete` are given in their order, with a clock for its record."""
        self._step, self._left, self._active = step, deque(collectives), True
        for bucket in self.buckets:
            bucket.now = now
            for spans in bucket.spans.values():
                spans.clear()
        kept = [b.has_sums and e.index not in self._dropped for b in self.buckets for e in b.entries]
        self._carried = replica_checks.digest(bytes(kept)) if any(kept) else 0
        self._dropped.clear()
        # The same on every replica, whatever was read since the last step.
        for bucket in self.buckets:
            bucket.reshard()

    def stop_clock(self) -> None:
        """End the record of the step's collectives: what the buckets gather from now on is not the step's."""
        for bucket in self.buckets:
            bucket.now = None

    def unshard(self, stage: int) -> None:
        """Start to gather a stage's values."""
        self._next("unshard", stage)
        for bucket in self._of_stage.get(stage, ()):
            bucket.unshard()

    def reshard(self, stage: int) -> None:
        """Drop a stage's values."""
        for bucket in self._of_stage.get(stage, ()):
            bucket.reshard()

    def complete(self, stage: int) -> None:
        """Start to sum a stage's gradients."""
        self._next("reduce", stage)
        self._reduce(stage)

    def _next(self, kind: str, stage: int) -> None:
        awaited = self._left.popleft()
        assert awaited == (kind, stage), f"{kind} {stage} comes in place of {awaited}"

    def _reduce(self, stage: int | None) -> None:
        for bucket in self._of_stage.get(stage, ()):
            if bucket.trains:
                bucket.reduce()

    def settle(self) -> None:
        """Wait for the reductions so far, and drop what they have summed but this replica's part."""
        for bucket in self.buckets:
            bucket.settle()

    def come_and_go(self, tensor: Tensor) -> bool:
        """Return whether the elements of a tensor are values that come and go."""
        return tensor.layout is torch.strided and _memory_of(local(tensor)) in self._memories

    def wait(self, stage: int) -> None:
        """Wait for a stage's values."""
        for bucket in self._of_stage.get(stage, ()):
            bucket.wait()

    def waiter(self, parameters: Iterable[Tensor]) -> Callable[[], None]:
        """Return a function that waits for the values of these parameters."""
        places = [self._place[self._by_id[id(p)].entry.index] for p in parameters if id(p) in self._by_id]
        buckets = list(dict.fromkeys(bucket for bucket, _ in places))

        def wait() -> None:
            for bucket in buckets:
                bucket.wait()

        return wait

    def finish(self) -> None:
        try:
            self._reduce(None)
            absent = [e.index for b in self.buckets if b.trains for e in b.entries if not e.seen]
        except Exception as error:
            self.abandon(error)
            raise
        try:
            self._give(absent)
        finally:
            self.reset()

    def _give(self, absent: list[int]) -> None:
        report = StepReport(self._step, 0, len(absent), 0, self._frozen.change(), self._carried)
        reports = replica_checks.exchange_reports(self._reducer, report)
        for bucket in self.buckets:
            if bucket.trains:
                bucket.finish()
        told = reports()
        replica_checks.require_same_step(self._reducer, told)
        replica_checks.require_same_sums(told)
        if any(report.frozen for report in told):
            self._frozen.require_same(self._reducer, [report.frozen for report in told], True)
        nowhere: set[int] = set()
        if any(report.absent for report in told):
            missing = set(absent)
            rows = self._reducer.exchange([int(n in missing) for n in range(len(self.sharded))])()
            nowhere = {n for n in missing if all(row[n] for row in rows)}
        for entry, elements, shard in self.sharded:
            if shard is not None:
                bucket, start = self._place[entry.index]
                has = bucket.total is not None and entry.index not in nowhere
                shard.grad = (
                    bucket.piece(elements, start, bucket.total) if has and bucket.total is not None else None
                )

    def abandon(self, error: BaseException | None) -> None:
        """End a step that failed on this replica: do what the others wait for, then tell them unless `error` is None."""
        if not self._active:
            return
        # If the communicator itself failed, or fails now, the others will notice by themselves.
        with suppress(TransportError):
            if not isinstance(error, TransportError):
                self._do_rest(error)
        self.reset()

    def _do_rest(self, error: BaseException | None) -> None:
        for bucket in self.buckets:
            bucket.reshard()
        for kind, stage in self._left:
            if kind == "unshard":
                for bucket in self._of_stage.get(stage, ()):
                    bucket.unshard()
                    bucket.reshard()
            else:
                self._reduce(stage)
        if error is None:
            return
        self._reduce(None)
        reports = replica_checks.exchange_reports(self._reducer, StepReport(self._step, failed=1))
        for bucket in self.buckets:
            bucket.settle()
        failed = [r for r, report in enumerate(reports()) if report.failed]
        replica_checks.raise_failure(self._reducer, failed, f"{type(error).__name__}: {error}")

    def reset(self) -> None:
        """Reset the state of this step on this replica only."""
        self._active = False
        self._left.clear()
        for bucket in self.buckets:
            bucket.abandon()

    def require_used(self) -> None:
        self.changes()  # the sums that are left are added up with the next ones, as PyTorch adds gradients

    def drop(self) -> None:
        for bucket in self.buckets:
            bucket.drop()
        for shard in self.owned():
            shard.grad = None
        self._marks.clear()

    def _drop_one(self, each: ShardedParameter) -> None:
        super()._drop_one(each)
        bucket, start = self._place[each.entry.index]
        if each.shard is not None:
            bucket.drop_piece(each.slice, start)
        each.entry.seen = 0
        self._dropped.add(each.entry.index)

    def collect(self) -> None:
        for bucket in self.buckets:
            if bucket.comes_and_goes:
                bucket.reshard(keep=False)
            elif bucket.trains:
                bucket.collect()

    def wait_all(self) -> None:
        for bucket in self.buckets:
            bucket.wait()

    def gather_all(self) -> None:
        for bucket in self.buckets:
            bucket.unshard()
        self.wait_all()

    def in_memory(self, parameter: Tensor) -> bool:
        each = self.find(parameter)
        return each is None or self._place[each.entry.index][0].full

    def written(self) -> None:
        for bucket in self.buckets:
            bucket.written()

    def set_timeout(self, seconds: float) -> None:
        """Set the timeout in seconds of the collectives that are started from now on."""
        self._reducer.set_timeout(seconds)


def _shard(bucket: StageBucket, entry: BucketEntry, start: int) -> ShardedParameter:
    size = len(bucket.part)
    begin = bucket.reducer.rank * size
    first = max(0, begin - start)
    count = max(0, min(entry.view.numel(), begin + size - start) - first)
    elements = ShardSlice(tuple(entry.view.shape), entry.view.stride(), first if count else 0, count)
    shard = None
    if count and bucket.trains:
        shard = nn.Parameter(bucket.piece(elements, start, bucket.part))
        shard.grad_dtype = gradient_dtype(entry.parameter)
    return ShardedParameter(entry, elements, shard)


def _memory_of(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata  # as torch's own weak references to storages
    return number


def _allocate(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())


def _release(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(0)
