"""Reduction of the replicas' gradients while the backward still runs.

Gradients are in flat buffers, the buckets; each parameter's ``.grad`` is a view of its place. When the last gradient of a
bucket is complete, its reduction starts, in the order of the buckets, while the backward continues. A step shows the order
in which gradients become complete; all replicas then make their buckets in this order (as DDP: 2006.15704, 3.2).

The caller says after how many contributions a gradient is complete, so that a split backward, many microbatches and weights
used in several stages are the same case. At the end of each step all replicas together handle absent gradients, gradients
that came too late for their bucket, and a replica that failed or is at another step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import torch
from torch import Tensor

from penstock.base.errors import PenstockError, ReplicaError, TransportError
from penstock.parallel.dtensor import from_local_like, gradient_dtype, local, redistribute_grad
from penstock.parallel.replicas import replica_checks
from penstock.parallel.replicas.bucket import (
    Bucket,
    BucketEntry,
    ReductionStream,
    bucket_order,
    make_slot,
    require_dense,
)
from penstock.parallel.replicas.layout import BUCKET_BYTES, FIRST_BUCKET_BYTES, Slot, plan_buckets
from penstock.parallel.replicas.reducer import GroupReducer
from penstock.parallel.replicas.replica_checks import StepReport, digest


class GradientBuckets:
    """The gradients of a replica's parameters, in buckets; every replica makes one at the same time.

    A parameter may get more gradients than announced, and may begin or cease to require one: gradients that fit no bucket
    are summed at the end of the step. Buckets that are not `sharded` are made again if ``requires_grad`` is changed for two
    steps. A replica without a gradient contributes zeros; a parameter that has none on any replica keeps its ``.grad``.

    Args:
        sharded: whether each replica gets only its part of the sums, as with `OptimizerShards` (default False).
        groups: parameter → key; only parameters of equal keys share a bucket.
        owners: parameter → replica that gets the whole sum, if `sharded`; each gets a part of the others'.
        reducers: parameter → communicator over which its gradient is summed, for experts, which only some of the processes
            have; all others use `reducer`.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, Tensor]],
        reducer: GroupReducer,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
        sharded: bool = False,
        groups: Mapping[Tensor, Hashable] | None = None,
        owners: Mapping[Tensor, int] | None = None,
        reducers: Mapping[Tensor, GroupReducer] | None = None,
    ) -> None:
        self.reducer = reducer
        self._reducers = reducers or {}
        self.sharded = sharded
        self._bytes = (bucket_bytes, first_bucket_bytes)
        self._frozen = FrozenParameters(list(parameters))
        self._entry: dict[int, BucketEntry] = {}
        self._make_entries()
        for one in dict.fromkeys([reducer, *self._reducers.values()]):
            alike = [e for e in self.entries if self.reducer_of(e.parameter) is one]
            replica_checks.require_equal_models(one, [(e.name, e.parameter) for e in alike])
        self._groups, self._owners = groups or {}, owners or {}
        devices = {local(p).device for _, p in self._frozen.known}
        self._streams = {device: ReductionStream(device) for device in devices}
        self._next_order: list[int] | None = None
        self.buckets: list[Bucket] = []
        self._build(bucket_order(self.entries))
        self._seen_order: list[int] = []
        self._started = 0
        self._active = False
        self._accumulating = False
        self._prescaled = False
        self._step = 0
        # Hooks run in autograd's threads, `ready` in the rank's. Reentrant: `_on_grad` calls `_mark_ready` within it.
        self._lock = threading.RLock()
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def _make_entries(self) -> None:
        """Make an entry for each parameter that requires a gradient now, or keep the one it has."""
        self.entries = [
            self._entry.get(id(p)) or BucketEntry(name, p, 0) for name, p in self._frozen.record()
        ]
        for n, entry in enumerate(self.entries):
            entry.index = n
        self._entry = {id(e.parameter): e for e in self.entries}

    def reducer_of(self, parameter: Tensor) -> GroupReducer:
        """Return the communicator over which a parameter's gradient is summed."""
        return self._reducers.get(parameter, self.reducer)

    def set_timeout(self, seconds: float) -> None:
        """Set the timeout in seconds of the collectives that are started from now on."""
        for reducer in (self.reducer, *self._reducers.values()):
            reducer.set_timeout(seconds)

    def attach(self) -> None:
        """Register hooks on the parameters: each gradient that autograd accumulates is one contribution."""
        for entry in () if self._hooks else self.entries:
            hook = partial(self._on_grad, entry)
            self._hooks.append(entry.parameter.register_post_accumulate_grad_hook(hook))

    def detach(self) -> None:
        """Remove the hooks of `attach`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def begin(self, contributions: Mapping[Tensor, int], step: int) -> None:
        """Begin a step.

        Args:
            contributions: number of gradients that make each parameter complete.
        """
        assert not self._active, "the last step was finished"
        if self._next_order is not None:
            self._build(self._next_order)
            self._next_order = None
        self._active = True
        self._step = step
        self._started = 0
        self._seen_order.clear()
        for entry in self.entries:
            entry.expected = contributions[entry.parameter]
        self._prescale_reduced()

    def ready(self, parameter: Tensor) -> None:
        """Mark a parameter's gradient as complete; a full bucket starts as soon as those before it have.

        Parameters that are not in any bucket are ignored.
        """
        entry = self._entry.get(id(parameter))
        if entry is not None:
            entry.seen += 1
            self._mark_ready(entry)

    def finish(self) -> None:
        """End the step: every gradient is then the replicas' sum. On CUDA the host does not wait for it."""
        try:
            absent = self._complete()
            late = _find_late(self._frozen.known, self._entry)
        except PenstockError as error:
            self.abandon(error)
            raise
        try:
            change = self._frozen.change()
            report = StepReport(self._step, 0, len(absent), len(late), change)
            # Started before the wait for the buckets, so that the exchange overlaps with their reductions.
            reports = replica_checks.exchange_reports(self.reducer, report)
            for bucket in self.buckets:
                bucket.wait()
            self._resolve(reports(), absent, late)
            if self._frozen.is_repeated(change) and not self.sharded:
                self._remake()
        finally:
            self.reset()

    def abandon(self, error: BaseException) -> None:
        """End a step that failed on this replica; the others do not wait, but raise `PeerError` with its message.

        The gradients of this step are invalid on every replica.
        """
        if not self._active:
            return
        # If the communicator itself failed, or fails now, the others will notice by themselves.
        with suppress(TransportError):
            if not isinstance(error, TransportError):
                # The replicas that did not fail start these collectives; without this one's part they would wait forever.
                for bucket in self.buckets[self._started :]:
                    bucket.start()
                    self._started += 1
                reports = replica_checks.exchange_reports(self.reducer, StepReport(self._step, failed=1))
                for bucket in self.buckets:
                    bucket.wait()
                failed = [r for r, report in enumerate(reports()) if report.failed]
                replica_checks.raise_failure(self.reducer, failed, f"{type(error).__name__}: {error}")
        self.reset()

    def reset(self) -> None:
        """Reset the state of this step on this replica only; gradients do not change."""
        for bucket in self.buckets:
            bucket.drop()
        for entry in self.entries:
            if entry.ready:
                entry.parameter.grad = entry.gradient
            entry.seen = entry.counted = 0
            entry.ready = False
        self._active = self._prescaled = False

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Accumulate gradients within the body without counting or reducing them; the next step reduces all of them."""
        self._prescale_reduced()
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def rebuild(self) -> None:
        """Rebuild the buckets before the next step, in the order that replica 0 saw in the last; every replica calls it."""
        seen = list(dict.fromkeys(self._seen_order))
        order = seen + [n for n in self._order if n not in set(seen)]
        agreed = replica_checks.first_replicas(self.reducer, order)
        self._next_order = agreed if agreed != self._order else None

    def _build(self, order: list[int]) -> None:
        parameters = [e.parameter for e in self.entries]
        slots = [self._slot(p) for p in parameters]
        plans = plan_buckets(slots, order, *self._bytes)
        self._order = order
        self.buckets = [
            Bucket(
                plan, self._streams[plan.device], self.reducer_of(parameters[plan.members[0]]), self.sharded
            )
            for plan in plans
        ]
        with torch.no_grad():
            for number, bucket in enumerate(self.buckets):
                for member, start in zip(bucket.plan.members, bucket.plan.starts, strict=True):
                    self.entries[member].place(number, bucket.flat, start)

    def _slot(self, parameter: Tensor) -> Slot:
        group = self._groups.get(parameter)
        parts = self.reducer_of(parameter).size if self.sharded else 1
        return make_slot(
            parameter,
            ("experts", group) if parameter in self._reducers else group,
            self._owners.get(parameter),
            parts,
        )

    def _prescale_reduced(self) -> None:
        """Divide gradients of earlier steps, equal on all replicas, so that this step's reduction does not change them."""
        if not self._prescaled:
            with torch.no_grad():
                for _, parameter in self._frozen.known:
                    reduced = id(parameter) in self._entry or parameter.requires_grad
                    if parameter.grad is not None and reduced:
                        parameter.grad.mul_(1 / self.reducer_of(parameter).size)
        self._prescaled = True

    def _on_grad(self, entry: BucketEntry, parameter: Tensor) -> None:
        with self._lock:
            if entry.ready:  # it is in a separate tensor, for `_find_late`
                entry.counted += 1
                return
            last = not self._accumulating and entry.counted + 1 == entry.expected
            # The hook also runs for a backward of the user's own that returned None.
            has_grad = parameter.grad is not None
            if has_grad and not last and parameter.grad is not entry.gradient:
                entry.place_grad()
            entry.seen += has_grad
            if self._accumulating:
                return
            if has_grad and not self._active:
                raise PenstockError(
                    f"{entry} got a gradient outside of Pipeline.step, which its replicas (dp > 1) do not add up; make it a "
                    "part of the loss (loss_fn, or penstock.add_loss in a layer)"
                )
            entry.counted += 1
            if last and has_grad:
                self._mark_ready(entry)

    def _mark_ready(self, entry: BucketEntry) -> None:
        with self._lock:
            assert not entry.ready, "complete once a step"
            bucket = self.buckets[entry.bucket]
            entry.place_grad()
            entry.ready = True
            # Later gradients must not be added to a buffer that may be in reduction.
            entry.parameter.grad = None
            self._seen_order.append(entry.index)
            bucket.streams.add(self._streams[bucket.plan.device].compute_stream())
            bucket.pending -= 1
            while self._started < len(self.buckets) and not self.buckets[self._started].pending:
                self.buckets[self._started].start()
                self._started += 1

    def _complete(self) -> list[BucketEntry]:
        """Complete and reduce the rest; return the entries without a gradient, which contribute zeros."""
        absent = []
        for entry in [self.entries[n] for n in self._order]:
            if entry.ready:
                continue
            if entry.seen:
                self._mark_ready(entry)
            else:
                absent.append(entry)
        for entry in absent:
            if entry.parameter.grad is None:
                entry.view.zero_()
            else:
                entry.place_grad()
        for bucket in self.buckets[self._started :]:
            bucket.start()
            self._started += 1
        return absent

    def _resolve(self, reports: list[StepReport], absent: list[BucketEntry], late: dict[int, Tensor]) -> None:
        """Handle the differences between replicas, by the report of each."""
        replica_checks.require_same_step(self.reducer, reports)
        if any(report.frozen for report in reports):
            self._frozen.require_same(self.reducer, [report.frozen for report in reports], self.sharded)
        if any(report.absent for report in reports):
            _resolve_absent(self.reducer, self.entries, absent)
        if any(report.late for report in reports):
            _add_late(self.reducer, self.reducer_of, self._frozen.known, self._entry, late)

    def _remake(self) -> None:
        """Make buckets of the parameters that require a gradient now; every replica calls it at the same time."""
        before = [self.entries[n].parameter for n in self._order]
        self.detach()
        self._make_entries()
        self._seen_order.clear()
        self._build(bucket_order(self.entries, before))
        self.attach()


class FrozenParameters:
    """The ``requires_grad`` of parameters when the buckets were made, compared with now."""

    def __init__(self, known: Sequence[tuple[str, Tensor]]) -> None:
        self.known = known
        self._last_change = 0
        self._flags: list[bool] = []
        self.record()

    def _current_flags(self) -> list[bool]:
        return [p.requires_grad for _, p in self.known]

    def record(self) -> list[tuple[str, Tensor]]:
        """Record the flags as buckets are made; return the parameters that require a gradient."""
        self._flags, self._last_change = self._current_flags(), 0
        return [pair for pair, flag in zip(self.known, self._flags, strict=True) if flag]

    def change(self) -> int:
        """Return 0 if no flag has changed since the buckets were made; else a digest of the flags."""
        flags = self._current_flags()
        return 0 if flags == self._flags else digest(bytes(flags)) or 1  # 0 means no change

    def is_repeated(self, change: int) -> bool:
        """Return whether a change, which all replicas have reported, was reported in the step before as well."""
        before, self._last_change = self._last_change, change
        return bool(change) and change == before

    def require_same(self, reducer: GroupReducer, changes: Sequence[int], sharded: bool) -> None:
        """Check that all replicas report the same change; every replica calls it if any has reported one."""
        if any(change != changes[0] for change in changes):
            table = reducer.exchange([int(flag) for flag in self._current_flags()])()
            n = next(n for n in range(len(self.known)) if len({row[n] for row in table}) > 1)
            frozen = [r for r, row in enumerate(table) if not row[n]]
            name = self.known[n][0]
            raise ReplicaError(
                f"parameter {name!r} is frozen on replica(s) {frozen} of {reducer.size} and not on the others; set "
                "requires_grad to the same on all of them",
                name,
            )
        unfrozen = (
            name for (name, p), flag in zip(self.known, self._flags, strict=True) if p.requires_grad > flag
        )
        if sharded and (first := next(unfrozen, None)) is not None:
            raise PenstockError(
                f"parameter {first!r} began to require a gradient after ZeRO had divided the update of the others among "
                "the replicas; make a new PipelineOptimizer after parameters are unfrozen"
            )


def _resolve_absent(
    reducer: GroupReducer, entries: Sequence[BucketEntry], absent: Sequence[BucketEntry]
) -> None:
    """Give absent gradients the sum, if another replica had one; every replica calls it if any has absent ones."""
    absent_here = {entry.index for entry in absent}
    table = reducer.exchange([int(e.index in absent_here) for e in entries])()
    for entry in absent:
        if entry.parameter.grad is None and not all(row[entry.index] for row in table):
            entry.set_grad()


def _find_late(known: Sequence[tuple[str, Tensor]], entry_of: Mapping[int, BucketEntry]) -> dict[int, Tensor]:
    """Take late gradients out of the ``.grad`` of parameters, and reset those to their places in the buckets.

    Two kinds are late: a contribution after the bucket's reduction has begun (of a layer that ran in more microbatches than
    in the step before), and the gradient of a parameter that began to require one after the buckets were made.

    Returns:
        This process's shard of each late gradient, by the parameter's number in `known`.
    """
    late: dict[int, Tensor] = {}
    for n, (name, parameter) in enumerate(known):
        entry = entry_of.get(id(parameter))
        shard: Tensor | None = None
        if entry is not None:
            shard = entry.take_late() if entry.ready else None
        elif parameter.requires_grad and parameter.grad is not None:
            require_dense(f"parameter {name!r}", parameter.grad)
            redistribute_grad(parameter)
            shard = local(parameter.grad)
        if shard is not None:
            late[n] = shard
    return late


@torch.no_grad()
def _add_late(
    reducer: GroupReducer,
    reducer_of: Callable[[Tensor], GroupReducer],
    known: Sequence[tuple[str, Tensor]],
    entry_of: Mapping[int, BucketEntry],
    late: Mapping[int, Tensor],
) -> None:
    """Sum late gradients over the replicas and add them to the reduced ones; every replica calls it if any has some."""
    table = reducer.exchange([int(n in late) for n in range(len(known))])()
    kinds: dict[tuple[torch.dtype, torch.device, GroupReducer], list[int]] = {}
    for n, (_, parameter) in enumerate(known):
        if any(row[n] for row in table):
            kind = (gradient_dtype(parameter), local(parameter).device, reducer_of(parameter))
            kinds.setdefault(kind, []).append(n)
    for (dtype, device, over), numbers in kinds.items():
        shapes = [local(known[n][1]).shape for n in numbers]
        sizes = [shape.numel() for shape in shapes]
        flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
        views = torch.split(flat, sizes)
        for n, view in zip(numbers, views, strict=True):
            if n in late:
                view.copy_(late[n].reshape(-1))
        over.all_reduce(flat).wait()
        for n, view, shape in zip(numbers, views, shapes, strict=True):
            parameter = known[n][1]
            entry, total = entry_of.get(id(parameter)), view.view(shape)
            if entry is None:
                parameter.grad = from_local_like(total, parameter)
            else:
                entry.view.add_(total)
