"""Exit codes of ``penstock train``, for scripts, schedulers and `penstock.train.launch.supervise`.

A process that a second signal ends at once has the shell's code for that signal: 130 for Ctrl-C, 143 for SIGTERM, 129 for
SIGHUP, 138 for SIGUSR1.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes that Penstock chooses itself."""

    DONE = 0
    FAILED = 1
    """The run failed, or one of its processes was killed."""
    BAD_INPUT = 2
    """No run was begun, and nothing was written."""
    NOT_FINITE = 3
    """Losses or gradients were NaN or infinite more often in a row than allowed; a restart would repeat the same steps."""
    GAVE_UP = 4
    """The launcher used up its restarts without a newer checkpoint."""
    STOPPED = 75
    """A signal stopped the run and its state is saved. EX_TEMPFAIL of ``sysexits.h``: try again."""
    HUNG = 124
    """A rank hung and was ended, as by ``timeout(1)``."""


def of_signal(number: int) -> int:
    """Return the exit code that a shell reports for a process ended by a signal."""
    return 128 + number
