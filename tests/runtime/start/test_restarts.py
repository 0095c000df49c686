"""Starts of torchrun's agents, on a host each, find each other again: after a failure, and where a host is replaced."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from torch.distributed import TCPStore

from penstock.runtime.start.restarts import name_of_this_start
from tests.support.agents import APART, Agent

PROGRAM = str(Path(__file__).parents[2] / "support" / "under_restarts.py")


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


@pytest.fixture
def hosts(store, tmp_path) -> Iterator[Callable[..., Agent]]:
    """Starts agents of two hosts."""
    started: list[Agent] = []

    def start(name: str, act: str, **environment: str) -> Agent:
        program = (PROGRAM, str(tmp_path / "mark"), str(tmp_path / "turn"), act)
        started.append(Agent(store.port, tmp_path / f"{name}.err", "2", *program, **environment))
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
    stepped = {one.said(): one for one in [hosts(name, "step", **APART) for name in "ab"]}
    (tmp_path / "mark").touch()
    stepped["rank 1 has stepped"].kill()
    both = [stepped["rank 0 has stepped"], hosts("c", "step", **APART)]
    again = sorted(one.said() for one in both)
    assert [line.split(", ")[0] for line in again] == [f"again: rank {r} of 2" for r in range(2)]
    assert [one.ended() for one in both] == [0, 0]
