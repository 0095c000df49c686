"""Imports from the current folder, as ``python -m`` has them and the ``penstock`` script does not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def current_folder_first() -> Iterator[None]:
    """Return a context in which modules of the current folder are found, before all others."""
    before = list(sys.path)
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path[:] = before
