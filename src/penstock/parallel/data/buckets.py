"""Gradients of replicas added up while the backward still runs.

Gradients live in flat buffers, the buckets; each parameter's ``.grad`` is a view of its place. When the last gradient of
a bucket is complete its reduction starts, in the order of the buckets, while the backward continues. The first step shows
the order in which gradients become complete, by which all replicas then make their buckets (as DDP: 2006.15704, 3.2).

The caller says after how many contributions a gradient is complete, so a split backward, many microbatches and weights used
in several stages are one case. At the end of each step all replicas decide together about gradients that are absent or came
too late for their bucket, and about a replica that fails or is at another step.
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
from penstock.parallel.data.bucket import Bucket, BucketEntry, order_of, slot_of
from penstock.parallel.data.frozen import Frozen
from penstock.parallel.data.layout import BUCKET_BYTES, FIRST_BUCKET_BYTES, plan_buckets
from penstock.parallel.data.leftovers import Missing, add_late, find_late, require_options, resolve_absent
from penstock.parallel.data.reducer import Reducer
from penstock.parallel.data.reduction_stream import ReductionStream
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
        parameters: a module, or (name, parameter) pairs; those that require no gradient are left out, and one that is
            there twice counts once.
        reducer: this replica's end of the communicator.
        order: parameters, soonest ready first (`penstock.parameter_order`); replica 0's counts. By default, backwards.
        bucket_bytes, first_bucket_bytes: the most bytes in a bucket, and in the first one.
        divisor: what the sums are divided by; by default the number of replicas. 1 leaves sums.
        missing: what a parameter without a gradient means. "error": every replica raises. "zeros": a replica that has
            none contributes zeros; a parameter for which none has any keeps the ``.grad`` it had.
        reduce_dtype: what gradients of fewer bits are added up in, such as ``torch.float32`` for bfloat16.
        rebuild: make the buckets anew, once, by the order seen in the first step.
        sharded: each replica gets its part of the sums only (see `penstock.parallel.data.zero`).
        groups: parameter → key; only parameters of equal keys share a bucket.
        dynamic: parameters may get more gradients than announced, and may begin or cease to require one; what no bucket
            can take is added up at the end of the step. Buckets that are not `sharded` are made again where
            ``requires_grad`` stays changed for two steps.

    Raises:
        ConfigError: an option that cannot be used; or, on every replica, models that differ.
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
        self._list()
        replica_checks.require_equal_models(reducer, [(e.name, e.parameter) for e in self.entries])
        self._groups = groups or {}
        self._limits: Mapping[Hashable, int] | None = None
        self._lanes = {
            device: ReductionStream(device) for device in {local(p).device for _, p in self._frozen.known}
        }
        self._next_order: list[int] | None = None
        self.buckets: list[Bucket] = []
        self._build(replica_checks.first_replicas(reducer, order_of(self.entries, order)))
        self._rebuilds = rebuild
        self._seen_order: list[int] = []
        self._started = 0
        self._active = False
        self._holding = False
        self._kept = False
        self._step = 0
        self._lock = threading.RLock()
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def _list(self) -> None:
        """Those that require a gradient now have an entry; one that had one keeps it."""
        self.entries = [self._entry.get(id(p)) or BucketEntry(name, p, 0) for name, p in self._frozen.take()]
        for n, entry in enumerate(self.entries):
            entry.index = n
        self._entry = {id(e.parameter): e for e in self.entries}

    def attach(self) -> None:
        """Have autograd mark parameters: each gradient that arrives is one contribution."""
        for entry in () if self._hooks else self.entries:
            arrived = partial(self._arrived, entry)
            self._hooks.append(entry.parameter.register_post_accumulate_grad_hook(arrived))  # type: ignore[no-untyped-call]

    def detach(self) -> None:
        """Undo `attach`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def begin(self, contributions: int | Mapping[Tensor, int] = 1, step: int | None = None) -> None:
        """Begin a step. Where it is not called, the first gradient that arrives begins one, with one contribution.

        Args:
            contributions: how many gradients make a parameter complete, for all or for each; one that is not named
                gets none in this step, and counts as missing.
            step: its number, which replicas compare at the end; by default, they count.

        Raises:
            PenstockError: the last step was not finished.
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
        self._keep_what_was_reduced()

    def ready(self, parameter: Tensor) -> None:
        """A parameter's gradient is complete; a bucket that is full by it starts, as soon as those before it have.

        Parameters that are not in any bucket are ignored.

        Raises:
            PenstockError: it is ready already, or has no gradient, or one of another dtype or shape.
        """
        entry = self._entry.get(id(parameter))
        if entry is None:
            return
        if not self._active:
            self.begin()
        entry.seen += 1
        self._mark(entry)

    def finish(self) -> None:
        """End the step: every gradient is the replicas' sum, divided. On CUDA the host does not wait for that.

        Raises:
            PenstockError: on every replica: a parameter has no gradient (where that is an error), or replicas are at
                different steps.
            PeerError: another replica failed; the message says what it said.
            WaitTimeoutError: a replica did not come in time.
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
            rows = self.reducer.exchange([self._step, 0, len(absent), len(late), change])
            for bucket in self.buckets:
                bucket.wait(self.reducer)
            self._resolve(rows(), absent, late)
            if self._frozen.stays(change) and not self.sharded:
                self._make_again()
            if self._rebuilds:
                self._rebuilds = False
                self._observe()
        finally:
            self.reset()

    def abandon(self, error: BaseException) -> None:
        """End a step that failed here, so that no other replica waits: they raise `PeerError` with what is said here.

        The gradients of this step are of no use, on any replica.
        """
        if not self._active:
            return
        # If the communicator is what failed, or fails now, the others will notice by themselves.
        with suppress(TransportError):
            if not isinstance(error, TransportError):
                for bucket in self.buckets[self._started :]:
                    bucket.start(self.reducer)
                    self._started += 1
                rows = self.reducer.exchange([self._step, 1, 0, 0, 0])
                for bucket in self.buckets:
                    bucket.wait(self.reducer)
                failed = [r for r, row in enumerate(rows()) if row[1]]
                replica_checks.raise_failure(self.reducer, failed, f"{type(error).__name__}: {error}")
        self.reset()

    def reset(self) -> None:
        """Forget the marks of this step, on this replica alone; gradients stay as they are."""
        for bucket in self.buckets:
            bucket.drop()
        for entry in self.entries:
            if self.dynamic and entry.ready:
                entry.parameter.grad = entry.gradient
            entry.seen = entry.counted = 0
            entry.ready = False
        self._active = self._kept = False

    @contextmanager
    def step(self, contributions: int | Mapping[Tensor, int] = 1, step: int | None = None) -> Iterator[None]:
        """`begin`, and `finish` after the body, or `abandon` if it fails."""
        self.begin(contributions, step)
        try:
            yield
        except Exception as error:
            self.abandon(error)
            raise
        except BaseException:  # whoever interrupts does not wait for the other replicas
            self.reset()
            raise
        self.finish()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Within it gradients accumulate here and nothing counts or starts; a step afterwards reduces all of it."""
        self._keep_what_was_reduced()
        before, self._holding = self._holding, True
        try:
            yield
        finally:
            self._holding = before

    def rebuild(
        self, groups: Mapping[Tensor, Hashable] | None = None, limits: Mapping[Hashable, int] | None = None
    ) -> None:
        """Let the next step begin with buckets made anew, by the order seen in the last one; every replica calls it.

        `groups`: as for the class, by default as before; `limits`: group → the most bytes in each of its buckets.
        """
        self._groups, self._limits = self._groups if groups is None else groups, limits
        self._observe()
        self._next_order = self._next_order or self._order

    def zero(self) -> None:
        """Set all gradients to zero, a buffer at a time, without letting go of them."""
        for bucket in self.buckets:
            bucket.flat.zero_()

    def _build(self, order: list[int]) -> None:
        slots = [slot_of(e.parameter, self._groups.get(e.parameter)) for e in self.entries]
        parts = self.reducer.size if self.sharded else 1
        plans = plan_buckets(slots, order, *self._bytes, parts, self._limits)
        self._order = order
        self.buckets = [
            Bucket(plan, self._lanes[plan.device], self.divisor, self._wire_dtype(plan.dtype), self.sharded)
            for plan in plans
        ]
        with torch.no_grad():
            for number, bucket in enumerate(self.buckets):
                for member, start in zip(bucket.plan.members, bucket.plan.starts, strict=True):
                    self.entries[member].place(number, bucket.flat, start)

    def _wire_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        wider = self.reduce_dtype is not None and self.reduce_dtype.itemsize > dtype.itemsize
        return self.reduce_dtype if wider else None

    def _keep_what_was_reduced(self) -> None:
        """Scale gradients of earlier steps, equal on all replicas, so that this step's sum leaves them as they are."""
        factor = self.divisor / self.reducer.size
        if factor != 1 and not self._kept:
            with torch.no_grad():
                for _, parameter in self._frozen.known:
                    reduced = id(parameter) in self._entry or (self.dynamic and parameter.requires_grad)
                    if parameter.grad is not None and reduced:
                        parameter.grad.mul_(factor)
        self._kept = True

    def _arrived(self, entry: BucketEntry, parameter: Tensor) -> None:
        """A gradient has been accumulated."""
        with self._lock:
            if self.dynamic and entry.ready:  # it is in a tensor of its own, for `_late` to find
                entry.counted += 1
                return
            last = not self._holding and entry.counted + 1 == entry.expected
            if not last and parameter.grad is not entry.gradient:
                entry.place_grad()
            entry.seen += 1
            if self._holding:
                return
            if not self._active:
                if self.divisor != self.reducer.size:
                    raise PenstockError(
                        f"sums divided by {self.divisor:g} need begin() before the first backward of a step"
                    )
                self.begin()
            entry.counted += 1
            if entry.counted == entry.expected:
                self._mark(entry)
            elif entry.counted > entry.expected:
                raise entry.twice(self._step)

    def _mark(self, entry: BucketEntry) -> None:
        with self._lock:
            if entry.ready:
                raise entry.twice(self._step)
            bucket = self.buckets[entry.bucket]
            entry.place_grad(bucket.scale)
            entry.ready = True
            if self.dynamic:  # what still comes must not be added to a buffer that may be under way
                entry.parameter.grad = None
            self._seen_order.append(entry.index)
            bucket.streams.add(self._lanes[bucket.plan.device].here())
            bucket.pending -= 1
            while self._started < len(self.buckets) and not self.buckets[self._started].pending:
                self.buckets[self._started].start(self.reducer)
                self._started += 1

    def _complete(self) -> list[BucketEntry]:
        """Mark what is left; returns the entries that got no gradient, for which zeros are contributed."""
        absent = []
        for entry in [self.entries[n] for n in self._order]:
            if entry.ready:
                continue
            if entry.seen:
                self._mark(entry)
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

    def _resolve(self, rows: list[list[int]], absent: list[BucketEntry], late: dict[int, Tensor]) -> None:
        """What all replicas decide together, by what each has reported.

        That is: (step, whether it failed, absent gradients, late ones, a number for ``requires_grad`` where it changed).
        """
        replica_checks.require_same_step(self.reducer, rows)
        if any(row[4] for row in rows):
            self._frozen.require_same(self.reducer, [row[4] for row in rows], self.sharded)
        if any(row[2] for row in rows):
            resolve_absent(self.reducer, self.entries, absent, self.missing, self._step)
        if any(row[3] for row in rows):
            add_late(self.reducer, self._frozen.known, self._entry, late, self.divisor, self.reduce_dtype)

    def _make_again(self) -> None:
        """Let the buckets be of the parameters that require a gradient now; every replica calls it at the same time."""
        before = [self.entries[n].parameter for n in self._order]
        attached = bool(self._hooks)
        self.detach()
        self._list()
        self._seen_order.clear()
        self._build(order_of(self.entries, before))
        if attached:
            self.attach()

    def _observe(self) -> None:
        """Agree on the order that replica 0 has seen; the next step begins by making the buckets of it."""
        seen = list(dict.fromkeys(self._seen_order))
        order = seen + [n for n in self._order if n not in set(seen)]
        agreed = replica_checks.first_replicas(self.reducer, order)
        self._next_order = agreed if agreed != self._order else None
