"""Progress of a run for people: a bar on a terminal, plain lines elsewhere, nothing from ranks that do not lead.

Tokenizing has a line of its own, because it may take long before a run begins.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Reporter:
    """A receiver of the run's progress and a context manager around the run; this one prints nothing."""

    def say(self, text: str) -> None:
        """Print a line."""

    def step(self, done: int, loss: float) -> None:
        """Show that a step is done; `done` counts from 1."""

    def measured(self, done: int, loss: float, tokens_per_second: float, bubble: float) -> None:
        """Show the measurements of the last steps; `bubble` is a share from 0 to 1."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class Lines(Reporter):
    """Plain lines, for logs and pipes."""

    def __init__(self, console: Console, steps: int) -> None:
        self.console = console
        self.steps = steps

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def measured(self, done: int, loss: float, tokens_per_second: float, bubble: float) -> None:
        self.say(
            f"step {done:>{len(str(self.steps))}}/{self.steps}  loss {loss:.4f}  "
            f"{tokens_per_second:,.0f} tokens/s  bubble {bubble:.1%}"
        )


class Bar(Reporter):
    """One live line on a terminal: step, loss, tokens/s and the measured bubble."""

    def __init__(self, console: Console, steps: int) -> None:
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[loss]}"),
            TextColumn("{task.fields[measured]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task("", total=steps, loss="", measured="")

    def say(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)

    def step(self, done: int, loss: float) -> None:
        self._bar.update(self._task, completed=done, loss=f"loss {loss:.4f}")

    def measured(self, done: int, loss: float, tokens_per_second: float, bubble: float) -> None:
        measured = f"{tokens_per_second:,.0f} tokens/s  bubble {bubble:.1%}"
        self._bar.update(self._task, completed=done, loss=f"loss {loss:.4f}", measured=measured)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()


def reporter(
    steps: int, *, leads: bool, to_stderr: bool = False, env: Mapping[str, str] = os.environ
) -> Reporter:
    """Return a silent reporter for a rank that does not lead, a bar on a terminal, and lines elsewhere.

    ``mpirun`` gives its processes a terminal even if its own output goes to a file, so they write lines.
    """
    if not leads:
        return Reporter()
    console = Console(stderr=to_stderr, force_terminal=False if "OMPI_COMM_WORLD_RANK" in env else None)
    return Bar(console, steps) if console.is_terminal else Lines(console, steps)


@contextmanager
def tokenizing_bar() -> Iterator[Callable[[str, float], None]]:
    """Yield a function that shows which file is being tokenized, and the share of all files that is done.

    On a terminal that is a bar on standard error, from its first call on; elsewhere a line.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield _line_once()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("tokenizing {task.description}"), BarColumn(), TaskProgressColumn())
    bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)

    def show(name: str, share: float) -> None:
        if not bar.tasks:
            bar.start()
            bar.add_task("", total=1.0)
        bar.update(bar.tasks[0].id, description=Path(name).name, completed=share)

    try:
        yield show
    finally:
        bar.stop()


def _line_once() -> Callable[[str, float], None]:
    shown: list[str] = []

    def show(name: str, share: float) -> None:
        if not shown:
            shown.append(name)
            if sys.stderr is not None:
                print(f"tokenizing {name} ...", file=sys.stderr, flush=True)

    return show
