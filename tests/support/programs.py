"""Programs that tests need and pip does not install. ``.ci/run`` installs them."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest


def give_up(reason: str) -> NoReturn:
    """Skip the test, since something is missing on this machine; under ``CI`` it fails."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def program(*names: str, package: str) -> str:
    """Return the path of the first of these programs that is there; give up if none is.

    Args:
        names: names of one program, in order.
        package: Debian's package that has it.
    """
    for name in names:
        if path := shutil.which(name):
            return path
    give_up(f"no {names[0]} here: apt-get install {package}")
