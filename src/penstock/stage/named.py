"""Values that a layer can reach besides the previous layer's output: named values, and the loss.

A layer takes a named value by listing its name in its ``forward``, after the first parameter. Named values are the keyword
inputs of the step, split into microbatches like the batch, and the values that earlier layers passed to `give`.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from penstock.base.errors import PenstockError, SplitError
from penstock.stage.values import leaves_of

IsolatedCall = Callable[[str, Any, Callable[[], Any]], Any]
"""``isolated_call(name, layer, call)`` calls a layer within `isolated_rng` and returns its output."""


class Context:
    """State that the layers of one stage share while they run on one microbatch.

    Attributes:
        rng_free: names of layers that are known to draw nothing in this step, and are called directly.
        microbatch: number of the microbatch in the global batch; None outside of a step.
        layer: name of the layer that runs now; empty before the first.
    """

    __slots__ = ("_versions", "gives", "isolated_call", "layer", "losses", "microbatch", "named", "rng_free")

    def __init__(
        self,
        named: dict[str, Any],
        losses: dict[str, Tensor],
        gives: frozenset[str] = frozenset(),
        isolated_call: IsolatedCall | None = None,
        rng_free: Collection[str] = (),
        microbatch: int | None = None,
    ) -> None:
        self.named = named
        self.losses = losses
        self.gives = gives
        self.isolated_call = isolated_call
        self.rng_free = rng_free
        self.microbatch = microbatch
        self.layer = ""
        self._versions: list[tuple[str, Tensor, int]] = []
        for name, value in named.items():
            self.watch(name, value)

    def watch(self, name: str, value: object) -> None:
        """Record the version counters of a named value's tensors."""
        self._versions += [
            (name, leaf, leaf._version)
            for leaf in leaves_of(value)
            if isinstance(leaf, Tensor) and not leaf.is_inference()
        ]

    def require_unwritten(self) -> None:
        """Check that no layer has written into a named value: the split would decide which layers see the write."""
        for name, leaf, version in self._versions:
            if leaf._version != version:
                raise PenstockError(
                    f"a layer wrote in place into the named value {name!r}, which other layers may take, too; write into a "
                    "copy (value.clone()), or give a copy"
                )

    def add(self, name: str, value: Tensor) -> None:
        total = self.losses.get(name)
        self.losses[name] = value if total is None else total + value


_thread = threading.local()


def set_context(context: Context | None) -> Context | None:
    """Set the context of `give` and `add_loss` on this thread; return the previous one, to be restored."""
    previous: Context | None = getattr(_thread, "context", None)
    _thread.context = context
    return previous


def current_context() -> Context | None:
    """Return the context of the stage that runs on this thread; None outside of one."""
    context: Context | None = getattr(_thread, "context", None)
    return context


@contextmanager
def within(context: Context) -> Iterator[Context]:
    """Return a context manager in which `give` and `add_loss` on this thread reach a context."""
    previous = set_context(context)
    try:
        yield context
    finally:
        set_context(previous)


def give(name: str, value: object) -> None:
    """Pass a value to the later layers whose ``forward`` names it, past the layers between; gradients flow back.

    Call it in the ``forward`` of a layer that declares it: the layer's attribute ``gives`` is a tuple with the name.

    Args:
        name: name of the value, as later layers take it.
        value: tensors, None, bool, int, float and str in tuples, lists and dicts.

    Raises:
        PenstockError: if it is called outside a stage's forward, or the layer does not declare the name.
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

    It is weighted like the loss itself and reported in ``StepResult.parts[name]``.

    Args:
        value: 0-d tensor of a floating-point dtype.
        name: name of the loss in the report (default "auxiliary"); losses of one name in a microbatch are summed.

    Raises:
        PenstockError: if it is called outside a stage's forward, or `value` is not a scalar tensor.
    """
    context = _context("add_loss")
    if not isinstance(value, Tensor) or value.dim() != 0 or not value.is_floating_point():
        raise PenstockError(
            f"add_loss takes a scalar floating-point tensor, got {_kind(value)}; take its mean or sum first"
        )
    context.add(name, value)


def _kind(value: object) -> str:
    return (
        f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    )


def _context(function: str) -> Context:
    context: Context | None = getattr(_thread, "context", None)
    if context is None:
        raise PenstockError(f"penstock.{function} was called outside the forward of a pipeline's layer")
    return context


def names_taken(layer: nn.Module) -> dict[str, bool]:
    """Return the named values a layer takes: name → whether it is required (its parameter has no default)."""
    try:
        parameters = list(inspect.signature(layer.forward).parameters.values())
    except (TypeError, ValueError):  # a forward written in C has no signature, and so no names
        return {}
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name: p.default is p.empty for p in parameters[1:] if p.kind in kinds}


def names_given(layer: nn.Module) -> tuple[str, ...]:
    """Return the names that a layer and the modules within it declare in ``gives``."""
    names: dict[str, None] = {}
    for module in layer.modules():
        gives = getattr(module, "gives", ())
        if not isinstance(gives, tuple) or not all(isinstance(name, str) for name in gives):
            raise SplitError(
                f"{type(module).__name__}.gives must be a tuple of names, such as ('mask',), got {gives!r}"
            )
        names.update(dict.fromkeys(gives))
    return tuple(names)
