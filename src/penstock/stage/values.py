"""What stages hand to each other: a value taken apart into leaves, so that any transport can carry it.

`torch.utils._pytree` is private, but it is the registry in which other libraries enter their output types; this and
`structures` are the places that use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree

from penstock.errors import BatchError, StageShapeError
from penstock.stage.structures import require_portable

PLAIN = (type(None), bool, int, float, str)
"""Leaves that travel besides tensors."""


class Message(NamedTuple):
    """A value between two stages, detached from any graph.

    Attributes:
        leaves: tensors and plain values; for a gradient, a tensor or None for each leaf that needed one.
        structure: how to put the leaves together (a pytree spec); None for one bare leaf, and for gradients.
        needs_grad: for every leaf, whether a gradient for it is to come back; of a gradient, whether a layer has set a hook
            on what it belongs to.
    """

    leaves: tuple[Any, ...]
    structure: Any = None
    needs_grad: tuple[bool, ...] = (False,)


def pack(value: object, *, travels: bool = True) -> tuple[Message, tuple[Tensor, ...]]:
    """Take a stage's output apart; returns the message to hand over and the leaves that have a graph.

    Args:
        value: the output.
        travels: whether it is to be handed over, so that its containers must be such as another process can make.

    Raises:
        StageShapeError: a leaf is neither a tensor nor None, bool, int, float or str (of a subclass, if it travels); or it
            is in a container that another process could not put together.
    """
    if isinstance(value, Tensor):
        if value.requires_grad:
            return Message((value.detach(),), None, (True,)), (value,)
        return Message((value,)), ()
    leaves, structure = _pytree.tree_flatten(value)
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *PLAIN)):
            raise StageShapeError(
                f"a stage returned a {type(leaf).__name__} among its outputs; what stages hand over is made of "
                "tensors, None, bool, int, float and str in tuples, lists, dicts, named tuples and dataclasses that are "
                "registered (torch.export.register_dataclass)"
            )
        if travels and not isinstance(leaf, Tensor) and type(leaf) not in PLAIN:
            raise _subclass(leaf)
    if travels:
        require_portable(structure)
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


class Collecting:
    """The tensors of a stage's input that collect a gradient.

    Attributes:
        leaves: as they came.
        caught: by a leaf's id, the gradient on its way to it. A leaf's own ``.grad`` is laid out as the leaf is, and the
            kernels of the backward that goes on from there, and so its last bits, depend on the layout.
        nodes: for each leaf, the node of what the layers were handed in its place, or None; empty if nothing was.
        hooked: for each leaf, whether a layer has set a hook on it; empty if no layer has.
    """

    __slots__ = ("caught", "handed", "hooked", "leaves", "nodes")

    def __init__(self) -> None:
        self.leaves: tuple[Tensor, ...] = ()
        self.caught: dict[int, Tensor] = {}
        self.handed: list[Tensor] = []
        self.nodes: tuple[Any, ...] = ()
        self.hooked: tuple[bool, ...] = ()

    def ran(self) -> None:
        """The layers have run: look for hooks, and keep nothing of what they were handed but its nodes."""
        given = self.handed or self.leaves
        for tensor in given:
            if tensor._backward_hooks:
                self.hooked = tuple(bool(each._backward_hooks) for each in given)
                break
        if self.handed:
            self.nodes = tuple(tensor.grad_fn for tensor in self.handed)
            self.handed.clear()

    @property
    def grads(self) -> list[Tensor | None]:
        """The gradients; None where there is none."""
        caught = self.caught
        if not caught:
            return [leaf.grad for leaf in self.leaves]
        return [caught.get(id(leaf), leaf.grad) for leaf in self.leaves]

    @property
    def laid_out_alike(self) -> bool:
        """Whether every leaf's own ``.grad`` would have the layout of its gradient."""
        return all(
            g is None or _strides(g) == _strides(x) for x, g in zip(self.leaves, self.grads, strict=True)
        )


def _strides(tensor: Tensor) -> object:
    """The strides that matter, those of dimensions with several elements."""
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
    message: Message, hand: Callable[[Tensor], Tensor] | None = None, into: Collecting | None = None
) -> object:
    """Put a message together.

    Args:
        message: what it is made of.
        hand: makes of each tensor the one that the value has; by default it is the message's own.
        into: is told of the tensors that collect a gradient.

    Returns:
        The value.
    """
    leaves = message.leaves
    collecting = [
        leaf.requires_grad_() for leaf, needed in zip(leaves, message.needs_grad, strict=True) if needed
    ]
    if into is not None:
        into.leaves += tuple(collecting)
    if hand is not None:
        handed = tuple(hand(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        if into is not None:
            for leaf, other, needed in zip(leaves, handed, message.needs_grad, strict=True):
                if isinstance(other, Tensor) and other is not leaf and other.grad_fn is not None:
                    other.grad_fn.register_prehook(partial(_catch, into.caught, id(leaf)))
                if needed:
                    into.handed.append(other)
        leaves = handed
    if message.structure is None:
        return leaves[0]
    return _pytree.tree_unflatten(list(leaves), message.structure)


def _catch(caught: dict[int, Tensor], leaf: int, grads: tuple[Tensor | None, ...]) -> tuple[None]:
    (grad,) = grads
    if grad is not None:
        before = caught.get(leaf)
        caught[leaf] = grad if before is None else before + grad
    return (None,)  # nothing comes to the leaf itself


def flatten(value: object) -> tuple[tuple[Any, ...], Any]:
    """A value's leaves and its structure; None for one bare tensor."""
    if isinstance(value, Tensor):
        return (value,), None
    leaves, structure = _pytree.tree_flatten(value)
    return tuple(leaves), structure


def leaves_of(value: object) -> list[Any]:
    """A value's leaves, those of all its microbatches if it is cut already."""
    return _pytree.tree_leaves(list(value.parts) if isinstance(value, Microbatches) else value)


def has_tensor(value: object) -> bool:
    """Whether there is a tensor among a value's leaves, or it is cut into microbatches already."""
    if isinstance(value, Microbatches):
        return True
    return any(isinstance(leaf, Tensor) for leaf in _pytree.tree_leaves(value))


def describe(message: Message) -> str:
    """The leaves in a few words, as ``float32 (4, 16)``."""
    return ", ".join(
        f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}"
        if isinstance(leaf, Tensor)
        else repr(leaf)
        for leaf in message.leaves
    )


def gradients(
    grads: Sequence[Tensor | None], routes: Sequence[int], hooked: Sequence[bool] = ()
) -> tuple[Message, ...]:
    """The gradients that a stage's inputs have collected, as messages for the stages that made them.

    Args:
        grads: by input that needs one.
        routes: how many of them came through each route, in order.
        hooked: whether a layer has set a hook on the input, which travels as the messages' `needs_grad`; empty if none has.
    """
    rest, there = iter(grads), iter(hooked)
    if not hooked:
        return tuple(Message(tuple(islice(rest, n)), None, (False,) * n) for n in routes)
    return tuple(Message(tuple(islice(rest, n)), None, tuple(islice(there, n))) for n in routes)


class StageState(NamedTuple):
    """What travels from a stage to the next where that is more than the last layer's output.

    Attributes:
        value: the last layer's output.
        named: named values that later stages take, by name.
        losses: auxiliary losses so far, by name.
    """

    value: Any
    named: dict[str, Any]
    losses: dict[str, Tensor]


@dataclass(frozen=True)
class Microbatches:
    """A batch that is cut already: one value a microbatch, which may differ in shape.

    Attributes:
        parts: by microbatch id.
    """

    parts: Sequence[object]


def slices(
    value: object, microbatches: int, what: str, device: torch.device | None = None
) -> tuple[list[object], list[int]]:
    """Cut a batch along dimension 0 into microbatches: every tensor in it; other leaves go to all.

    Where `microbatches` does not divide the batch, the first ones are larger by one row.

    Args:
        value: a tensor, or tensors in tuples, lists and dicts; or `Microbatches`.
        microbatches: how many.
        what: the value is, for the error.
        device: where the tensors are to be; None leaves them.

    Returns:
        The parts, and the rows (the size of dimension 0) of each.

    Raises:
        BatchError: no tensor, tensors of different batch sizes, fewer rows than microbatches, or a wrong number of parts.
    """
    if isinstance(value, Microbatches):
        if len(value.parts) != microbatches:
            raise BatchError(
                f"{what}: {len(value.parts)} microbatches were given, but there are {microbatches}"
            )
        found = [_placed(part, f"{what}, microbatch {n}", device) for n, part in enumerate(value.parts)]
        return [part for part, _ in found], [rows for _, rows in found]
    whole, size = _placed(value, what, device)
    if size < microbatches:
        raise BatchError(
            f"{what}: a batch of {size} is too small for {microbatches} microbatches; every one needs at least one row"
        )
    leaves, structure = _pytree.tree_flatten(whole)
    parts = [
        torch.tensor_split(leaf, microbatches) if isinstance(leaf, Tensor) else (leaf,) * microbatches
        for leaf in leaves
    ]
    small, larger = divmod(size, microbatches)
    return (
        [_pytree.tree_unflatten([part[n] for part in parts], structure) for n in range(microbatches)],
        [small + (n < larger) for n in range(microbatches)],
    )


def _placed(value: object, what: str, device: torch.device | None) -> tuple[object, int]:
    """The value without a graph, on the device, and the rows of its tensors."""
    leaves, structure = _pytree.tree_flatten(value)
    sizes = {leaf.shape[0] if leaf.dim() else None for leaf in leaves if isinstance(leaf, Tensor)}
    if len(sizes) != 1 or None in sizes:
        found = "no tensor" if not sizes else f"batch sizes {sorted(map(str, sizes))}"
        raise BatchError(f"{what}: {found}; it needs tensors that share dimension 0, the batch")
    (size,) = sizes
    assert size is not None
    moved = [_at(leaf.detach(), device) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return _pytree.tree_unflatten(moved, structure), size


def _at(tensor: Tensor, device: torch.device | None) -> Tensor:
    return tensor if device is None else tensor.to(device)


def same_numbers(one: Tensor, other: Tensor, exact: bool | None = None) -> bool:
    """Whether two tensors are the same numbers.

    Args:
        one, other: of any shape and dtype.
        exact: bit for bit, or up to rounding; by default bit for bit on a CPU, whose kernels are deterministic.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other):
        return True
    if one.device.type == "cpu" if exact is None else exact:
        return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    difference = torch.linalg.vector_norm((one - other).double())
    return bool(difference <= 100 * torch.finfo(one.dtype).eps * torch.linalg.vector_norm(other.double()))


def finite_sum(gradient: Tensor) -> Tensor:
    """A real number that is finite if the gradient is, as good as ever: half precision would overflow on the way."""
    if gradient.dtype is torch.float32:
        return gradient.sum()
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient.resolve_conj())
    return gradient.sum(dtype=torch.float32 if gradient.element_size() < 4 else None)
