"""One bucket: a flat buffer, the gradients in it, and its reduction, on CUDA in a stream next to the compute stream."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from penstock.base.errors import PenstockError
from penstock.parallel.dtensor import dense_strides, from_local_like, gradient_dtype, is_dtensor, local
from penstock.parallel.replicas.layout import BucketPlan, Slot
from penstock.parallel.replicas.reducer import GroupReducer, Handle


class ReductionStream:
    """A device's stream for reductions. Events live only from record to wait, so errors leave none behind."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)

    def compute_stream(self) -> torch.cuda.Stream | None:
        """Return the device's current stream; None where there are no streams."""
        return torch.cuda.current_stream(self.device) if self.stream is not None else None

    def wait_for(self, flat: Tensor, streams: Iterable[torch.cuda.Stream | None]) -> None:
        """Make later reductions wait for the work so far on these streams, which used `flat`."""
        for stream in streams:
            if self.stream is not None and stream is not None:
                self.stream.wait_stream(stream)
                # So that its memory, once freed, is not reused before these streams are done with it.
                flat.record_stream(stream)
                flat.record_stream(self.stream)

    def use(self) -> AbstractContextManager[object]:
        """Return a context that puts work on this stream."""
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()

    def join(self) -> None:
        """Make the device's current stream wait for all reductions so far; the host does not wait."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)


class BucketEntry:
    """A parameter and the place of its gradient.

    Attributes:
        view: view of the bucket's buffer, with the shape of the parameter's local shard.
        gradient: tensor that ``.grad`` is set to; shares `view`'s memory.
        counted: number of them that count towards `expected`.
    """

    __slots__ = (
        "bucket", "counted", "data_ptr", "distributed", "expected", "gradient", "index", "name", "parameter", "ready",
        "seen", "view",
    )  # fmt: skip

    def __init__(self, name: str, parameter: Tensor, index: int) -> None:
        self.name = name
        self.parameter = parameter
        self.index = index
        self.distributed = is_dtensor(parameter)
        self.seen = self.counted = 0
        self.expected = 1
        self.ready = False
        self.bucket = -1
        self.view: Tensor
        self.gradient: Tensor | None = None
        self.data_ptr = 0

    def __str__(self) -> str:
        return f"parameter {self.name!r} (bucket {self.bucket})"

    def place(self, bucket: int, flat: Tensor, start: int) -> None:
        """Give the gradient a place in a bucket's buffer; a gradient in its old place moves there."""
        shard = local(self.parameter.detach())
        # As autograd lays out a new gradient: other strides would change the kernels, and so the last bits, of the update.
        strides = dense_strides(shard)
        memory = flat[start : start + shard.numel()]
        view = memory.view(shard.shape) if strides is None else memory.as_strided(shard.shape, strides)
        moves = self.gradient is not None and self.parameter.grad is self.gradient
        if moves:
            view.copy_(self.view)
        self.bucket, self.view, self.data_ptr = bucket, view, view.data_ptr()
        self.gradient = from_local_like(view.detach(), self.parameter)
        if moves:
            self.parameter.grad = self.gradient

    def place_grad(self) -> None:
        """Put the gradient into the buffer, and set ``.grad`` to its place there."""
        grad = self.parameter.grad
        if grad is None:
            raise PenstockError(f"{self} is ready, but it has no gradient")
        if grad is self.gradient and self._in_place():
            return
        self.view.copy_(self.local_grad(grad))
        self.set_grad()

    def local_grad(self, grad: Tensor) -> Tensor:
        """Return this process's shard of a gradient, with the shape of `view`."""
        require_dense(str(self), grad)
        if (
            grad.layout != torch.strided
            or grad.dtype != self.view.dtype
            or grad.shape != self.parameter.shape
        ):
            raise self._mismatch(grad)
        shard = grad.detach()
        if self.distributed:  # redistribution also adds up partial sums
            # A DTensor.
            shard = local(shard.redistribute(placements=self.parameter.placements))  # type: ignore[attr-defined]
        if shard.shape != self.view.shape:
            raise self._mismatch(shard)
        return shard

    def take_late(self) -> Tensor | None:
        """Return this process's shard of a gradient that came after `ready`, if any; reset ``.grad`` to the buffer."""
        grad = self.parameter.grad
        self.parameter.grad = self.gradient
        return None if grad is None or grad is self.gradient else self.local_grad(grad)

    def set_grad(self) -> None:
        """Set ``.grad`` to the place in the buffer, with the values there."""
        if not self._in_place():
            self.gradient = from_local_like(self.view.detach(), self.parameter)
        self.parameter.grad = self.gradient

    def _in_place(self) -> bool:
        """Return whether `gradient` is still in the buffer; ``nn.Module.to`` gives it other memory."""
        assert self.gradient is not None
        shard = local(self.gradient) if self.distributed else self.gradient
        return shard.data_ptr() == self.data_ptr and shard.dtype == self.view.dtype

    def _mismatch(self, grad: Tensor) -> PenstockError:
        return PenstockError(
            f"{self} was laid out for a dense gradient of shape {tuple(self.view.shape)}, {self.view.dtype}; now it has one "
            f"of shape {tuple(grad.shape)}, {grad.dtype}, {grad.layout}. Convert the model before its buckets are made"
        )


def bucket_order(entries: Sequence[BucketEntry], first: Sequence[Tensor] = ()) -> list[int]:
    """Return the entries' numbers: the parameters in `first`, in their order, then all others in reverse."""
    index = {id(entry.parameter): entry.index for entry in entries}
    leading = dict.fromkeys(index[id(p)] for p in first if id(p) in index)
    return [*leading, *(entry.index for entry in reversed(entries) if entry.index not in leading)]


def make_slot(parameter: Tensor, group: Hashable, owner: int | None, parts: int) -> Slot:
    """Return the slot of a parameter's gradient."""
    shard = local(parameter)
    return Slot(shard.numel(), gradient_dtype(parameter), shard.device, group, owner, parts)


def require_dense(what: str, grad: Tensor) -> None:
    """Check that a gradient is dense, so that it fits into a buffer."""
    if grad.layout == torch.sparse_coo:
        raise PenstockError(
            f"{what} got a sparse gradient, and replicas (dp > 1), copied stages and weights tied over ranks add up dense "
            "ones only; make its layer with sparse=False (nn.Embedding), or have one copy of it"
        )


class Bucket:
    """A buffer of gradients and its reduction.

    Attributes:
        reducer: communicator of the replicas that have these parameters.
        pending: number of gradients that are not ready yet in this step.
        streams: streams that have written to the buffer in this step.
    """

    def __init__(
        self, plan: BucketPlan, stream: ReductionStream, reducer: GroupReducer, sharded: bool
    ) -> None:
        self.plan = plan
        self.reducer = reducer
        self.flat = torch.zeros(plan.elements, dtype=plan.dtype, device=plan.device)
        self.pending = len(plan.members)
        self.streams: set[torch.cuda.Stream | None] = set()
        self._stream = stream
        self._sharded = sharded
        self._handle: Handle | None = None

    def start(self) -> None:
        """Begin the reduction, after the work so far on the streams that filled the buffer."""
        self.streams.add(self._stream.compute_stream())
        self._stream.wait_for(self.flat, self.streams)
        self.streams.clear()
        with self._stream.use():
            if self.plan.owner is not None:
                self._handle = self.reducer.reduce(self.flat, self.plan.owner)
            else:
                reduce = self.reducer.reduce_scatter if self._sharded else self.reducer.all_reduce
                self._handle = reduce(self.flat)

    def wait(self) -> None:
        """Wait for the reduction; the sum is then in `flat` (or in this replica's part of it, or the owner's)."""
        if self._handle is None:
            return
        with self._stream.use():
            handle, self._handle = self._handle, None
            handle.wait()
        self._stream.join()

    def drop(self) -> None:
        """Drop a reduction without a wait on the host; the device's current stream still waits for it."""
        self._handle = None
        self.streams.clear()
        self.pending = len(self.plan.members)
        self._stream.join()
