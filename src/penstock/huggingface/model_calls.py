"""Calls of a model that something else answers, for the length of a ``with`` and in one thread."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def plain_forward(forward: Any) -> Any:
    """Return the forward that `ModelCalls` of an earlier trainer has replaced; another one itself."""
    while getattr(forward, "__globals__", {}).get("__name__") == __name__:
        forward = forward.__wrapped__
    return forward


Answer = Callable[[dict[str, Any]], Any]
"""Function from the arguments of a call, by their names, to what it returns."""


class ModelCalls:
    """The forward of a model, which is called as ever unless a thread answers its calls otherwise.

    Args:
        model: the model; gets a forward in the place of its own.
        forward: what it runs when nothing else answers.
    """

    def __init__(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        self._thread = threading.local()
        signature = inspect.signature(forward)

        @functools.wraps(forward)
        def answered(*args: Any, **kwargs: Any) -> Any:
            answer: Answer | None = getattr(self._thread, "answer", None)
            if answer is None:
                return forward(*args, **kwargs)
            by_name = dict(signature.bind_partial(*args).arguments) if args else {}
            return answer({**by_name, **kwargs})

        model.__dict__["forward"] = answered

    @property
    def answered(self) -> bool:
        """Whether this thread answers the calls."""
        return getattr(self._thread, "answer", None) is not None

    @contextmanager
    def answering(self, answer: Answer) -> Iterator[None]:
        """Return a context in which the calls of this thread are answered by a function."""
        before = getattr(self._thread, "answer", None)
        self._thread.answer = answer
        try:
            yield
        finally:
            self._thread.answer = before
