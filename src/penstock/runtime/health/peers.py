"""What the processes of this machine do, visible to each other: a page of shared memory each.

A page holds the words of its process's rank (see `status`), whether it has ended in order, and what it said when it failed.
Processes that are stopped or gone leave theirs behind as it was, so that others can say what they were doing. A page is
written without a lock by one process, and read only when something is wrong.
"""

from __future__ import annotations

import mmap
import os
import platform
import select
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple

from penstock.encoding import sendable
from penstock.errors import PeerError
from penstock.runtime.health.rank_progress import WORDS, RankProgress, new_words

_BYTES, _TEXT = 4096, 512
_CLOSED, _LENGTH = WORDS - 1, WORDS - 2


@sendable
class PeerEntry(NamedTuple):
    """One process.

    Attributes:
        name: what to call it in messages.
        rank: of its pipeline.
        place: equal for the processes of one pipeline.
        machine: equal for processes that can see each other's memory; empty if not supported.
        pid, descriptor: where its page is.
        host: the machine's name.
    """

    name: str
    rank: int
    place: int
    machine: str
    pid: int
    descriptor: int
    host: str


class _Page:
    def __init__(self, descriptor: int) -> None:
        self.memory = memoryview(mmap.mmap(descriptor, _BYTES))
        self.words = self.memory[: 8 * WORDS].cast("q")

    def say(self, text: str) -> None:
        data = text.encode()[: _BYTES - _TEXT]
        self.memory[_TEXT : _TEXT + len(data)] = data
        self.words[_LENGTH] = len(data)

    @property
    def said(self) -> str:
        return bytes(self.memory[_TEXT : _TEXT + self.words[_LENGTH]]).decode(errors="replace")


class PeerRegistry:
    """This process's page, and those of the others.

    Attributes:
        words: of this process.
        place: says in words where words are.
        gone: once another process has ended without having closed its pipeline: who.
    """

    def __init__(self) -> None:
        self.words: RankProgress = new_words()
        self.place: Callable[[RankProgress], str] = lambda words: ""
        self.gone: str | None = None
        self._page: _Page | None = None
        self._descriptor = -1
        self._others: list[tuple[PeerEntry, _Page]] = []
        self._ends: dict[int, _Page] = {}
        self._poll = select.poll()
        if supported():
            self._descriptor = os.memfd_create("penstock-page")
            os.ftruncate(self._descriptor, _BYTES)
            self._page = _Page(self._descriptor)
            self.words = self._page.words

    def entry(self, name: str, rank: int, place: int) -> PeerEntry:
        """What the others need to know of this process."""
        seen = machine() if self._page is not None else ""
        return PeerEntry(name, rank, place, seen, os.getpid(), self._descriptor, socket.gethostname())

    def meet(self, entries: Sequence[PeerEntry]) -> None:
        """Find the pages of the others that are on this machine; they must not have closed theirs yet."""
        own = machine() if self._page is not None else ""
        for entry in entries:
            if not own or entry.machine != own or entry.pid == os.getpid():
                continue
            with suppress(OSError):  # another container or user hides it
                descriptor = os.open(f"/proc/{entry.pid}/fd/{entry.descriptor}", os.O_RDWR)
                page = _Page(descriptor)
                os.close(descriptor)
                end = os.pidfd_open(entry.pid)
                self._others.append((entry, page))
                self._ends[end] = page
                self._poll.register(end, select.POLLIN)

    def sees(self, entries: Sequence[PeerEntry]) -> bool:
        """Whether `meet` found the pages of all of them, and this process's own among them."""
        return len(self._others) == len(entries) - 1

    def of_pipeline(self, place: int) -> Mapping[int, RankProgress]:
        """The words of the other ranks of a pipeline, as far as they can be seen."""
        return {entry.rank: page.words for entry, page in self._others if entry.place == place}

    def say(self, text: str) -> None:
        """Leave word of what went wrong here; an empty text takes it back."""
        if self._page is not None:
            self._page.say(text)

    def watch(self, seconds: float) -> str | None:
        """Wait for the end of another process, for some time; says who has ended and had not closed its pipeline."""
        for descriptor, _ in self._poll.poll(1000 * seconds):
            self._poll.unregister(descriptor)
            os.close(descriptor)
            page = self._ends.pop(descriptor)
            if not page.words[_CLOSED]:
                self.gone = self.gone or self.guilty()
        return self.gone

    def require_all(self) -> None:
        """See to it that nobody has ended.

        Raises:
            PeerError: somebody has, and had not closed its pipeline.
        """
        if self.gone is not None:
            raise PeerError(self.gone)

    def guilty(self, patience: float = 0.0) -> str | None:
        """Who is stopped or gone, and what it said, as far as that can be seen; None if nobody is.

        Args:
            patience: seconds to look for; connections break a moment before their process has ended.
        """
        until = monotonic() + patience
        while (found := self._guilty()) is None and monotonic() < until:
            sleep(0.02)
        return found

    def _guilty(self) -> str | None:
        found: list[tuple[int, str]] = []
        for entry, page in self._others:
            said, closed = page.said, page.words[_CLOSED]
            state = _state_of(entry.pid) or ("has closed its pipeline" if closed else "")
            if not state or (closed and not said):
                continue
            # Who ended because of somebody else has said so; who has said nothing was first.
            text = f"{entry.name} {state} (process id {entry.pid}), {self.place(page.words)}"
            found.append((bool(said), f"{text}; it said: {said}" if said else text))
        return min(found)[1] if found else None

    def close(self) -> None:
        """End in order; may be called twice."""
        if self._page is not None and not self._page.words[_CLOSED]:
            self._page.words[_CLOSED] = 1
            os.close(self._descriptor)
        for descriptor in self._ends:
            self._poll.unregister(descriptor)
            os.close(descriptor)
        self._ends.clear()


def _state_of(pid: int) -> str:
    """What is wrong with a process; empty if it lives and runs."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "has ended"
    if state in "ZX":
        return "has ended"
    return "is stopped (by SIGSTOP, or by a debugger)" if state in "Tt" else ""


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine is stopped, and so cannot end by itself."""
    return _state_of(pid).startswith("is stopped")


def supported() -> bool:
    """Whether this machine's shared memory can be used as described above."""
    linux = sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")
    return linux and platform.machine() in ("x86_64", "AMD64")


def machine() -> str:
    """The same text for two processes exactly if they can share memory and see each other's process ids."""
    if not supported():
        return ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
