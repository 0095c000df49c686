"""Calls of a model that something else answers, for the length of a ``with`` and in one thread."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

Answer = Callable[[dict[str, Any]], Any]
"""Function from the arguments of a call, by their names, to what it returns."""


class ModelCalls:
    """The calls of a model's forward, which a thread may answer while it is `watched`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._thread = threading.local()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Return a context in which the calls reach `answering`; the model is left as it was, so that it can be copied."""
        attributes = vars(self._model)
        before = attributes.get("forward")
        forward: Callable[..., Any] = self._model.forward
        signature = inspect.signature(forward)

        @functools.wraps(forward)
        def answered(*args: Any, **kwargs: Any) -> Any:
            answer: Answer | None = getattr(self._thread, "answer", None)
            if answer is None:
                return forward(*args, **kwargs)
            by_name = dict(signature.bind_partial(*args).arguments) if args else {}
            return answer({**by_name, **kwargs})

        attributes["forward"] = answered
        try:
            yield
        finally:
            attributes.pop("forward")
            if before is not None:
                attributes["forward"] = before

    @contextmanager
    def answering(self, answer: Answer) -> Iterator[None]:
        """Return a context in which the calls of this thread are answered by a function."""
        before = getattr(self._thread, "answer", None)
        self._thread.answer = answer
        try:
            yield
        finally:
            self._thread.answer = before
