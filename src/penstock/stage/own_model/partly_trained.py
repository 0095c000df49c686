"""Mark of a model that is trained in processes: here only some of its layers have their trained weights.

The mark is a set of hooks of the model, so copies and pickles of the model have it, too.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_SKIPPED = ("torch.", "penstock.")
_CALL_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _Mark:
    """The hooks of a marked model.

    Attributes:
        names: names of the parameters that are trained in this process.
        trained: whether a training step has run since all weights were up to date.
        silent: whether uses are Penstock's own, and give no warning.
    """

    def __init__(self) -> None:
        self.names: frozenset[str] = frozenset()
        self.trained = self.silent = False

    def before_forward(self, model: nn.Module, *_: Any) -> None:
        self._warn(model, "was called")

    def before_state_dict(self, model: nn.Module, *_: Any) -> None:
        self._warn(model, "was asked for its state_dict")

    def after_load(self, *_: Any) -> None:
        self.trained = False

    def _warn(self, model: nn.Module, use: str) -> None:
        if self.trained and not self.silent:
            warnings.warn(
                f"the {type(model).__name__} given to a Pipeline {use}, but other processes train some of its layers, "
                "whose weights here are not up to date; call pipe.evaluate or pipe.full_state_dict, or first, on every "
                "rank, model.load_state_dict(pipe.full_state_dict())",
                RuntimeWarning,
                stacklevel=_user_level(),
            )


def _user_level() -> int:
    """Return the stack level, for ``warnings.warn`` in the caller, of the first frame that is neither torch's nor ours."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and f"{frame.f_globals.get('__name__', '')}.".startswith(_SKIPPED):
        level, frame = level + 1, frame.f_back
    return level


def mark_trained(model: nn.Module, names: frozenset[str]) -> None:
    """Mark a model after a training step: uses of the whole model warn, until its ``load_state_dict`` is called.

    Args:
        model: the model.
        names: names of the parameters that this process trains.
    """
    mark = _mark_of(model)
    if mark is None:
        mark = _Mark()
        model.register_forward_pre_hook(mark.before_forward)
        model.register_state_dict_pre_hook(mark.before_state_dict)  # type: ignore[no-untyped-call]  # not annotated
        model.register_load_state_dict_post_hook(mark.after_load)  # type: ignore[no-untyped-call]  # likewise
    mark.names, mark.trained = names, True


def up_to_date_names(model: nn.Module) -> frozenset[str] | None:
    """Return the names of the parameters whose values here are the trained ones; None if all are."""
    mark = _mark_of(model)
    return mark.names if mark is not None and mark.trained else None


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether a call of a module runs hooks besides those of the mark."""
    return any(_owner(hook) is None for kind in _CALL_HOOKS for hook in vars(module)[kind].values())


@contextmanager
def without_warning(model: nn.Module | None) -> Iterator[None]:
    """Return a context in which uses of the model give no warning."""
    mark = None if model is None else _mark_of(model)
    if mark is None:
        yield
        return
    mark.silent = True
    try:
        yield
    finally:
        mark.silent = False


def _owner(hook: object) -> _Mark | None:
    owner = getattr(hook, "__self__", None)
    return owner if isinstance(owner, _Mark) else None


def _mark_of(model: nn.Module) -> _Mark | None:
    return next((m for hook in model._forward_pre_hooks.values() if (m := _owner(hook)) is not None), None)
