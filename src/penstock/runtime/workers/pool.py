"""Processes on this machine that wait for functions to run as ranks of a group.

Starting a process costs seconds of importing torch, so they are started once and used again: by ``penstock verify``,
by the benchmarks and by the tests. Each call gets a process group of its own, over a file, on the loopback interface.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from penstock import host
from penstock.errors import ConfigError, PeerError, PenstockError, WaitTimeoutError
from penstock.scratch import Scratch

PROCESS_BYTES = 100_000_000
"""Of memory that a process has for itself once it has loaded PyTorch, at the least."""


def require_processes(count: int, memory: int | None = None) -> None:
    """Refuse more processes than this machine has memory for.

    Args:
        count: how many are to be started.
        memory: bytes there are; by default those of this machine or container.

    Raises:
        ConfigError: there are too many.
    """
    if memory is None:
        here = host.memory()
        if here is None:
            return
        memory = here.total
    if count * PROCESS_BYTES > memory:
        raise ConfigError(
            f"{count:,} processes take at least {count * PROCESS_BYTES / 1e9:,.0f} GB of memory, and this machine has "
            f"{memory / 1e9:,.0f} GB; start at most {memory // PROCESS_BYTES:,} on it"
        )


class LocalProcesses:
    """Worker processes, started at once.

    Args:
        count: how many; the most ranks a call can have.
        threads: intra-op threads a worker.

    Raises:
        ConfigError: this machine has not the memory for so many.
    """

    def __init__(self, count: int, threads: int = 1) -> None:
        require_processes(count)
        self.count = count
        self.threads = threads
        self._scratch = Scratch()
        self._calls = 0
        self._workers: list[tuple[Any, Connection]] = []

    def run(
        self, ranks: int, function: Callable[..., Any], *args: object, timeout: float = 600.0
    ) -> list[Any]:
        """Run ``function(rank, *args)`` in `ranks` processes that form one group.

        Args:
            ranks: how many, at most `count`.
            function: importable by name; its result and arguments must be picklable.
            timeout: seconds until the workers are ended and the call fails.

        Returns:
            The results by rank.

        Raises:
            Exception: what the rank that failed first raised, with that process's traceback as a note.
            WaitTimeoutError: a rank did not end in time.
        """
        if not 1 <= ranks <= self.count:
            raise PenstockError(f"{ranks} ranks asked for, but there are {self.count} worker processes")
        self._start()
        self._calls += 1
        store = str(self._scratch.path / f"store-{self._calls}")
        results: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}
        running: dict[Connection, int] = {}
        for rank in range(ranks):
            connection = self._workers[rank][1]
            connection.send((function, rank, ranks, store, args))
            running[connection] = rank
        deadline = time.monotonic() + timeout
        while running:
            ready = wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise WaitTimeoutError(
                    f"rank(s) {sorted(running.values())} did not end within {timeout:g} s; the workers were ended"
                ) from next(iter(errors.values()), None)
            for connection in [c for c in running if c in ready]:
                rank = running.pop(connection)
                try:
                    good, value = connection.recv()
                except EOFError:
                    errors[rank] = PenstockError(f"the process of rank {rank} ended without a word")
                    continue
                (results if good else errors)[rank] = value
        if errors:
            if any("ended without a word" in str(e) for e in errors.values()):
                self.close()
            in_order = list(errors.values())
            raise next((e for e in in_order if not isinstance(e, PeerError)), in_order[0])
        return [results[rank] for rank in range(ranks)]

    def close(self) -> None:
        """End the processes; may be called twice, and `run` starts new ones."""
        for process, connection in self._workers:
            connection.close()
            process.join(0.5)
            if process.is_alive():
                process.kill()
                process.join()
        self._workers = []

    def __enter__(self) -> LocalProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()
        self._scratch.close()

    def _start(self) -> None:
        if self._workers:
            return
        context = multiprocessing.get_context("spawn")
        for _ in range(self.count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self.threads), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))


def _serve(connection: Connection, threads: int) -> None:
    import torch
    from torch import distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(threads)
    while True:
        try:
            function, rank, ranks, store, args = connection.recv()
        except (EOFError, OSError):
            return
        try:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
            dist.barrier()  # one that is done at once must not close what another one is still connecting to
            answer = (True, function(rank, *args))
        except BaseException as error:
            error.add_note(f"in the process of rank {rank}:\n{traceback.format_exc()}")
            answer = (False, error)
        if dist.is_initialized():
            dist.destroy_process_group()
        try:
            connection.send(answer)
        except (TypeError, AttributeError, ValueError):  # something in it cannot be pickled
            connection.send((False, PenstockError(f"rank {rank}: {answer[1]!r}")))
        # A communicator that is part of a cycle keeps a thread of gloo's, which wakes up a hundred times a second.
        del answer
        gc.collect()
