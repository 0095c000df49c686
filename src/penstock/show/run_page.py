"""The page of a run, ``report.html``: drawn again and again during the run, and a last time at its end.

A process of its own draws the page during the run. A thread would hold the interpreter for most of a second, while
ranks that are threads, and the launches of a GPU's kernels, wait.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Self

from penstock.base.errors import PenstockError, describe_error
from penstock.base.host import utc
from penstock.show.run import read_run, write_report

PAGE = "report.html"
EVERY = 60
"""Seconds from the end of one drawing to the next: a drawing costs busy ranks on two cores about three seconds."""
RELOAD = 10
"""Seconds between two reloads of the page in a browser."""

_NICENESS = 10
"""Of the process that draws: a tenth of a busy core. At 19 it gets a hundredth, and a page takes minutes."""
_LOGGER = logging.getLogger("penstock.run")


class RunPage:
    """Writer of a run's page; a context manager that ends what still draws.

    Args:
        run: folder of the run; None writes nothing, as on every rank but the first, or without ``train.report``.
    """

    def __init__(self, run: Path | None, steps: int, say: Callable[[str], None]) -> None:
        self._run = run
        self._steps = steps
        self._say = say
        self._draws = run is not None and find_spec("bokeh") is not None
        self._stepped = False
        self._due: float | None = None
        self._drawing: subprocess.Popen[str] | None = None
        self._reported = False

    def after_step(self, done: int) -> None:
        """Begin to draw the page if it is due, `EVERY` seconds after the first step or the end of the drawing before."""
        self._stepped = True
        if not self._draws or self._still_drawing():
            return
        now = time.monotonic()
        if self._due is None:
            self._due = now + EVERY
        elif now >= self._due:
            self._due = None
            self._begin(done)

    def finish(self, note: str = "") -> Path | None:
        """Write the last version of the page, which does not reload itself.

        An error is reported, with the command that draws the page later, and not raised: the run is worth more.
        """
        self._stop()
        if self._run is None or (note and not self._stepped):
            return None
        command = f"penstock trace {self._run} --html {self._run / PAGE}"
        if find_spec("bokeh") is None:
            self._say(f"no report without Bokeh: pip install 'penstock-torch[report]'; {command}")
            return None
        try:
            return write_report(read_run(self._run), self._run / PAGE, note=note)
        except Exception as error:
            _LOGGER.error("the report could not be written", exc_info=error)
            text = str(error) if isinstance(error, PenstockError) else describe_error(error)
            self._say(f"no report: {text}; later, {command}")
            return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._stop()

    def _begin(self, done: int) -> None:
        note = (
            f"The run is under way: step {done:,} of {self._steps:,} was done at {utc()}. "
            "This page reloads itself until the run ends."
        )
        try:
            self._drawing = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(self._run), note, str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                # Ctrl-C is for the run. In a session of its own it would keep its priority only among itself, where the
                # kernel divides time among sessions.
                process_group=0,
            )
        except OSError as error:
            self._report_once(str(error))

    def _still_drawing(self) -> bool:
        if self._drawing is None:
            return False
        if self._drawing.poll() is None:
            return True
        _, text = self._drawing.communicate()
        if self._drawing.returncode:
            self._report_once(text.strip().rpartition("\n")[2] or f"exit code {self._drawing.returncode}")
        self._drawing = None
        return False

    def _report_once(self, text: str) -> None:
        if not self._reported:
            self._reported = True
            self._say(f"no report during the run: {text}. Training continues")

    def _stop(self) -> None:
        """End the process that draws; what it has not finished takes no effect."""
        self._draws = False
        if self._drawing is not None:
            self._drawing.kill()
            self._drawing.communicate()
            self._drawing = None


def draw_live(run: Path, note: str, parent: int) -> None:
    """Draw the page of a run that is under way, at a low priority."""
    os.nice(_NICENESS)
    view = read_run(run)
    if os.getppid() == parent:
        write_report(view, run / PAGE, note=note, reload_seconds=RELOAD)


if __name__ == "__main__":
    try:
        draw_live(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    except PenstockError as error:
        sys.exit(str(error))
