"""Worker processes on this machine that run functions as ranks of a group.

A process takes seconds to start, mostly to import torch, so ``penstock verify``, the benchmarks and the tests start workers
once and reuse them. On Linux, workers are forked from a process that has only imported torch, and that ends with its parent.
Each call gets a new process group, over a file, on the loopback interface.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from penstock.base import host
from penstock.base.current_folder import safe_children
from penstock.base.errors import ConfigError, PeerError, PenstockError, WaitTimeoutError
from penstock.base.garbage import end_loading
from penstock.base.scratch import Scratch
from penstock.runtime.start.launch_environment import OWN_LOCAL_RANK, OWN_LOCAL_SIZE

PROCESS_BYTES = 100_000_000
"""Least private memory of a process that has loaded PyTorch, in bytes."""


def require_processes(count: int, memory: int | None = None) -> None:
    """Raise ConfigError if this machine does not have the memory for so many processes."""
    if memory is None:
        limits = host.memory()
        if limits is None:
            return
        memory = limits.total
    if count * PROCESS_BYTES > memory:
        raise ConfigError(
            f"{count:,} processes take at least {count * PROCESS_BYTES / 1e9:,.0f} GB of memory, and this machine has "
            f"{memory / 1e9:,.0f} GB; start at most {memory // PROCESS_BYTES:,} on it"
        )


class LocalProcesses:
    """A pool of worker processes, started together at the first call."""

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
        """Run ``function(rank, *args)``, which is importable by name, in `ranks` processes that form one group."""
        if not 1 <= ranks <= self.count:
            raise PenstockError(
                f"ranks must be from 1 to {self.count}, the worker processes there are, got {ranks}"
            )
        self._start()
        self._calls += 1
        store = str(self._scratch.path / f"store-{self._calls}")
        running = {connection: rank for rank, (_, connection) in enumerate(self._workers[:ranks])}
        for connection, rank in running.items():
            connection.send((function, rank, ranks, store, args))
        results, errors = self._collect(running, timeout)
        if errors:
            if any("ended without a result" in str(e) for e in errors.values()):
                self.close()
            in_order = list(errors.values())
            raise next((e for e in in_order if not isinstance(e, PeerError)), in_order[0])
        return [results[rank] for rank in range(ranks)]

    def _collect(
        self, running: dict[Connection, int], timeout: float
    ) -> tuple[dict[int, Any], dict[int, BaseException]]:
        """Wait for all ranks, and return their results and errors in the order in which they ended."""
        results: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}
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
                    succeeded, value = connection.recv()
                except EOFError:
                    errors[rank] = PenstockError(
                        f"the process of rank {rank} ended without a result or an error"
                    )
                    continue
                (results if succeeded else errors)[rank] = value
        return results, errors

    def close(self) -> None:
        """End the processes; may be called twice, and `run` starts new ones."""
        for process, connection in self._workers:
            connection.close()
            # An idle worker ends once its connection is closed; one that is in a call is killed.
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
        context = process_context()
        for _ in range(self.count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, self.threads, dict(os.environ)), daemon=True
            )
            with safe_children():  # the fork server
                process.start()
            theirs.close()
            self._workers.append((process, ours))


def process_context() -> Any:
    """Return the `multiprocessing` context of the workers: a fork server on Linux, and spawn elsewhere.

    The server has imported torch and Penstock. Other systems' libraries do not all bear a fork.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # Torch imports the second, for seconds, when a process makes its first optimizer.
    context.set_forkserver_preload(["penstock.runtime.pipeline", "torch._dynamo"])
    return context


def _serve(connection: Connection, threads: int, environment: dict[str, str]) -> None:
    import numpy as np
    import torch
    from torch import distributed as dist

    # A forked process has the environment of the first pool's start, and would draw the numbers that the others draw.
    os.environ.clear()
    os.environ.update(environment)
    torch.seed()
    np.random.seed()
    os.environ["GLOO_SOCKET_IFNAME"] = host.loopback()
    modules = 0
    while True:
        try:
            function, rank, ranks, store, args = connection.recv()
        except (EOFError, OSError):
            return
        if len(sys.modules) > modules:  # the function's module was imported, or the last call imported some
            end_loading()
            modules = len(sys.modules)
        # Which GPU is a process's own. By torch's names other libraries would take this for a launch by torchrun.
        os.environ |= {OWN_LOCAL_RANK: str(rank), OWN_LOCAL_SIZE: str(ranks)}
        torch.set_num_threads(threads)  # the last call may have left another number
        try:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
            dist.barrier()  # a quick rank must not close connections that another one is still opening
            answer = (True, function(rank, *args))
        except BaseException as error:
            error.add_note(f"in the process of rank {rank}:\n{traceback.format_exc()}")
            answer = (False, error)
        if dist.is_initialized():
            dist.destroy_process_group()
        if "torch.distributed.tensor" in sys.modules:
            # What torch remembers of operations has meshes whose groups are gone. Private: there is no public way.
            debug = import_module("torch.distributed.tensor.debug")
            getattr(debug, "_clear_sharding_prop_cache", lambda: None)()
        try:
            connection.send(answer)
        except (TypeError, AttributeError, ValueError):  # the answer cannot be pickled
            connection.send((False, PenstockError(f"rank {rank}: {answer[1]!r}")))
        # A communicator in a reference cycle keeps a thread of gloo's, which wakes up a hundred times a second.
        del answer
        gc.collect()
