"""Progress and state of the processes of this machine, visible to each other: one page of shared memory a process.

A page has the progress of its process's rank (see `rank_progress`), whether the process has closed its pipeline, and its
error if it failed. The page of a process that is stopped or gone stays as it was, so that others can say what it was doing.
One process writes a page, without a lock; the others read it only when something is wrong.
"""

from __future__ import annotations

import mmap
import os
import platform
import select
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple

from penstock.base.encoding import sendable
from penstock.base.errors import CallOrderError, PeerError
from penstock.runtime.health.rank_progress import (
    CALLS,
    FIELDS,
    STEP,
    RankProgress,
    call_of,
    new_progress,
    other_calls,
    record_call,
)

_BYTES, _TEXT = 4096, 512  # size of a page, and the offset of the error in it
_CLOSED, _LENGTH = FIELDS - 1, FIELDS - 2  # indices in the progress: a flag, and the bytes of the error


@sendable
class PeerEntry(NamedTuple):
    """One process of the run.

    Attributes:
        machine: text that processes share if they can see each other's memory; empty if not supported.
    """

    name: str
    rank: int
    pipeline: int
    machine: str
    pid: int
    descriptor: int
    host: str


class _Page:
    def __init__(self, descriptor: int) -> None:
        self.memory = memoryview(mmap.mmap(descriptor, _BYTES))
        self.progress = self.memory[: 8 * FIELDS].cast("q")

    @property
    def error(self) -> str:
        return bytes(self.memory[_TEXT : _TEXT + self.progress[_LENGTH]]).decode(errors="replace")

    @error.setter
    def error(self, text: str) -> None:
        data = text.encode()[: _BYTES - _TEXT]
        self.memory[_TEXT : _TEXT + len(data)] = data
        self.progress[_LENGTH] = len(data)


class PeerRegistry:
    """The pages of all processes of the run on this machine."""

    def __init__(self) -> None:
        self.progress: RankProgress = new_progress()
        self.describe: Callable[[RankProgress], str] = lambda progress: ""
        self.failed: str | None = None
        self.rank = self.pipeline = 0
        self.calls = 0
        self._page: _Page | None = None
        self._descriptor = -1
        self._others: list[tuple[PeerEntry, _Page]] = []
        self._processes: dict[int, _Page] = {}  # by the descriptor that is ready once the process has ended
        self._poll = select.poll()
        if sys.platform == "linux" and supported():
            self._descriptor = os.memfd_create("penstock-page")
            os.ftruncate(self._descriptor, _BYTES)
            self._page = _Page(self._descriptor)
            self.progress = self._page.progress

    def entry(self, name: str, rank: int, pipeline: int) -> PeerEntry:
        """Return the entry of this process, by which the others open its page."""
        self.rank, self.pipeline = rank, pipeline
        shared = machine() if self._page is not None else ""
        return PeerEntry(name, rank, pipeline, shared, os.getpid(), self._descriptor, socket.gethostname())

    def open_pages(self, entries: Sequence[PeerEntry]) -> None:
        """Open the pages of the other processes on this machine, before any of them closes its own."""
        here = machine() if self._page is not None else ""
        for entry in entries:
            if sys.platform != "linux" or not here or entry.machine != here or entry.pid == os.getpid():
                continue
            with suppress(OSError):  # hidden by another container or user
                descriptor = os.open(f"/proc/{entry.pid}/fd/{entry.descriptor}", os.O_RDWR)
                page = _Page(descriptor)
                os.close(descriptor)
                process = os.pidfd_open(entry.pid)
                self._others.append((entry, page))
                self._processes[process] = page
                self._poll.register(process, select.POLLIN)

    def sees_all(self, entries: Sequence[PeerEntry]) -> bool:
        """Return whether `open_pages` opened the pages of all other processes."""
        return len(self._others) == len(entries) - 1

    def progress_of(self, pipeline: int) -> Mapping[int, RankProgress]:
        """Return the progress of the other ranks of a pipeline whose pages are open."""
        return {entry.rank: page.progress for entry, page in self._others if entry.pipeline == pipeline}

    def report_error(self, text: str) -> None:
        """Write this process's error for the others to read; an empty text clears it."""
        if self._page is not None:
            self._page.error = text

    def watch(self, seconds: float) -> str | None:
        """Wait up to `seconds` for other processes to end, and return `failed`."""
        # poll takes milliseconds.
        for descriptor, _ in self._poll.poll(1000 * seconds):
            self._poll.unregister(descriptor)
            os.close(descriptor)
            page = self._processes.pop(descriptor)
            if not page.progress[_CLOSED]:
                self.failed = self.failed or self.find_failed()
        return self.failed

    def require_all(self) -> None:
        """Raise if a rank of this pipeline makes another call, or another process has ended without closing its pipeline."""
        self.require_same_call()
        if self.failed is not None:
            raise PeerError(self.failed)

    @contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """Return a context for a call that all ranks of the pipeline make; calls within it count as part of it."""
        if not self.calls:
            record_call(self.progress, name)
            # Of two ranks the later one sees the other here, and begins no collective. One that all never join would keep
            # its communicator, and so this process, until the timeout.
            self.require_same_call()
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1

    @property
    def call(self) -> str:
        """Name of the last call; empty before the first."""
        return call_of(self.progress, self.progress[CALLS])

    def require_same_call(self) -> None:
        """Raise CallOrderError if a rank of this pipeline has made another call in place of this one's last call."""
        number, others = self.progress[CALLS], self.progress_of(self.pipeline)
        calls = {rank: name for rank, progress in others.items() if (name := call_of(progress, number))}
        if any(name != self.call for name in calls.values()):
            raise CallOrderError(other_calls({**calls, self.rank: self.call}))

    def left_step(self, peer: int) -> PeerError | None:
        """Return an error if a rank of this pipeline is in a later step than this one, which then has failed there."""
        own, progress = self.progress[STEP], self.progress_of(self.pipeline).get(peer)
        if not own or progress is None or progress[STEP] <= own:
            return None
        return PeerError(f"rank {peer} is in step {progress[STEP]}; step {own} failed there")

    def missing(self) -> str:
        """Name the ranks of this pipeline that have not made this one's last call; empty if none is seen."""
        number, others = self.progress[CALLS], self.progress_of(self.pipeline)
        late = [rank for rank, progress in sorted(others.items()) if progress[CALLS] < number]
        return f"rank {', '.join(map(str, late))} did not call {self.call}" if late and self.calls else ""

    def left(self) -> str:
        """Name the processes that have closed their pipeline; empty if none is seen to have."""
        return ", ".join(entry.name for entry, page in self._others if page.progress[_CLOSED])

    def find_failed(self, patience: float = 0.0) -> str | None:
        """Describe the process that is stopped or gone, and its error; None if none is seen to be.

        Args:
            patience: seconds to keep checking, since connections break a moment before their process has ended. If it has
                not ended by then, an error that a process has told counts (default 0: check once, for an end alone).
        """
        deadline = monotonic() + patience
        while (failed := self._first_failed()) is None and monotonic() < deadline:
            sleep(0.02)
        if failed is None and patience:
            told = (
                f"{entry.name} failed; its error: {page.error}" for entry, page in self._others if page.error
            )
            return next(told, None)
        return failed

    def _first_failed(self) -> str | None:
        failed: list[tuple[bool, str]] = []
        for entry, page in self._others:
            error, closed = page.error, page.progress[_CLOSED]
            state = _state_of(entry.pid) or ("has closed its pipeline" if closed else "")
            if not state or (closed and not error):
                continue
            # A process that ended because of another one has written an error; the first to fail has not.
            text = f"{entry.name} {state} (process id {entry.pid}), {self.describe(page.progress)}"
            failed.append((bool(error), f"{text}; its error: {error}" if error else text))
        return min(failed)[1] if failed else None

    def close(self) -> None:
        """Mark the pipeline as closed; may be called twice."""
        if self._page is not None and not self._page.progress[_CLOSED]:
            self._page.progress[_CLOSED] = 1
            os.close(self._descriptor)
        for descriptor in self._processes:
            self._poll.unregister(descriptor)
            os.close(descriptor)
        self._processes.clear()


def _state_of(pid: int) -> str:
    """Describe a process that is stopped or has ended; empty if it runs."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        state = "X"
    if state in "ZX":
        return "has ended"
    return "is stopped (by SIGSTOP, or by a debugger)" if state in "Tt" else ""


def supported() -> bool:
    """Return whether pages and edges in shared memory work here: on Linux and x86-64."""
    linux = sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")
    return linux and platform.machine() in ("x86_64", "AMD64")


def machine() -> str:
    """Return a text that is equal for two processes if they can share memory and see each other's process ids."""
    if not supported():
        return ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
