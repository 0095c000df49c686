"""Callbacks of a run, called one after another; an error of one neither ends the run nor keeps the others from the event."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from penstock.base.errors import ConfigError, PenstockError, first_line
from penstock.train.callbacks.callback import (
    Callback,
    EndEvent,
    EvaluateEvent,
    SaveEvent,
    StartEvent,
    StepEvent,
    TraceEvent,
)

_LOGGER = logging.getLogger(__name__)


class CallbackList(Callback):
    """Several callbacks as one, which can be called in an own loop as well.

    Args:
        callbacks: the callbacks, in the order in which they are called.
        say: function that reports a callback that raised (default: the log).
    """

    def __init__(
        self, callbacks: Iterable[Callback], say: Callable[[str], object] = lambda text: None
    ) -> None:
        self._say = say
        self._callbacks = list(callbacks)
        self._failed: set[int] = set()
        self._reported: set[tuple[int, str]] = set()
        self._started: list[Callback] = []

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def on_start(self, event: StartEvent) -> None:
        """Pass the event to every callback.

        Raises:
            ConfigError: if one raises; names it. Those before it have received `on_end`.
        """
        for callback in self._callbacks:
            try:
                callback.on_start(event)
            except (Exception, SystemExit) as error:
                self.on_end(EndEvent(outcome="failed", step=event.step, error=str(error)))
                if isinstance(error, PenstockError):
                    raise
                raise ConfigError(
                    f"the callback {_name(callback)} failed in on_start: {_text(error)}"
                ) from error
            self._started.append(callback)

    def on_step(self, event: StepEvent) -> None:
        self._each("on_step", event)

    def on_evaluate(self, event: EvaluateEvent) -> None:
        self._each("on_evaluate", event)

    def on_save(self, event: SaveEvent) -> None:
        self._each("on_save", event)

    def on_trace(self, event: TraceEvent) -> None:
        self._each("on_trace", event)

    def on_end(self, event: EndEvent) -> None:
        """Pass the event to every callback that was started, also those that failed; a second call does nothing."""
        self._failed.clear()
        self._each("on_end", event)
        self._started.clear()

    def _each(self, method: str, event: object) -> None:
        """Pass an event to every callback that was started and has not failed."""
        for number, callback in enumerate(self._started):
            if number in self._failed:
                continue
            try:
                getattr(callback, method)(event)
            except OSError as error:
                self._report(number, callback, method, error, "it misses such events")
            except (Exception, SystemExit) as error:
                self._failed.add(number)
                self._report(number, callback, method, error, "it receives no more events but on_end")

    def _report(
        self, number: int, callback: Callback, method: str, error: BaseException, consequence: str
    ) -> None:
        _LOGGER.error("the callback %s failed in %s", _name(callback), method, exc_info=error)
        if (number, method) not in self._reported:
            self._reported.add((number, method))
            self._say(
                f"the callback {_name(callback)} failed in {method}: {_text(error)}; {consequence}. Training continues"
            )


def _name(callback: Callback) -> str:
    kind = type(callback)
    return (
        kind.__name__ if kind.__module__.startswith("penstock.") else f"{kind.__module__}:{kind.__qualname__}"
    )


def _text(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {first_line(error)}"
