"""One browser for all pages of this room."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.browser import Browser


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    pytest.importorskip("selenium")
    from tests.support.browser import browser

    with browser() as started:
        yield started
