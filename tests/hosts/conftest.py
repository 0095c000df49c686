"""Three hosts for the tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.hosts.hosts import Hosts, missing


@pytest.fixture(scope="module")
def three_hosts() -> Iterator[Hosts]:
    if missing():
        # Continuous integration has to run them; on a service's machines, where it is not root, it may not be able to.
        assert not os.environ.get("CI") or os.geteuid(), missing()
        pytest.skip(missing())
    with Hosts(3) as hosts:
        yield hosts


@pytest.fixture
def hosts(three_hosts: Hosts) -> Iterator[Hosts]:
    """The hosts with sound links and names, and with nothing running on them."""
    yield three_hosts
    three_hosts.recover()
