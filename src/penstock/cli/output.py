"""Output that a long run outlives: ``| head`` that has seen enough, a terminal that was closed, a log on a full disk."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from typing import Any, TextIO, cast

_GONE = (errno.EPIPE, errno.EIO)
"""Nobody will ever read it again: a pipe whose reader has ended, a terminal that was closed."""


def outlive_readers() -> None:
    """From now on drop what standard output and standard error do not take, and say so once; never raise.

    It lasts until the process ends, because errors are printed and streams flushed at its very end.
    """
    if sys.stdout is not None and not isinstance(sys.stdout, _Lasting):
        sys.stdout = cast(TextIO, _Lasting(sys.stdout, "stdout"))
    if sys.stderr is not None and not isinstance(sys.stderr, _Lasting):
        sys.stderr = cast(TextIO, _Lasting(sys.stderr, "stderr"))


class _Lasting:
    """A text stream whose writes do not fail."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream = stream
        self._name = name
        self._told = False

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
            # What the stream still holds, and what libraries write past it, has to go somewhere.
            with suppress(OSError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self._stream.fileno())
                os.close(null)
        if not self._told:
            self._told = True
            if self._name == "stdout" and sys.stderr is not None:
                sys.stderr.write(
                    f"penstock: cannot write to stdout: {error.strerror}. The run goes on, and its folder has its numbers\n"
                )
                sys.stderr.flush()
