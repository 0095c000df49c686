"""Messages between stages: values flattened into leaves, so that any transport can carry them.

Leaves that share memory stay together: a write into one of them is a write into the others.

`torch.utils._pytree` is private, but other libraries register their output types in it. Only this module and `structures`
use it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import islice
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree

from penstock.base.errors import PenstockError, StageShapeError
from penstock.stage.microbatches import Microbatches
from penstock.stage.structures import Shared, require_portable

PLAIN = (type(None), bool, int, float, str)
"""Types of leaves that travel, apart from tensors."""


class Message(NamedTuple):
    """A value sent between two stages, detached from any graph.

    Attributes:
        leaves: tensors and plain values; for a gradient, a tensor or None for each leaf that needed one.
        structure: pytree spec that assembles the leaves, within `Shared` if some of them share memory; None for one bare
            leaf, and for gradients.
        needs_grad: for every leaf, whether a gradient for it must come back. A gradient needs none itself: its flags are
            `hooked`, which only `grad_messages` writes.
    """

    leaves: tuple[Any, ...]
    structure: Any = None
    needs_grad: tuple[bool, ...] = (False,)

    @property
    def hooked(self) -> tuple[bool, ...]:
        """For each leaf of a gradient, whether a layer has registered a hook on the tensor it belongs to."""
        return self.needs_grad


def pack(
    value: object,
    *,
    travels: bool = True,
    linked: Mapping[int, Hashable] = MappingProxyType({}),
    outside: Sequence[Tensor] = (),
) -> tuple[Message, tuple[Tensor, ...]]:
    """Flatten a stage's output; return the message to send, and the leaves that have a graph.

    Args:
        travels: whether it is sent to another stage, so that another process must be able to build its containers.
    """
    if isinstance(value, Tensor) and not linked and not outside:
        if value.requires_grad:
            return Message((value.detach(),), None, (True,)), (value,)
        return Message((value,)), ()
    every, structure = ([value], None) if isinstance(value, Tensor) else _pytree.tree_flatten(value)
    for leaf in every:
        if not isinstance(leaf, (Tensor, *PLAIN)):
            raise StageShapeError(
                f"a stage returned a {type(leaf).__name__} among its outputs; stages exchange values made of "
                "tensors, None, bool, int, float and str in tuples, lists, dicts, named tuples and dataclasses that are "
                "registered (torch.export.register_dataclass)"
            )
        if travels and not isinstance(leaf, Tensor) and type(leaf) not in PLAIN:
            raise _subclass(leaf)
    if travels and structure is not None:
        require_portable(structure)
    leaves, structure = share(every, structure, linked, outside)
    roots = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad)
    return (
        Message(
            tuple(
                leaf.detach() if isinstance(leaf, Tensor) and leaf.requires_grad else leaf for leaf in leaves
            ),
            structure,
            tuple(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves),
        ),
        roots,
    )


def share(
    leaves: Sequence[Any],
    structure: Any,
    linked: Mapping[int, Hashable] = MappingProxyType({}),
    outside: Sequence[Tensor] = (),
    once: bool = True,
) -> tuple[Sequence[Any], Any]:
    """Return the leaves and the structure of a message, where leaves of a value may share memory.

    Args:
        once: whether one tensor at several places becomes one leaf (default True).
    """
    tensors = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if len(tensors) < 2 and not linked and not outside:
        return leaves, structure
    first: dict[int, int] = {}
    kept: list[int] = []
    order = []
    for n, leaf in enumerate(leaves):
        same = first.setdefault(id(leaf), len(kept)) if once and isinstance(leaf, Tensor) else len(kept)
        if same == len(kept):
            kept.append(n)
        order.append(same)
    found = iter(groups_of([leaves[n] for n in kept if isinstance(leaves[n], Tensor)], linked, outside))
    groups = tuple(next(found) if isinstance(leaves[n], Tensor) else 0 for n in kept)
    if len(kept) == len(leaves) and not any(groups):
        return leaves, structure
    return [leaves[n] for n in kept], Shared(structure, tuple(order), groups)


class InputGrads:
    """Input tensors of a stage that collect a gradient.

    Attributes:
        caught: gradients by leaf id, caught before they reach the leaf. A leaf's ``.grad`` gets the layout of the leaf, and
            the kernels of the earlier stages' backwards, and so the last bits, depend on the layout.
        replacements: tensors that the layers get in place of the leaves; kept only while the layers run.
    """

    __slots__ = ("caught", "hooked", "leaves", "nodes", "replacements")

    def __init__(self) -> None:
        self.leaves: tuple[Tensor, ...] = ()
        self.caught: dict[int, Tensor] = {}
        self.replacements: list[Tensor] = []
        self.nodes: tuple[Any, ...] = ()
        self.hooked: tuple[bool, ...] = ()

    def after_forward(self) -> None:
        """Record the hooks that the layers have registered, and keep only the nodes of the replacements."""
        inputs = self.replacements or self.leaves
        for tensor in inputs:
            if tensor._backward_hooks:
                self.hooked = tuple(bool(each._backward_hooks) for each in inputs)
                break
        if self.replacements:
            self.nodes = tuple(tensor.grad_fn for tensor in self.replacements)
            self.replacements.clear()

    @property
    def grads(self) -> list[Tensor | None]:
        """Gradients of the leaves; None for a leaf without one."""
        caught = self.caught
        if not caught:
            return [leaf.grad for leaf in self.leaves]
        return [caught.get(id(leaf), leaf.grad) for leaf in self.leaves]

    @property
    def layouts_match(self) -> bool:
        """True if every leaf's ``.grad`` would have the layout of the gradient that reaches it."""
        return all(
            g is None or _strides(g) == _strides(x) for x, g in zip(self.leaves, self.grads, strict=True)
        )


def _strides(tensor: Tensor) -> object:
    """Return the strides of the dimensions with several elements; the others have no effect."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor.layout
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _subclass(leaf: object) -> StageShapeError:
    kind = type(leaf)
    base = next(base for base in kind.__mro__ if base in PLAIN).__name__
    return StageShapeError(
        f"a stage returned {leaf!r:.80} of the type {kind.__module__}.{kind.__qualname__} among its outputs, which would "
        f"be a plain {base} in another process; hand over {base}(value), or a tensor"
    )


def unpack(
    message: Message,
    transform: Callable[[Tensor], Tensor] | None = None,
    input_grads: InputGrads | None = None,
    watched: list[Watched] | None = None,
) -> object:
    """Assemble the value of a message.

    Args:
        input_grads: record of the tensors that collect a gradient; filled in.
        watched: records of the tensors that share memory; filled in.
    """
    leaves, structure = message.leaves, message.structure
    need_grad = tuple(
        [leaf.requires_grad_() for leaf, needed in zip(leaves, message.needs_grad, strict=True) if needed]
    )
    if input_grads is not None:
        input_grads.leaves += need_grad
    if transform is not None:
        replacements = tuple(transform(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        if input_grads is not None:
            for leaf, new, needed in zip(leaves, replacements, message.needs_grad, strict=True):
                if isinstance(new, Tensor) and new is not leaf and new.grad_fn is not None:
                    new.grad_fn.register_prehook(partial(_catch, input_grads.caught, id(leaf)))
                if needed:
                    input_grads.replacements.append(new)
        leaves = replacements
    if isinstance(structure, Shared):
        if watched is not None:
            watched += _watched(leaves, structure, len(watched))
        leaves, structure = tuple([leaves[n] for n in structure.order]), structure.structure
    if structure is None:
        return leaves[0]
    return _pytree.tree_unflatten(list(leaves), structure)


def _watched(leaves: Sequence[Any], shared: Shared, message: int) -> list[Watched]:
    """Return records of the leaves that share memory; groups of several messages differ by a number of the message."""
    return [
        Watched.of(leaf, group if group == OUTSIDE else (message, group), _name(shared, n))
        for n, (leaf, group) in enumerate(zip(leaves, shared.groups, strict=True))
        if group
    ]


def _name(shared: Shared, index: int) -> str:
    """Return the place of a message's leaf in the value, as Python writes it."""
    if shared.structure is None:
        return "what it was given"
    places, _ = _pytree.tree_flatten_with_path(_pytree.tree_unflatten(list(shared.order), shared.structure))
    path = next(path for path, leaf in places if leaf == index)
    text = _pytree.keystr(path).removeprefix(".value")
    return f"value{text}" if text else "what it was given"


def _catch(caught: dict[int, Tensor], leaf: int, grads: tuple[Tensor | None, ...]) -> tuple[None]:
    (grad,) = grads
    if grad is not None:
        before = caught.get(leaf)
        caught[leaf] = grad if before is None else before + grad
    return (None,)  # the leaf itself gets no gradient


def flatten(value: object) -> tuple[tuple[Any, ...], Any]:
    """Return a value's leaves and its structure; the structure of a bare tensor is None."""
    if isinstance(value, Tensor):
        return (value,), None
    leaves, structure = _pytree.tree_flatten(value)
    return tuple(leaves), structure


def leaves_of(value: object) -> list[Any]:
    """Return a value's leaves; of `Microbatches`, the leaves of all parts."""
    return _pytree.tree_leaves(list(value.parts) if isinstance(value, Microbatches) else value)


def has_tensor(value: object) -> bool:
    """Return whether a value has a tensor among its leaves, or is `Microbatches`."""
    if isinstance(value, Microbatches):
        return True
    return any(isinstance(leaf, Tensor) for leaf in _pytree.tree_leaves(value))


def describe(message: Message) -> str:
    """Describe the leaves briefly, as in ``float32 (4, 16)``."""
    return ", ".join(
        f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}"
        if isinstance(leaf, Tensor)
        else repr(leaf)
        for leaf in message.leaves
    )


def grad_messages(
    grads: Sequence[Tensor | None], grad_counts: Sequence[int], hooked: Sequence[bool] = ()
) -> tuple[Message, ...]:
    """Return the gradients of a stage's inputs as messages to the stages that made the inputs.

    Args:
        hooked: for each input, whether a layer has registered a hook on it; sent in the place of `needs_grad`. Empty if no
            layer has.
    """
    grad, hook = iter(grads), iter(hooked)
    if not hooked:
        return tuple(Message(tuple(islice(grad, n)), None, (False,) * n) for n in grad_counts)
    return tuple(Message(tuple(islice(grad, n)), None, tuple(islice(hook, n))) for n in grad_counts)


class StageState(NamedTuple):
    """State that travels from a stage to the next, where there is more than the last layer's output."""

    value: Any
    named: dict[str, Any]
    losses: dict[str, Tensor]


def same_values(one: Tensor, other: Tensor, exact: bool | None = None) -> bool:
    """Return whether two tensors have the same shape, dtype and values.

    Args:
        exact: True to compare bit for bit, False up to rounding; by default bit for bit on a CPU, whose kernels are
            deterministic.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other):
        return True
    if one.device.type == "cpu" if exact is None else exact:
        return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    difference = torch.linalg.vector_norm((one - other).double())
    # Sums of thousands of terms in another order differ by some tens of units in the last place.
    return bool(difference <= 100 * torch.finfo(one.dtype).eps * torch.linalg.vector_norm(other.double()))


def finite_sum(gradient: Tensor) -> Tensor:
    """Return a real sum that is finite only if the whole gradient is; half precision, which would overflow, in float32."""
    if gradient.dtype is torch.float32:
        return gradient.sum()
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient.resolve_conj())
    return gradient.sum(dtype=torch.float32 if gradient.element_size() < 4 else None)


OUTSIDE = -1
"""Group of tensors that share memory with one that travels by another way."""

_MAX_WORK = 100_000
"""Bound of NumPy's search for a common address; where it does not suffice, memory counts as shared."""


def storage_of(tensor: Tensor) -> int | None:
    """Return the address of a tensor's storage; None if it has no plain memory."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not plain or tensor.is_meta or tensor.is_nested or not tensor.numel():
        return None
    return tensor.data_ptr() - int(tensor.storage_offset()) * tensor.element_size() or None


def groups_of(
    tensors: Sequence[Tensor], linked: Mapping[int, Hashable], outside: Sequence[Tensor] = ()
) -> list[int]:
    """Return for each tensor the number of its group of tensors that share memory; 0 if it shares none, or `OUTSIDE`.

    Views of one storage share memory if some element of it is in both: parts of a tensor as of ``chunk`` do not.

    Args:
        linked: by address of a storage, a key of storages that count as one, or `OUTSIDE`.
    """
    every = [*tensors, *outside]
    storages = [storage_of(tensor) for tensor in every]
    known = [storage for storage in storages if storage is not None]
    # The usual case, found without NumPy: every tensor has memory of its own.
    if len(set(known)) == len(known) and not any(storage in linked for storage in known):
        return [0] * len(tensors)
    twice = {storage for storage in known if known.count(storage) > 1}
    places = {n: (every[n].data_ptr(), _extent(every[n])) for n, s in enumerate(storages) if s in twice}
    groups: list[set[Hashable]] = []  # of indices and keys
    for n, storage in enumerate(storages):
        if storage is None:
            continue
        joined: set[Hashable] = {("tensor", n)}
        if storage in linked:
            joined.add(linked[storage])
        if n >= len(tensors):
            joined.add(OUTSIDE)
        near = {("tensor", m) for m in range(n) if storages[m] == storage and _share(*places[m], *places[n])}
        rest = []
        for group in groups:
            # OUTSIDE is a mark, and no tie between groups.
            if group & near or group & (joined - {OUTSIDE}):
                joined |= group
            else:
                rest.append(group)
        groups = [*rest, joined]
    found = [0] * len(tensors)
    for number, group in enumerate(groups, 1):
        members = [n for n in range(len(tensors)) if ("tensor", n) in group]
        if len(members) > 1 or OUTSIDE in group:
            for n in members:
                found[n] = OUTSIDE if OUTSIDE in group else number
    return found


def shares_memory(tensors: Sequence[Tensor]) -> bool:
    """Return whether one of some tensors is there twice, or shares memory with another."""
    return len({id(tensor) for tensor in tensors}) < len(tensors) or any(groups_of(tensors, {}))


_Extent = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides in bytes, and bytes of an element."""


def _extent(tensor: Tensor) -> _Extent:
    size = tensor.element_size()
    return tuple(tensor.shape), tuple(step * size for step in tensor.stride()), size


def _share(address: int, extent: _Extent, other_address: int, other: _Extent) -> bool:
    return (address == other_address and extent == other) or _common_address(
        other_address - address, extent, other
    )


@lru_cache(4096)
def _common_address(distance: int, one: _Extent, other: _Extent) -> bool:
    start = 1 << 40  # of memory that is never read
    try:
        one_array, other_array = _array(start, one), _array(start + distance, other)
        return np.shares_memory(one_array, other_array, _MAX_WORK)  # type: ignore[arg-type]  # too narrow in the stubs
    except np.exceptions.TooHardError:
        return True


def _array(address: int, extent: _Extent) -> Any:
    shape, strides, size = extent

    interface = {
        "data": (address, True), "shape": shape, "strides": strides, "typestr": f"|V{size}", "version": 3,
    }  # fmt: skip
    return np.asarray(SimpleNamespace(__array_interface__=interface))


class Watched(NamedTuple):
    """A tensor that shares memory with others of its group, which must not be written.

    Attributes:
        before: its version, or a copy where tensors have no version.
    """

    tensor: Tensor
    group: Hashable
    name: str
    before: int | Tensor

    @classmethod
    def of(cls, tensor: Tensor, group: Hashable, name: str) -> Watched:
        """Return the record of a tensor before layers run."""
        return cls(tensor, group, name, tensor.clone() if tensor.is_inference() else tensor._version)

    @property
    def written(self) -> bool:
        """True if it was written into."""
        if isinstance(self.before, Tensor):
            return not torch.equal(self.tensor, self.before)
        return self.tensor._version != self.before


def require_unwritten(watched: Sequence[Watched]) -> None:
    """Check that layers have not written into tensors that share memory."""
    for one in watched:
        if one.written:
            others = [other.name for other in watched if other.group == one.group and other is not one]
            with_what = ", ".join(others) if others else "the target, or a value that another layer was given"
            raise PenstockError(
                f"a layer writes in place into {one.name}, which shares memory with {with_what}; where the model is split, "
                "that would not see the write. Write into a copy (value.clone())"
            )
