"""Messages between stages: values flattened into leaves, so that any transport can carry them.

Leaves that share memory stay together: a write into one of them is a write into the others.

`torch.utils._pytree` is private, but other libraries register their output types in it. Only this module and `structures`
use it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree

from penstock.base.errors import StageShapeError
from penstock.stage.input_grads import InputGrads, catch
from penstock.stage.memory_groups import OUTSIDE, Watched, groups_of
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

    def moved(self, target: torch.device, source: torch.device | None = None) -> Message:
        """Return the message with its tensors on a device.

        Args:
            source: device of the tensors that move; others stay, as sizes on the CPU do (default None for all).
        """
        if source == target:
            return self
        leaves = [
            leaf.to(target) if isinstance(leaf, Tensor) and source in (None, leaf.device) else leaf
            for leaf in self.leaves
        ]
        return self._replace(leaves=tuple(leaves))


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
                    new.grad_fn.register_prehook(partial(catch, input_grads.caught, id(leaf)))
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
        return "its input"
    places, _ = _pytree.tree_flatten_with_path(_pytree.tree_unflatten(list(shared.order), shared.structure))
    path = next(path for path, leaf in places if leaf == index)
    text = _pytree.keystr(path).removeprefix(".value")
    return f"value{text}" if text else "its input"


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
