"""The traces of a run: which steps are kept, and the page that is made of them at the end."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from penstock.errors import ConfigError, DataError
from penstock.runtime.pipeline import Pipeline
from penstock.show.run import read_run, write_report
from penstock.trace.folder import save_step
from penstock.train.report.metrics_writer import MetricsWriter

PAGE = "report.html"


class Traces:
    """Keeps the traces of a run's first step, its last, and every N-th; other steps cost nothing.

    Args:
        run: the run's folder.
        steps: the last step's number.
        every: N; 0 for the first and the last alone.
        metrics: where pictures go; this process writes if it does.
        say: where it is told what could not be written.
    """

    def __init__(
        self,
        run: Path,
        steps: int,
        every: int,
        metrics: MetricsWriter,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.run = run
        self.steps = steps
        self.every = every
        self._metrics = metrics
        self._say = say
        self._began = False

    def after(self, step: int, pipe: Pipeline) -> None:
        """Keep the trace of a step if it is one of those; every process calls it after every step, before an evaluation.

        Of pipelines side by side the first one's is kept, and the others' processes go on at once.

        Args:
            step: counted from 1.
            pipe: right after the step.
        """
        first, self._began = not self._began, True
        wanted = first or step == self.steps or (self.every and step % self.every == 0)
        if not wanted or not pipe.is_first:
            return
        trace = pipe.gather_trace()
        assert trace is not None, "a step has just been done"
        if self._metrics.writes:
            try:
                save_step(self.run, step, trace)
            except DataError as error:
                self._say(f"{error}. Training goes on")
            self._metrics.timeline(step, trace)


def write_page(run: Path, say: Callable[[str], None]) -> Path | None:
    """Write a run's ``report.html``, of all its traces and metrics.

    Returns:
        Where it is; None where it could not be written or Bokeh is not installed, and then `say` was told why and how to
        get it.
    """
    how = f"penstock trace {run} --html {run / PAGE}"
    if find_spec("bokeh") is None:
        say(f"no report without Bokeh: pip install 'penstock[report]'; {how}")
        return None
    try:
        return write_report(read_run(run), run / PAGE)
    except ConfigError as error:  # a full disk, or no trace
        say(f"no report: {error}; later, {how}")
        return None
