"""The current folder on Python's path: for a user's own modules alone, and behind everything that is installed.

A file of the user's may have any name, such as ``random.py`` or ``torch.py``. Neither a command nor a process that it starts
may take it for the module of that name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SAFE_PATH = "PYTHONSAFEPATH"


@contextmanager
def current_folder_last() -> Iterator[None]:
    """Return a context in which modules of the current folder are found, after all installed modules."""
    before = list(sys.path)
    sys.path.append(os.getcwd())
    try:
        yield
    finally:
        sys.path[:] = before


@contextmanager
def safe_children() -> Iterator[None]:
    """Return a context in which a Python process that is started does not have the current folder on its path."""
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = before
