"""Processes started by `penstock.train.launch.supervise`: they end with their launcher and report failures to it."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

from penstock.base.errors import ConfigError

LAUNCHER = "PENSTOCK_LAUNCHER"
"""Environment variable with the launcher's process id."""
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable of torch's launchers: the file in which a process reports its failure. torchrun prints it."""

# Of Linux's <sys/prctl.h>; Python has no name for it.
_PR_SET_PDEATHSIG = 1


def follow_launcher() -> bool:
    """Make the kernel kill this process when its launcher ends, for whatever reason.

    The kernel does so even if the process is stopped or hangs; only Linux can.
    """
    # Taken out, so that processes which this one starts do not follow the launcher themselves.
    launcher = os.environ.pop(LAUNCHER, None)
    if launcher is not None and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if not _runs(int(launcher)):  # it ended before the kernel knew
            os._exit(1)
    return launcher is not None


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def record_failure(error: BaseException) -> None:
    """Report an error to the launcher, if it has named a file for that; bad input is its line alone, without a traceback."""
    path = os.environ.get(ERROR_FILE)
    if path is None:
        return
    line = f"{type(error).__name__}: {error}"
    # The format of torch.distributed.elastic, which prints the call stack.
    details = {
        "py_callstack": line if isinstance(error, ConfigError) else traceback.format_exc(),
        "timestamp": str(int(time.time())),
    }
    with suppress(OSError):  # a full disk; the error itself is printed
        Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": details}}))
