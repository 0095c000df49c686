"""The log of each process of a run: ``RUN/logs/rank-N.log``.

The library logs to the logger ``penstock`` and prints nothing by itself: programs decide where its lines go. In a run they
go to a file per process, with the warnings of `warnings`, such as torch's.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO, get_args

from penstock.base.errors import ConfigError, StoppedError
from penstock.train.config.fields import LogLevel
from penstock.train.report.progress import Reporter

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
