"""Adapters that a ``compute_loss`` disables or sets for a reference, while other stages run with those that train."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


class AdapterSwitch:
    """The adapters of a model, and what ``compute_loss`` has made of them.

    Args:
        outer: the model that the trainer has, a ``PeftModel`` if it has adapters.
        model: the library's model in it.
    """

    def __init__(self, outer: Any, model: Any) -> None:
        self._outer, self._adapted = outer, []
        self._replaying = threading.local()
        if outer is not model:
            from peft.tuners.tuners_utils import BaseTunerLayer

            self._adapted = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
        self._trained = self.active

    @property
    def replays(self) -> bool:
        """True within a step, in a thread that runs ``compute_loss`` on the last stage."""
        return getattr(self._replaying, "on", False)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Return a context in which this thread runs ``compute_loss`` on the last stage."""
        self._replaying.on = True
        try:
            yield
        finally:
            self._replaying.on, self._replaying.adapters = False, None

    @property
    def active(self) -> tuple[str, ...]:
        """The adapters that are active; none where they are disabled."""
        if not self._adapted or self._adapted[0].disable_adapters:
            return ()
        return tuple(self._adapted[0].active_adapters)

    @property
    def has_others(self) -> bool:
        """True if ``compute_loss`` has disabled the adapters, or set others."""
        wanted: tuple[str, ...] | None = getattr(self._replaying, "adapters", None)
        return (self.active if wanted is None else wanted) != self._trained

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Return a context in which what disables or sets adapters changes nothing on the last stage.

        Other stages run with the adapters meanwhile.
        """
        if not self._adapted:
            yield
            return
        disable: Callable[[], AbstractContextManager[None]] = self._outer.disable_adapter
        set_one: Callable[..., None] = self._outer.set_adapter

        @functools.wraps(disable)
        def disable_adapter() -> AbstractContextManager[None]:
            return self._as_if(()) if self.replays else disable()

        @functools.wraps(set_one)
        def set_adapter(name: Any, *args: Any, **kwargs: Any) -> None:
            if self.replays:
                self._replaying.adapters = (name,) if isinstance(name, str) else tuple(name)
            else:
                set_one(name, *args, **kwargs)

        attributes = vars(self._outer)
        attributes.update(disable_adapter=disable_adapter, set_adapter=set_adapter)
        try:
            yield
        finally:
            del attributes["disable_adapter"], attributes["set_adapter"]

    @contextmanager
    def _as_if(self, adapters: tuple[str, ...]) -> Iterator[None]:
        before = getattr(self._replaying, "adapters", None)
        self._replaying.adapters = adapters
        try:
            yield
        finally:
            self._replaying.adapters = before

    @contextmanager
    def with_adapters(self, adapters: tuple[str, ...]) -> Iterator[None]:
        """Return a context in which other adapters are active, or none."""
        if adapters == self.active:
            yield
        elif not adapters:
            with self._outer.disable_adapter():
                yield
        else:
            before = self._outer.active_adapter
            self._outer.set_adapter(adapters[0])
            try:
                yield
            finally:
                self._outer.set_adapter(before)
