"""What all tests share: one pool of worker processes, and one intra-op thread."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

from penstock.garbage import begin_loading, end_loading
from tests.support.children import end_with_this_process

# CI sees the same examples each time; elsewhere each run explores new ones, and prints how to repeat what fails.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("exploring", deadline=None, print_blob=True)
settings.load_profile("repeatable" if os.environ.get("CI") else "exploring")


def pytest_configure() -> None:
    """No process that a test starts outlives the tests, also where they are killed; each takes Ctrl-C."""
    begin_loading()
    if sys.platform == "linux":
        end_with_this_process()
    # A shell starts what it runs in the background with SIGINT ignored, and so would be all that tests start.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Modules and collected tests stay to the end: no garbage collection looks through them again."""
    gc.collect()
    end_loading()


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes are named by argument: packed ones hold the time, and all workers must collect the same names."""
    return argname if isinstance(val, bytes) else None


@pytest.fixture(scope="session")
def processes() -> Iterator[object]:
    """Four worker processes, started on first use and reused by every test."""
    if sys.platform != "linux":
        pytest.skip("ranks as processes are tested on Linux alone")
    from penstock.runtime.workers.pool import LocalProcesses

    with LocalProcesses(4) as pool:
        yield pool


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest) -> None:
    """Bit-equality is stated for equal thread counts; one everywhere."""
    if "torch" in __import__("sys").modules:
        import torch

        torch.set_num_threads(1)
