"""What all tests share: one pool of worker processes, one browser, and one intra-op thread."""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import re
import signal
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from penstock.base.garbage import begin_loading, end_loading
from tests.support.children import end_with_this_process
from tests.support.waiting import until

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadFileScheduling

    from penstock.runtime.workers.pool import LocalProcesses
    from tests.support.browser import Browser

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


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """A test that ends its worker, as one that hangs does after ``faulthandler_timeout``, fails by name."""
    if config.getoption("dist") != "loadfile":
        return None
    from tests.support.crashes import CrashSafeScheduling

    return CrashSafeScheduling(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        type=part_of,
        metavar="N/M",
        help="run part N, from 0 on, of the chosen cases, which their names divide into M",
    )


def part_of(text: str) -> tuple[int, int]:
    """Read the N/M of ``--part``."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not int(found[1]) < int(found[2]):
        raise argparse.ArgumentTypeError(f"must be N/M with N from 0 to M - 1, as in 0/6, got {text!r}")
    return int(found[1]), int(found[2])


def is_in_part(name: str, part: int, parts: int) -> bool:
    """Return whether a case belongs to a part, the same in all workers and on all machines."""
    return zlib.crc32(name.encode()) % parts == part


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of which no test is chosen are not imported: some import what only ``make setup-ci`` installs."""
    chosen = config.option.markexpr
    if collection_path.suffix != ".py":
        return None
    text = collection_path.read_text("utf-8")
    if chosen == "not slow":
        return bool(re.search(r"^pytestmark = pytest\.mark\.(slow|exhaustive)$", text, re.M)) or None
    word = {"slow": "slow", "slow and not exhaustive": "slow", "exhaustive": "exhaustive"}.get(chosen, "")
    return word not in text or None


def pytest_itemcollected(item: pytest.Item) -> None:
    """What only ``make test-all`` runs is slow, too, so that ``-m "not slow"`` leaves it out."""
    if item.get_closest_marker("exhaustive"):
        item.add_marker(pytest.mark.slow)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.part is not None:
        left_out = [item for item in items if not is_in_part(item.nodeid, *config.option.part)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Modules and collected tests stay to the end: no garbage collection looks through them again."""
    gc.collect()
    end_loading()
    slow = (item for item in session.items if item.get_closest_marker("slow"))
    if sys.platform == "linux" and any("huggingface" in item.path.parts for item in slow):
        fork_with_transformers()


def fork_with_transformers() -> None:
    """Start the server that worker processes are forked from with transformers, for seconds of each of them.

    And with what every file of tests imports, for a quarter of a second of each of hundreds.
    """
    from penstock.runtime.workers.pool import process_context

    process_context().set_forkserver_preload(["torch._dynamo", "tests.support.hf_trainer", "hypothesis"])
    forkserver.ensure_running()


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes are named by argument: packed ones hold the time, and all workers must collect the same names."""
    return argname if isinstance(val, bytes) else None


@pytest.fixture(scope="session")
def pool() -> Iterator[LocalProcesses]:
    """Four worker processes, started on first use."""
    if sys.platform != "linux":
        pytest.skip("ranks as processes are tested on Linux alone")
    from penstock.runtime.workers.pool import LocalProcesses

    with LocalProcesses(4) as started:
        yield started


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """One browser for all pages."""
    pytest.importorskip("selenium")
    from tests.support.browser import browser

    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def processes(pool: LocalProcesses) -> Iterator[LocalProcesses]:
    """The pool's processes, reused by every test until torch's caches keep too many communicators in them.

    DTensor's caches keep those of each mesh, with threads that wake up a hundred times a second. The pool's next use starts
    new processes.
    """
    yield pool
    if any(
        len(list(Path("/proc").glob(f"{child.pid}/task/*"))) > 24
        for child in multiprocessing.active_children()
    ):
        pool.close()


@pytest.fixture(scope="module")
def with_device() -> Iterator[Callable[..., Any]]:
    """Function that calls another one with the name of a second device, in a process that has one."""
    if sys.platform != "linux":
        pytest.skip("worker processes are tested on Linux alone")
    from penstock.runtime.workers.pool import LocalProcesses
    from tests.support.second_device import alone

    with LocalProcesses(1) as process:
        yield lambda function, *args: process.run(1, alone, function, *args)[0]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Bit-equality is stated for equal thread counts; one everywhere."""
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_rank_at_work() -> Iterator[None]:
    """No rank computes on after a test: a command that fails would end this process at once, and the next tests with it."""
    yield
    if "penstock.runtime.health.hang" in sys.modules:
        from penstock.runtime.health.hang import AT_WORK

        until(lambda: not AT_WORK)  # a rank that a test lets go takes a moment to end


@pytest.fixture(autouse=True, scope="module")
def no_ranks_for_the_next_file() -> Iterator[None]:
    """Pipelines that were refused or not closed end with the file, and do not wait beside the tests of the next one."""
    yield
    if any(thread.name.startswith("penstock-rank") for thread in threading.enumerate()):
        gc.collect()
