"""Exit codes of ``penstock train``, for scripts, schedulers and `penstock.launch.supervise`.

A process that a second signal ends at once has the shell's code for that signal: 130 for Ctrl-C, 143 for SIGTERM, 129 for
SIGHUP, 138 for SIGUSR1.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """The codes of our own."""

    DONE = 0
    FAILED = 1
    BAD_INPUT = 2
    NOT_FINITE = 3
    """A loss or gradient was NaN or infinite, more often in a row than is allowed; the same steps would be so again."""
    GAVE_UP = 4
    """The launcher has restarted the run as often as it may without a newer checkpoint."""
    STOPPED = 75
    """A signal asked it to stop; its state is saved. EX_TEMPFAIL of ``sysexits.h``: to be tried again."""
    HUNG = 124
    """A rank hung and was ended; as ``timeout(1)`` ends."""


def of_signal(number: int) -> int:
    """What a shell reports of a process that a signal ended."""
    return 128 + number
