"""Standard output that a long run survives: ``| head`` that has ended, a closed terminal, a log on a full disk."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console

_GONE = (errno.EPIPE, errno.EIO)
"""Errors after which no reader will return: its end of the pipe, or the terminal, was closed."""

UNWRITTEN = (*_GONE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of writing to standard output that are not the command's fault."""


def drop_output() -> None:
    """Send what standard output has not yet written, and all that follows, nowhere."""
    _discard(sys.stdout)


def _discard(stream: TextIO) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def table_console() -> Console:
    """Return a console for wide tables: the terminal, or 110 columns if the output goes elsewhere."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=110)


def outlive_readers() -> None:
    """Drop output that standard output and standard error do not accept, from now on, and say so once; never raise.

    This lasts until the process ends, because errors are printed and streams flushed at its very end.
    """
    if sys.stdout is not None and not isinstance(sys.stdout, _Unfailing):
        sys.stdout = cast(TextIO, _Unfailing(sys.stdout, "stdout"))
    if sys.stderr is not None and not isinstance(sys.stderr, _Unfailing):
        sys.stderr = cast(TextIO, _Unfailing(sys.stderr, "stderr"))


class _Unfailing:
    """A text stream whose writes do not fail."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream = stream
        self._name = name
        self._reported = False

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lose(self, error: OSError) -> None:
        if error.errno in _GONE:
            # The stream's buffer, and output that bypasses it, has to go somewhere.
            with suppress(OSError):
                _discard(self._stream)
        if not self._reported:
            self._reported = True
            if self._name == "stdout" and sys.stderr is not None:
                sys.stderr.write(
                    f"penstock: cannot write to stdout: {error.strerror}. The run continues, and its folder has its "
                    "numbers\n"
                )
                sys.stderr.flush()
