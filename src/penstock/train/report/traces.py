"""The traces that a run keeps, and the page drawn from them at the end."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from penstock.errors import ConfigError, DataError
from penstock.runtime.pipeline import Pipeline
from penstock.show.run import read_run, write_report
from penstock.trace.folder import save_step
from penstock.train.callbacks.callback import Callback, TraceEvent

PAGE = "report.html"


class Traces:
    """Writer of the traces of a run's first step, its last, and every N-th; other steps cost nothing.

    Args:
        run: folder of the run.
        steps: number of the last step.
        every: steps between two traces, N; 0 for the first and the last step alone.
        writes: whether this process saves traces.
        callbacks: callbacks that receive the traces, too.
        say: function that reports failed writes.
    """

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

        Args:
            step: number of the step, counted from 1.
            pipe: pipeline that has just done the step.
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


def write_page(run: Path, say: Callable[[str], None]) -> Path | None:
    """Write a run's ``report.html`` from all its traces and metrics.

    Returns:
        The path of the page; None if it could not be written or Bokeh is not installed, which `say` reports together with
        the command that draws the page later.
    """
    command = f"penstock trace {run} --html {run / PAGE}"
    if find_spec("bokeh") is None:
        say(f"no report without Bokeh: pip install 'penstock[report]'; {command}")
        return None
    try:
        return write_report(read_run(run), run / PAGE)
    except ConfigError as error:  # a full disk, or no trace
        say(f"no report: {error}; later, {command}")
        return None
