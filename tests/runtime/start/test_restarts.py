"""Starts of torchrun's agents, on a host each, find each other again: after a failure, and where a host is replaced."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from queue import Empty, Queue
from threading import Event, Thread
from typing import Any

import pytest
from torch.distributed import TCPStore

from penstock.runtime.start.restarts import name_of_this_start

ROOT = Path(__file__).parents[3]


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30))


def client(store: Any) -> TCPStore:
    return TCPStore("127.0.0.1", store.port, timeout=timedelta(seconds=30))


def names(store: Any, ranks: Iterable[int], size: int) -> list[str]:
    with ThreadPoolExecutor(size) as pool:
        ends = [
            pool.submit(name_of_this_start, client(store), rank, size, timedelta(seconds=30))
            for rank in ranks
        ]
        return [end.result() for end in ends]


def test_all_ranks_of_a_start_have_one_name_and_every_start_another(store):
    found = [names(store, range(3), 3) for _ in range(3)]
    assert [len(set(one)) for one in found] == [1, 1, 1]
    assert len({one[0] for one in found}) == 3
    assert (
        len(set(names(store, reversed(range(3)), 3))) == 1
    )  # the others come first and find the name before


def test_a_start_that_broke_off_leaves_nothing_that_the_next_takes_for_its_own(store):
    with pytest.raises(RuntimeError):
        name_of_this_start(client(store), 0, 2, timedelta(seconds=0.1))  # rank 1 never came
    with pytest.raises(RuntimeError, match="did not come in time"):
        name_of_this_start(client(store), 1, 2, timedelta(seconds=0.3))  # rank 0 has gone
    assert len(set(names(store, reversed(range(2)), 2))) == 1


class Watched:
    """A store that tells when a process has asked for the newest name some times, as it does in each round of a wait."""

    def __init__(self, store: TCPStore, rounds: int) -> None:
        self._store, self._left, self.waited = store, rounds, Event()

    def get(self, key: str) -> bytes:
        self._left -= 1
        if self._left == 0:
            self.waited.set()
        return self._store.get(key)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_a_wait_for_a_rank_0_that_is_late_prints_nothing(store, capfd):
    """Torch prints a line for each wait at the store that ends without a value, many of them on a busy machine."""
    watched = Watched(client(store), 4)
    store.set("penstock/newest", "penstock/earlier")
    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(name_of_this_start, watched, 1, 2, timedelta(seconds=30))
        watched.waited.wait()
        assert name_of_this_start(client(store), 0, 2, timedelta(seconds=30)) == end.result()
    assert capfd.readouterr().err == ""


class Agent:
    """A torchrun of two hosts with one process each, and what its process says."""

    def __init__(self, store: Any, folder: Path, name: str, act: str, **environment: str) -> None:
        words = [
            "--nnodes=2", "--nproc-per-node=1", "--max-restarts=2", "--monitor-interval=0.1", "--local-addr=127.0.0.1",
            "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{store.port}", "--rdzv-id=test",
            "--rdzv-conf=is_host=0,keep_alive_interval=1,keep_alive_max_attempt=6",
        ]  # fmt: skip
        code = [
            str(ROOT / "tests" / "support" / "under_restarts.py"),
            str(folder / "mark"),
            str(folder / "turn"),
            act,
        ]
        self.errors = folder / f"{name}.err"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *words, *code],
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"} | environment,
                stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip
        self._lines: Queue[str] = Queue()
        self._reader = Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.strip())

    def said(self) -> str:
        """Its next line."""
        try:
            return self._lines.get(timeout=180)
        except Empty:
            return f"nothing; {self.errors.read_text()}"

    def ended(self) -> int:
        """With which code it ends."""
        return self.process.wait(timeout=180)

    def kill(self) -> None:
        """End it and its process, as where a host goes."""
        if self.process.poll() is None:
            pid = self.process.pid
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            self.process.kill()
            for child in children:
                with suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def hosts(store, tmp_path) -> Iterator[Callable[..., Agent]]:
    """Starts agents; the rendezvous is in a store of this process, so that any of them may go."""
    started: list[Agent] = []

    def start(name: str, act: str, **environment: str) -> Agent:
        started.append(Agent(store, tmp_path, name, act, **environment))
        return started[-1]

    yield start
    for one in started:
        one.kill()


@pytest.mark.exhaustive
def test_hosts_meet_again_where_one_of_them_had_not_failed_and_counts_no_restart(hosts, tmp_path):
    os.mkfifo(tmp_path / "turn")
    both = [hosts(name, "fail") for name in "ab"]
    assert sorted(one.said() for one in both) == ["rank 0 has stepped", "rank 1 has stepped"]
    again = sorted(one.said() for one in both)
    assert [line.split(", ")[0] for line in again] == [f"again: rank {r} of 2" for r in range(2)]
    assert sorted(line[-1] for line in again) == ["0", "1"]
    assert [one.ended() for one in both] == [0, 0]


@pytest.mark.exhaustive
def test_a_replaced_host_joins_and_the_run_goes_on(hosts, tmp_path):
    apart = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    stepped = {one.said(): one for one in [hosts(name, "step", **apart) for name in "ab"]}
    (tmp_path / "mark").touch()
    stepped["rank 1 has stepped"].kill()
    both = [stepped["rank 0 has stepped"], hosts("c", "step", **apart)]
    again = sorted(one.said() for one in both)
    assert [line.split(", ")[0] for line in again] == [f"again: rank {r} of 2" for r in range(2)]
    assert [one.ended() for one in both] == [0, 0]
