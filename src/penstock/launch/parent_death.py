"""End a process with the launcher that started it (`penstock.launch.supervise`), and report to it why it failed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

LAUNCHER = "PENSTOCK_LAUNCHER"
"""Environment variable with the launcher's process id."""
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable of torch's launchers: where a process writes what made it fail. torchrun prints it."""

_PR_SET_PDEATHSIG = 1


def follow_launcher() -> bool:
    """See to it that this process is killed when its launcher ends, however that ends.

    The kernel does it, so that it happens to a process that is stopped or hangs, too; only Linux can.

    Returns:
        Whether there is a launcher.
    """
    launcher = os.environ.pop(LAUNCHER, None)
    if launcher is None or sys.platform != "linux":
        return launcher is not None
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if not _runs(int(launcher)):  # it has ended before the kernel was told
        os._exit(1)
    return True


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def record_failure(error: BaseException) -> None:
    """Tell whoever started this process why it fails, if it has named a file for that."""
    if ERROR_FILE in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        try:
            get_error_handler().record_exception(error)
        except OSError:
            return  # a full disk; the error itself is printed
