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
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from penstock.base.errors import TransportError
from penstock.parallel.dtensor import local
from penstock.parallel.participant import Collective
from penstock.parallel.replicas import replica_checks
from penstock.parallel.replicas.bucket import BucketEntry, bucket_order, make_slot
from penstock.parallel.replicas.buckets import FrozenParameters
from penstock.parallel.replicas.layout import plan_buckets
from penstock.parallel.replicas.reducer import GroupReducer
from penstock.parallel.replicas.replica_checks import StepReport
from penstock.parallel.replicas.shards import ShardedParameter, Shards
from penstock.parallel.replicas.stage_bucket import StageBucket, memory_of


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
                    by_index[entry.index] = bucket.shard_of(entry, start)
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
        return tensor.layout is torch.strided and memory_of(local(tensor)) in self._memories

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
