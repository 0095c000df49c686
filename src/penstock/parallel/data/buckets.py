"""Reduction of the replicas' gradients while the backward still runs.

Gradients are in flat buffers, the buckets; each parameter's ``.grad`` is a view of its place. When the last gradient of a
bucket is complete, its reduction starts, in the order of the buckets, while the backward continues. The first step shows
the order in which gradients become complete; all replicas then make their buckets in this order (as DDP: 2006.15704, 3.2).

The caller says after how many contributions a gradient is complete, so that a split backward, many microbatches and weights
used in several stages are the same case. At the end of each step all replicas together handle absent gradients, gradients
that came too late for their bucket, and a replica that failed or is at another step.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, PenstockError, TransportError
from penstock.parallel.data import replica_checks
from penstock.parallel.data.bucket import Bucket, BucketEntry, bucket_order, make_slot
from penstock.parallel.data.bucket_options import Missing, require_options
from penstock.parallel.data.frozen import Frozen
from penstock.parallel.data.layout import BUCKET_BYTES, FIRST_BUCKET_BYTES, plan_buckets
from penstock.parallel.data.leftovers import add_late, find_late, resolve_absent
from penstock.parallel.data.reducer import Reducer
from penstock.parallel.data.reduction_stream import ReductionStream
from penstock.parallel.data.replica_checks import StepReport
from penstock.parallel.dtensor import local


class GradientBuckets:
    """The gradients of a replica's parameters, in buckets.

    Every replica makes one at the same time and takes the same steps::

        buckets = GradientBuckets(model, GroupReducer())
        buckets.attach()
        with buckets.step():
            loss_fn(model(x), y).backward()
        optimizer.step()

    Args:
        parameters: a module, or (name, parameter) pairs; frozen parameters are left out, and duplicates count once.
        reducer: this replica's end of the communicator.
        order: parameters, soonest ready first (`penstock.parameter_order`); replica 0's is used (default: in reverse).
        bucket_bytes, first_bucket_bytes: maximum bytes in a bucket, and in the first one.
        divisor: divisor of the sums (default: the number of replicas); 1 leaves sums.
        missing: treatment of a parameter without a gradient. "error" (default): every replica raises. "zeros": a replica
            without one contributes zeros; a parameter that has none on any replica keeps the ``.grad`` it had.
        reduce_dtype: dtype of the sums of gradients with fewer bits, such as ``torch.float32`` for bfloat16.
        rebuild: whether to rebuild the buckets once, in the order seen in the first step (default True).
        sharded: whether each replica gets only its part of the sums (see `penstock.parallel.data.zero`; default False).
        groups: parameter → key; only parameters of equal keys share a bucket.
        dynamic: whether parameters may get more gradients than announced, and may begin or cease to require one (default
            False). Gradients that fit no bucket are summed at the end of the step. Buckets that are not `sharded` are made
            again if ``requires_grad`` is changed for two steps.

    Raises:
        ConfigError: if an option cannot be used; or, on every replica, if the models differ.
    """

    def __init__(
        self,
        parameters: nn.Module | Iterable[tuple[str, Tensor]],
        reducer: Reducer,
        *,
        order: Sequence[Tensor] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
        divisor: float | None = None,
        missing: Missing = "error",
        reduce_dtype: torch.dtype | None = None,
        rebuild: bool = True,
        sharded: bool = False,
        groups: Mapping[Tensor, Hashable] | None = None,
        dynamic: bool = False,
    ) -> None:
        named = parameters.named_parameters() if isinstance(parameters, nn.Module) else parameters
        once = {id(p): (name, p) for name, p in reversed(list(named))}
        if not dynamic and not any(p.requires_grad for _, p in once.values()):
            raise ConfigError("there is no parameter that requires a gradient, so there is nothing to reduce")
        divisor = float(reducer.size) if divisor is None else divisor
        require_options(missing, reduce_dtype, divisor)
        self.reducer = reducer
        self.divisor = divisor
        self.missing: Missing = missing
        self.reduce_dtype = reduce_dtype
        self.sharded = sharded
        self.dynamic = dynamic
        self._bytes = (bucket_bytes, first_bucket_bytes)
        self._frozen = Frozen(list(reversed(once.values())))
        self._entry: dict[int, BucketEntry] = {}
        self._make_entries()
        replica_checks.require_equal_models(reducer, [(e.name, e.parameter) for e in self.entries])
        self._groups = groups or {}
        self._limits: Mapping[Hashable, int] | None = None
        devices = {local(p).device for _, p in self._frozen.known}
        self._streams = {device: ReductionStream(device) for device in devices}
        self._next_order: list[int] | None = None
        self.buckets: list[Bucket] = []
        self._build(replica_checks.first_replicas(reducer, bucket_order(self.entries, order)))
        self._rebuilds = rebuild
        self._seen_order: list[int] = []
        self._started = 0
        self._active = False
        self._accumulating = False
        self._prescaled = False
        self._step = 0
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

    def attach(self) -> None:
        """Register hooks on the parameters: each gradient that autograd accumulates is one contribution."""
        for entry in () if self._hooks else self.entries:
            hook = partial(self._on_grad, entry)
            self._hooks.append(entry.parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def detach(self) -> None:
        """Remove the hooks of `attach`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def begin(self, contributions: int | Mapping[Tensor, int] = 1, step: int | None = None) -> None:
        """Begin a step. Without this call the first gradient begins one, with one contribution a parameter.

        Args:
            contributions: number of gradients that make a parameter complete, for all or by parameter (default 1); a
                parameter that is not listed gets none in this step, and counts as missing.
            step: number of the step, which replicas compare at the end (default: one more than the last).

        Raises:
            PenstockError: if the last step was not finished.
        """
        if self._active:
            raise PenstockError(
                f"step {self._step} has not been finished; call finish() or abandon() before the next"
            )
        if self._next_order is not None:
            self._build(self._next_order)
            self._next_order = None
        self._active = True
        self._step = self._step + 1 if step is None else step
        self._started = 0
        self._seen_order.clear()
        for entry in self.entries:
            if isinstance(contributions, int):
                entry.expected = contributions
            else:
                entry.expected = contributions.get(entry.parameter, 0)
        self._prescale_reduced()

    def ready(self, parameter: Tensor) -> None:
        """Mark a parameter's gradient as complete; a full bucket starts as soon as those before it have.

        Parameters that are not in any bucket are ignored.

        Raises:
            PenstockError: if it is already complete, or has no gradient, or one of another dtype or shape.
        """
        entry = self._entry.get(id(parameter))
        if entry is None:
            return
        if not self._active:
            self.begin()
        entry.seen += 1
        self._mark_ready(entry)

    def finish(self) -> None:
        """End the step: every gradient is then the replicas' sum, divided. On CUDA the host does not wait for it.

        Raises:
            PenstockError: on every replica, if a parameter has no gradient (with missing="error"), or replicas are at
                different steps.
            PeerError: if another replica failed; includes its message.
            WaitTimeoutError: if a replica did not come in time.
        """
        if not self._active:
            self.begin()
        try:
            absent = self._complete()
            late = find_late(self._frozen.known, self._entry) if self.dynamic else {}
        except PenstockError as error:
            self.abandon(error)
            raise
        try:
            change = self._frozen.change() if self.dynamic else 0
            report = StepReport(self._step, 0, len(absent), len(late), change)
            reports = replica_checks.exchange_reports(self.reducer, report)
            for bucket in self.buckets:
                bucket.wait(self.reducer)
            self._resolve(reports(), absent, late)
            if self._frozen.is_repeated(change) and not self.sharded:
                self._remake()
            if self._rebuilds:
                self._rebuilds = False
                self._agree_on_order()
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
                for bucket in self.buckets[self._started :]:
                    bucket.start(self.reducer)
                    self._started += 1
                reports = replica_checks.exchange_reports(self.reducer, StepReport(self._step, failed=1))
                for bucket in self.buckets:
                    bucket.wait(self.reducer)
                failed = [r for r, report in enumerate(reports()) if report.failed]
                replica_checks.raise_failure(self.reducer, failed, f"{type(error).__name__}: {error}")
        self.reset()

    def reset(self) -> None:
        """Reset the state of this step on this replica only; gradients do not change."""
        for bucket in self.buckets:
            bucket.drop()
        for entry in self.entries:
            if self.dynamic and entry.ready:
                entry.parameter.grad = entry.gradient
            entry.seen = entry.counted = 0
            entry.ready = False
        self._active = self._prescaled = False

    @contextmanager
    def step(self, contributions: int | Mapping[Tensor, int] = 1, step: int | None = None) -> Iterator[None]:
        """Call `begin` with `contributions` and `step`, then `finish` after the body, or `abandon` if it fails."""
        self.begin(contributions, step)
        try:
            yield
        except Exception as error:
            self.abandon(error)
            raise
        except BaseException:  # an interrupt does not wait for the other replicas
            self.reset()
            raise
        self.finish()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Accumulate gradients within the body without counting or reducing them; the next step reduces all of them."""
        self._prescale_reduced()
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def rebuild(
        self, groups: Mapping[Tensor, Hashable] | None = None, limits: Mapping[Hashable, int] | None = None
    ) -> None:
        """Rebuild the buckets before the next step, in the order seen in the last one; every replica calls it.

        Args:
            groups: new groups, as for the class (default: unchanged).
            limits: group → maximum bytes in each of its buckets; others have `bucket_bytes`.
        """
        self._groups, self._limits = self._groups if groups is None else groups, limits
        self._agree_on_order()
        self._next_order = self._next_order or self._order

    def zero(self) -> None:
        """Set all gradients to zero in place, a buffer at a time."""
        for bucket in self.buckets:
            bucket.flat.zero_()

    def _build(self, order: list[int]) -> None:
        slots = [make_slot(e.parameter, self._groups.get(e.parameter)) for e in self.entries]
        parts = self.reducer.size if self.sharded else 1
        plans = plan_buckets(slots, order, *self._bytes, parts, self._limits)
        self._order = order
        self.buckets = [
            Bucket(plan, self._streams[plan.device], self.divisor, self.reduce_dtype, self.sharded)
            for plan in plans
        ]
        with torch.no_grad():
            for number, bucket in enumerate(self.buckets):
                for member, start in zip(bucket.plan.members, bucket.plan.starts, strict=True):
                    self.entries[member].place(number, bucket.flat, start)

    def _prescale_reduced(self) -> None:
        """Scale gradients of earlier steps, equal on all replicas, so that this step's reduction does not change them."""
        factor = self.divisor / self.reducer.size
        if factor != 1 and not self._prescaled:
            with torch.no_grad():
                for _, parameter in self._frozen.known:
                    reduced = id(parameter) in self._entry or (self.dynamic and parameter.requires_grad)
                    if parameter.grad is not None and reduced:
                        parameter.grad.mul_(factor)
        self._prescaled = True

    def _on_grad(self, entry: BucketEntry, parameter: Tensor) -> None:
        with self._lock:
            if self.dynamic and entry.ready:  # it is in a separate tensor, for `find_late`
                entry.counted += 1
                return
            last = not self._accumulating and entry.counted + 1 == entry.expected
            if not last and parameter.grad is not entry.gradient:
                entry.place_grad()
            entry.seen += 1
            if self._accumulating:
                return
            if not self._active:
                if self.divisor != self.reducer.size:
                    raise PenstockError(
                        f"sums divided by {self.divisor:g} need begin() before the first backward of a step"
                    )
                self.begin()
            entry.counted += 1
            if entry.counted == entry.expected:
                self._mark_ready(entry)
            elif entry.counted > entry.expected:
                raise entry.already_ready(self._step)

    def _mark_ready(self, entry: BucketEntry) -> None:
        with self._lock:
            if entry.ready:
                raise entry.already_ready(self._step)
            bucket = self.buckets[entry.bucket]
            entry.place_grad(bucket.scale)
            entry.ready = True
            if self.dynamic:  # later gradients must not be added to a buffer that may be in reduction
                entry.parameter.grad = None
            self._seen_order.append(entry.index)
            bucket.streams.add(self._streams[bucket.plan.device].compute_stream())
            bucket.pending -= 1
            while self._started < len(self.buckets) and not self.buckets[self._started].pending:
                self.buckets[self._started].start(self.reducer)
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
                entry.place_grad(self.buckets[entry.bucket].scale)
        for bucket in self.buckets[self._started :]:
            bucket.start(self.reducer)
            self._started += 1
        return absent

    def _resolve(self, reports: list[StepReport], absent: list[BucketEntry], late: dict[int, Tensor]) -> None:
        """Handle the differences between replicas, by the report of each."""
        replica_checks.require_same_step(self.reducer, reports)
        if any(report.frozen for report in reports):
            self._frozen.require_same(self.reducer, [report.frozen for report in reports], self.sharded)
        if any(report.absent for report in reports):
            resolve_absent(self.reducer, self.entries, absent, self.missing, self._step)
        if any(report.late for report in reports):
            add_late(self.reducer, self._frozen.known, self._entry, late, self.divisor, self.reduce_dtype)

    def _remake(self) -> None:
        """Make buckets of the parameters that require a gradient now; every replica calls it at the same time."""
        before = [self.entries[n].parameter for n in self._order]
        attached = bool(self._hooks)
        self.detach()
        self._make_entries()
        self._seen_order.clear()
        self._build(bucket_order(self.entries, before))
        if attached:
            self.attach()

    def _agree_on_order(self) -> None:
        """Take the order that replica 0 has seen, in which the next step rebuilds the buckets."""
        seen = list(dict.fromkeys(self._seen_order))
        order = seen + [n for n in self._order if n not in set(seen)]
        agreed = replica_checks.first_replicas(self.reducer, order)
        self._next_order = agreed if agreed != self._order else None
