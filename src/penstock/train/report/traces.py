"""The traces that a run keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from penstock.base.errors import DataError
from penstock.runtime.pipeline import Pipeline
from penstock.trace.folder import save_step
from penstock.train.callbacks.callback import Callback, TraceEvent


class Traces:
    """Writer of the traces of a run's first step, its last, and every N-th; other steps cost nothing."""

    def __init__(
        self,
        run: Path,
        steps: int,
        every: int,
        writes: bool,
        callbacks: Callback,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.run = run
        self.steps = steps
        self.every = every
        self._writes = writes
        self._callbacks = callbacks
        self._say = say
        self._began = False

    def after(self, step: int, pipe: Pipeline) -> None:
        """Save the trace of a step if it is due; every process calls this after every step, before an evaluation.

        With several replicas only the first one's trace is saved; processes of the others return at once.
        """
        first, self._began = not self._began, True
        due = first or step == self.steps or (self.every and step % self.every == 0)
        if not due or not pipe.is_first:
            return
        trace = pipe.gather_trace()
        assert trace is not None, "a step has just been done"
        if self._writes:
            try:
                save_step(self.run, step, trace)
            except DataError as error:
                self._say(f"{error}. Training continues")
            self._callbacks.on_trace(TraceEvent(step, trace))
