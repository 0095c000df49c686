"""Parameters of a stage that are gathered together, and whose gradients are reduced together (see `resident_shards`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.base.errors import PenstockError
from penstock.parallel.dtensor import gradient_dtype, local, set_local
from penstock.parallel.participant import CollectiveKind
from penstock.parallel.replicas.bucket import BucketEntry, ReductionStream
from penstock.parallel.replicas.divided_gradient import DividedGradient
from penstock.parallel.replicas.layout import BucketPlan
from penstock.parallel.replicas.reducer import GroupReducer, Handle, part_of
from penstock.parallel.replicas.shard_slice import ShardSlice
from penstock.parallel.replicas.shards import ShardedParameter, take_back


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
        self.memory = memory_of(self._values)
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

    def shard_of(self, entry: BucketEntry, start: int) -> ShardedParameter:
        """Return this replica's shard of a parameter, which begins at `start` in the bucket."""
        begin = self.reducer.rank * len(self.part) - start
        elements = ShardSlice.between(entry.view, begin, begin + len(self.part))
        shard = None
        if elements.count and self.trains:
            shard = nn.Parameter(self.piece(elements, start, self.part))
            shard.grad_dtype = gradient_dtype(entry.parameter)
        return ShardedParameter(entry, elements, shard)

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


def memory_of(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata  # as torch's own weak references to storages
    return number


def _allocate(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())


def _release(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(0)
