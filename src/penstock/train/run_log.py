"""Output of a run: its progress on the terminal, and the log of each process in ``RUN/logs/rank-N.log``.

Progress is a bar on a terminal, plain lines elsewhere, nothing from ranks that do not lead. Tokenizing has a line of its
own, because it may take long before a run begins. The library itself logs to the logger ``penstock`` and prints nothing;
a run sends these lines to its file, with the warnings of `warnings`, such as torch's.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self, TextIO, get_args

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from penstock.base.errors import ConfigError, StoppedError
from penstock.train.config.fields import LogLevel


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


LEVEL = "PENSTOCK_LOG"
"""Environment variable: level of the logs; it counts more than ``train.log_level``."""

_LOGGER = logging.getLogger("penstock.run")
_FORMAT = "%(asctime)s.%(msecs)03dZ %(levelname)-7s %(threadName)s %(name)s: %(message)s"


def level_of(configured: str) -> int:
    """Return the level of the logs, as `logging` counts."""
    name = os.environ.get(LEVEL, "").strip().lower() or configured
    levels = get_args(LogLevel)
    if name not in levels:
        raise ConfigError(f"{LEVEL} must be {', '.join(levels[:-1])} or {levels[-1]}, got {name!r}")
    return logging.getLevelNamesMapping()[name.upper()]


@contextmanager
def run_log(
    run: Path, rank: int, level: int, say: Callable[[str], None], first_lines: Iterable[str] = ()
) -> Iterator[None]:
    """Append the lines of the logger ``penstock``, warnings and the error that ends the block to the process's log.

    Warnings are still shown as before. A log that cannot be written is reported once, and training continues.
    """
    path = run / "logs" / f"rank-{rank}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = _LogFile(path, say)
    except OSError as error:
        say(f"no log {path}: {error.strerror}. Training continues")
        yield
        return
    formatter = logging.Formatter(_FORMAT, "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    handler.setLevel(level)
    logger, show = logging.getLogger("penstock"), warnings.showwarning
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(level, before or level))

    def show_and_log(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        show(message, category, filename, lineno, file, line)
        if file is None:
            _LOGGER.warning("%s:%d: %s: %s", filename, lineno, category.__name__, message)

    warnings.showwarning = show_and_log
    for text in first_lines:
        _LOGGER.info("%s", text)
    try:
        yield
    except StoppedError:
        raise  # in good order, and said
    except BaseException:
        _LOGGER.exception("the run ends with an error")
        raise
    finally:
        warnings.showwarning = show
        logger.removeHandler(handler)
        logger.setLevel(before)
        handler.close()


class _LogFile(logging.Handler):
    """A file that each line is appended to at one go; failed writes are reported once."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        super().__init__()
        self._path = path
        self._say = say
        self._reported = False
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record) + "\n"
        try:
            os.write(self._file, text.encode(errors="backslashreplace"))
        except OSError as error:
            if not self._reported:
                self._reported = True
                self._say(f"{self._path} lacks lines: {error.strerror}. Training continues")

    def close(self) -> None:
        os.close(self._file)
        super().close()


class LoggedReporter(Reporter):
    """A reporter whose lines also go to the log."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def say(self, text: str) -> None:
        _LOGGER.info("%s", text)
        self._reporter.say(text)

    def step(self, done: int, loss: float) -> None:
        _LOGGER.debug("step %d done, loss %.6g", done, loss)
        self._reporter.step(done, loss)

    def measured(self, done: int, loss: float, tokens_per_second: float, bubble: float) -> None:
        _LOGGER.info(
            "step %d: loss %.6g, %.0f tokens/s, bubble %.1f%%", done, loss, tokens_per_second, 100 * bubble
        )
        self._reporter.measured(done, loss, tokens_per_second, bubble)
