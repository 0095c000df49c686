"""One bucket: a flat buffer, the gradients that live in it, and its reduction while that is under way."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from penstock.errors import PenstockError
from penstock.parallel.data.layout import BucketPlan, Slot
from penstock.parallel.data.reducer import Handle, Reducer, part_of
from penstock.parallel.data.reduction_stream import ReductionStream
from penstock.parallel.dtensor import gradient_dtype, is_dtensor, like, local, strides_of


class BucketEntry:
    """A parameter and its gradient's place.

    Attributes:
        name, parameter: which; the name is for messages.
        index: its number among all parameters.
        cut: whether it is cut over ranks (a DTensor).
        bucket: the number of its bucket.
        view: the place in the bucket's buffer, of the shape this process holds.
        gradient: what ``.grad`` is to be; shares `view`'s memory.
        seen: gradients that came since the last reduction.
        counted: those of them that count towards `expected`.
        expected: how many make it complete in this step.
        ready: it is complete in this step.
    """

    __slots__ = (
        "bucket", "counted", "cut", "expected", "gradient", "index", "name", "parameter", "pointer", "ready", "seen", "view",
    )  # fmt: skip

    def __init__(self, name: str, parameter: Tensor, index: int) -> None:
        self.name = name
        self.parameter = parameter
        self.index = index
        self.cut = is_dtensor(parameter)
        self.seen = self.counted = 0
        self.expected = 1
        self.ready = False
        self.bucket = -1
        self.view: Tensor
        self.gradient: Tensor | None = None
        self.pointer = 0

    def __str__(self) -> str:
        return f"parameter {self.name!r} (bucket {self.bucket})"

    def place(self, bucket: int, flat: Tensor, start: int) -> None:
        """Give the gradient a place in a bucket's buffer; a gradient that is in its old place moves there."""
        part = local(self.parameter.detach())
        strides = strides_of(part)
        where = flat[start : start + part.numel()]
        view = where.view(part.shape) if strides is None else where.as_strided(part.shape, strides)
        moves = self.gradient is not None and self.parameter.grad is self.gradient
        if moves:
            view.copy_(self.view)
        self.bucket, self.view, self.pointer = bucket, view, view.data_ptr()
        self.gradient = like(view.detach(), self.parameter)
        if moves:
            self.parameter.grad = self.gradient

    def place_grad(self, scale: float = 1.0) -> None:
        """Have ``.grad`` be the place in the buffer, times `scale`; what autograd put elsewhere is copied there.

        Raises:
            PenstockError: there is no gradient, or a sparse one, or one of another dtype or shape.
        """
        grad, ours = self.parameter.grad, self.gradient
        if grad is None:
            raise PenstockError(f"{self} is ready, but it has no gradient")
        if grad is ours and self._in_place():
            if scale != 1:
                self.view.mul_(scale)
            return
        part = self.part(grad)
        if scale != 1:
            torch.mul(part, scale, out=self.view)
        else:
            self.view.copy_(part)
        self.adopt()

    def part(self, grad: Tensor) -> Tensor:
        """The part of a gradient that this process holds, of the shape of `view`.

        Raises:
            PenstockError: it is a sparse one, or has another dtype or shape.
        """
        require_dense(str(self), grad)
        if (
            grad.layout != torch.strided
            or grad.dtype != self.view.dtype
            or grad.shape != self.parameter.shape
        ):
            raise self._unlike(grad)
        part = grad.detach()
        if self.cut:  # what is there in parts only is added up
            part = local(part.redistribute(placements=self.parameter.placements))  # type: ignore[attr-defined]
        if part.shape != self.view.shape:
            raise self._unlike(part)
        return part

    def late(self) -> Tensor | None:
        """The part that this process holds of what came after the gradient was ready; ``.grad`` is the place again."""
        grad = self.parameter.grad
        self.parameter.grad = self.gradient
        return None if grad is None or grad is self.gradient else self.part(grad)

    def adopt(self) -> None:
        """Have ``.grad`` be the place in the buffer, with what is there."""
        if not self._in_place():
            self.gradient = like(self.view.detach(), self.parameter)
        self.parameter.grad = self.gradient

    def twice(self, step: int) -> PenstockError:
        """The error for a gradient that comes after it was ready."""
        return PenstockError(
            f"{self} got a gradient after it was ready in step {step}; {self.expected} contribution(s) were announced. Say "
            "how many there are in begin(), or accumulate the first ones inside accumulating()"
        )

    def _in_place(self) -> bool:
        """Whether `gradient` still is what it was made as; ``nn.Module.to`` gives it other memory."""
        assert self.gradient is not None
        part = local(self.gradient) if self.cut else self.gradient
        return part.data_ptr() == self.pointer and part.dtype == self.view.dtype

    def _unlike(self, grad: Tensor) -> PenstockError:
        return PenstockError(
            f"{self} was laid out for a dense gradient of shape {tuple(self.view.shape)}, {self.view.dtype}; now it has one "
            f"of shape {tuple(grad.shape)}, {grad.dtype}, {grad.layout}. Convert the model before its buckets are made"
        )


def order_of(entries: Sequence[BucketEntry], given: Sequence[Tensor] | None) -> list[int]:
    """The entries' numbers: first the parameters that are given, in their order, then all others backwards."""
    place = {id(entry.parameter): entry.index for entry in entries}
    first = dict.fromkeys(place[id(p)] for p in given or () if id(p) in place)
    return [*first, *(entry.index for entry in reversed(entries) if entry.index not in first)]


def slot_of(parameter: Tensor, group: Hashable) -> Slot:
    """What a parameter's gradient needs in a buffer."""
    part = local(parameter)
    return Slot(part.numel(), gradient_dtype(parameter), part.device, group)


def require_dense(what: str, grad: Tensor) -> None:
    """Refuse a gradient that has no place in a buffer.

    Raises:
        PenstockError: it is sparse.
    """
    if grad.layout == torch.sparse_coo:
        raise PenstockError(
            f"{what} got a sparse gradient, and replicas (dp > 1), copied stages and weights tied over ranks add up dense "
            "ones only; make its layer with sparse=False (nn.Embedding), or have one copy of it"
        )


def no_gradient(step: int, holes: Mapping[BucketEntry, Sequence[int]]) -> PenstockError:
    """The error for parameters without a gradient, and on which replicas."""
    told = [f"{entry} on replica(s) {where}" for entry, where in holes.items()]
    more = f" and {len(told) - 5} more" if len(told) > 5 else ""
    return PenstockError(
        f"no gradient in step {step} for {'; '.join(told[:5])}{more}. Take unused parameters out of the model, or let zeros "
        'stand for them (missing="zeros")'
    )


class Bucket:
    """A buffer and its reduction.

    Attributes:
        plan: what it holds.
        flat: 1-d, all its gradients.
        pending: how many of them are not ready yet in this step.
        scale: what each gradient is multiplied by before the reduction: where that changes no bit, it costs less
            than dividing the sum.
    """

    def __init__(
        self,
        plan: BucketPlan,
        stream: ReductionStream,
        divisor: float,
        reduce_dtype: torch.dtype | None,
        sharded: bool,
    ) -> None:
        self.plan = plan
        self.flat = torch.zeros(plan.elements, dtype=plan.dtype, device=plan.device)
        self.pending = len(plan.members)
        self.streams: set[torch.cuda.Stream | None] = set()
        self._stream = stream
        self._wire: Tensor | None = None
        self._reduce_dtype = reduce_dtype
        exact = math.frexp(divisor)[0] == 0.5 and reduce_dtype is None
        self.scale, self._divisor = (1 / divisor, 1.0) if exact else (1.0, divisor)
        self._sharded = sharded
        self._handle: Handle | None = None

    def start(self, reducer: Reducer) -> None:
        """Begin the reduction, after everything that the streams which filled it have been given."""
        self.streams.add(self._stream.here())
        self._stream.admit(self.flat, self.streams)
        self.streams.clear()
        with self._stream.inside():
            self._wire = self.flat if self._reduce_dtype is None else self.flat.to(self._reduce_dtype)
            self._handle = reducer.scatter(self._wire) if self._sharded else reducer.start(self._wire)

    def wait(self, reducer: Reducer) -> None:
        """Until it is reduced; the sum, divided, is in `flat` (or in this replica's part of it)."""
        if self._handle is None or self._wire is None:
            return
        with self._stream.inside():
            handle, self._handle = self._handle, None
            handle.wait()
            wire, into = self._wire, self.flat
            if self._sharded:
                wire = part_of(wire, reducer.rank, reducer.size)
                into = part_of(into, reducer.rank, reducer.size)
            if self._divisor != 1:
                wire.div_(self._divisor)
            if self._reduce_dtype is not None:
                into.copy_(wire)
            self._wire = None
        self._stream.join()

    def drop(self) -> None:
        """Forget a reduction that will not be waited for; what computes next on its device comes after it."""
        self._handle = self._wire = None
        self.streams.clear()
        self.pending = len(self.plan.members)
        self._stream.join()
