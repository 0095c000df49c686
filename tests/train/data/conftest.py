"""Libraries that few tests need and that take seconds to import, which every worker would do to collect the tests."""

from __future__ import annotations

from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def datasets() -> ModuleType:
    import datasets

    return datasets
