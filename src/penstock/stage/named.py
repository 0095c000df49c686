"""What a layer can reach besides the value the layer before it returned: named values, and the loss.

A layer takes a named value by listing its name in its ``forward``, after the first parameter. Named values are the keyword
inputs of the step, cut into microbatches like the batch; and what an earlier layer handed on with `give`.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor, nn

from penstock.errors import PenstockError, SplitError
from penstock.stage.values import leaves_of

Draw = Callable[[str, Any, Callable[[], Any]], Any]


class Context:
    """What the layers of one stage share while one microbatch goes through them.

    Attributes:
        named: named values, by name.
        losses: auxiliary losses so far, by name: 0-d tensors.
        gives: the names that the stage's layers say they give.
        draw: calls a layer so that its random numbers are its own: ``draw(name, layer, call)``; None leaves them.
        quiet: names of layers that are known to draw nothing in this step, and are called as they are.
    """

    __slots__ = ("_versions", "draw", "gives", "losses", "named", "quiet")

    def __init__(
        self,
        named: dict[str, Any],
        losses: dict[str, Tensor],
        gives: frozenset[str] = frozenset(),
        draw: Draw | None = None,
        quiet: Collection[str] = (),
    ) -> None:
        self.named = named
        self.losses = losses
        self.gives = gives
        self.draw = draw
        self.quiet = quiet
        self._versions: list[tuple[str, Tensor, int]] = []
        for name, value in named.items():
            self.watch(name, value)

    def watch(self, name: str, value: object) -> None:
        """Remember a named value as it is now."""
        self._versions += [
            (name, leaf, leaf._version)
            for leaf in leaves_of(value)
            if isinstance(leaf, Tensor) and not leaf.is_inference()
        ]

    def require_unwritten(self) -> None:
        """Refuse layers that have written into a named value: others would see it or not, as the model is cut.

        Raises:
            PenstockError: one has; says which value.
        """
        for name, leaf, version in self._versions:
            if leaf._version != version:
                raise PenstockError(
                    f"a layer wrote in place into the named value {name!r}, which other layers may take, too; write into a "
                    "copy (value.clone()), or give a copy"
                )

    def add(self, name: str, value: Tensor) -> None:
        """Add to a named loss."""
        before = self.losses.get(name)
        self.losses[name] = value if before is None else before + value


_here = threading.local()


def enter(context: Context | None) -> Context | None:
    """Make this the context of `give` and `add_loss` on this thread; returns what was, to be put back."""
    before: Context | None = getattr(_here, "context", None)
    _here.context = context
    return before


def give(name: str, value: object) -> None:
    """Hand a value on to the later layers whose ``forward`` names it, past the layers between; gradients come back.

    To be called in the ``forward`` of a layer that says so: its attribute ``gives`` is a tuple with the name.

    Args:
        name: under which later layers take it.
        value: tensors, None, bool, int, float and str in tuples, lists and dicts.

    Raises:
        PenstockError: called outside a stage's forward, or the layer does not say that it gives this.
    """
    context = _context("give")
    if name not in context.gives:
        raise PenstockError(
            f"give({name!r}, ...) by a layer that does not say so; set gives = ({name!r},) on the layer"
        )
    context.named[name] = value
    context.watch(name, value)


def add_loss(value: Tensor, name: str = "auxiliary") -> None:
    """Add a scalar to the microbatch's loss, from any layer of any stage.

    It is weighed like the loss itself and reported in ``StepResult.parts[name]``.

    Args:
        value: 0-d tensor, floating point.
        name: what is reported together; several of one name in a microbatch are summed.

    Raises:
        PenstockError: called outside a stage's forward, or `value` is no scalar tensor.
    """
    context = _context("add_loss")
    if not isinstance(value, Tensor) or value.dim() != 0 or not value.is_floating_point():
        raise PenstockError(
            f"add_loss takes a scalar floating-point tensor, not {_kind(value)}; take its mean or sum first"
        )
    context.add(name, value)


def _kind(value: object) -> str:
    return (
        f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    )


def _context(what: str) -> Context:
    context: Context | None = getattr(_here, "context", None)
    if context is None:
        raise PenstockError(f"penstock.{what} was called outside the forward of a pipeline's layer")
    return context


def names_taken(layer: nn.Module) -> dict[str, bool]:
    """The named values a layer takes: name → whether it must have it (its parameter has no default)."""
    try:
        parameters = list(inspect.signature(layer.forward).parameters.values())
    except (TypeError, ValueError):  # a forward in C has no signature, and so no names
        return {}
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name: p.default is p.empty for p in parameters[1:] if p.kind in kinds}


def names_given(layer: nn.Module) -> tuple[str, ...]:
    """The named values a layer, or a layer within it, says it gives.

    Raises:
        SplitError: ``gives`` is no tuple of names.
    """
    found: dict[str, None] = {}
    for module in layer.modules():
        gives = getattr(module, "gives", ())
        if not isinstance(gives, tuple) or not all(isinstance(name, str) for name in gives):
            raise SplitError(
                f"{type(module).__name__}.gives must be a tuple of names, as ('mask',), not {gives!r}"
            )
        found.update(dict.fromkeys(gives))
    return tuple(found)
