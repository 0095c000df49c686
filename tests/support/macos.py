"""A pytest plugin that takes away what Linux has and macOS lacks: ``pytest -p tests.support.macos``.

Files below /proc and /sys cannot be opened, functions of `os` that only Linux has are gone, and `sys.platform` is that of
macOS. torch and the kernel stay Linux's, so it shows what our own code relies on, and no more.
"""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
from contextlib import suppress

GONE = ("memfd_create", "pidfd_open", "pipe2", "sched_getaffinity", "sched_setaffinity", "preadv2")
if sys.version_info < (3, 13):  # from then on, macOS has it
    GONE += ("waitid",)
HIDDEN = ("/proc", "/sys")
_EVENTS = {"open", "os.listdir", "os.scandir"}


def become_macos() -> None:
    """Take away, for the rest of this process."""
    for name in ("torch", "numba", "psutil"):  # they ask for the platform while they are imported
        with suppress(ImportError):
            importlib.import_module(name)
    sysconfig.get_config_vars()  # read from a file that is named after the platform
    for name in GONE:
        if hasattr(os, name):
            delattr(os, name)
    sys.platform = "darwin"
    sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    if event in _EVENTS and str(arguments[0]).startswith(HIDDEN):
        raise FileNotFoundError(f"{arguments[0]} is not on macOS")


def pytest_configure() -> None:
    """Run a session of tests as on macOS."""
    become_macos()
