"""Processes with the same rank, of two runs, or of too few: every one says so, soon, where torch waited for its timeout."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from torch import distributed as dist

from penstock.base.errors import PenstockError
from penstock.runtime.start import rank_claims
from penstock.runtime.start.rank_claims import open_store
from tests.support.launchers import free_port


def told(process: int, ranks: Sequence[tuple[Any, ...]], port: int, seconds: int) -> str:
    """Meet as one of these ranks, numbers of processes and jobs; return the error that this process gets."""
    rank, size, *job = ranks[process]
    with pytest.MonkeyPatch.context() as patch:
        # Enough for a process that has not connected yet, on a busy machine: it would wait for a store that is gone.
        patch.setattr(rank_claims, "_GRACE", 3.0)
        try:
            store = open_store("127.0.0.1", port, rank, size, timedelta(seconds=seconds), *job)
        except (PenstockError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
    dist.barrier()  # the store ends with rank 0
    del store
    return "all are here"


def meet(processes, ranks, seconds=60) -> list[str]:
    return processes.run(len(ranks), told, ranks, int(free_port()), seconds)


def test_each_rank_comes_once(processes):
    assert meet(processes, [(0, 3), (1, 3), (2, 3)]) == ["all are here"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(0, 0), (0, 1, 1), (0, 1, 2, 2)], ids=str)
def test_all_are_told_of_a_rank_that_comes_twice(processes, ranks):
    for text in meet(processes, [(rank, len(ranks)) for rank in ranks]):
        assert text.startswith(
            f"ConfigError: rank {ranks[-1]} of {len(ranks)} came twice to 127.0.0.1 port"
        ), text
        assert f"on {socket.gethostname()}; give each process its own RANK" in text


def test_all_are_told_of_another_number_of_processes_or_another_job(processes):
    for text in meet(processes, [(0, 2), (1, 3)]):
        assert "do not agree on their number" in text
        assert "same WORLD_SIZE" in text
    texts = meet(processes, [(0, 2, "Slurm step 31.5"), (1, 2, "Slurm step 32.0")])
    assert texts[0] == texts[1]
    assert texts[0].startswith("ConfigError: processes of two jobs meet at 127.0.0.1 port")
    assert all(job in texts[0] for job in ("Slurm step 31.5", "Slurm step 32.0"))


def test_ranks_that_do_not_come_are_named(processes):
    first = meet(processes, [(0, 4), (2, 4)], seconds=1)[0]
    assert first.startswith("WaitTimeoutError: the 4 processes did not all meet at 127.0.0.1 port")
    assert first.endswith("within 1 s: missing rank(s) 1, 3")


@pytest.mark.slow
def test_a_port_that_something_else_has_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(RuntimeError, match=r"EADDRINUSE.*; is MASTER_PORT free on the host of rank 0\?"):
            open_store("127.0.0.1", port, 0, 2, timedelta(seconds=5))


def test_a_process_may_meet_twice_through_one_store():
    port = int(free_port())
    first = open_store("127.0.0.1", port, 0, 1, timedelta(seconds=5))
    first.set("kept", "here")
    assert open_store("127.0.0.1", port, 0, 1, timedelta(seconds=5)).get("kept") == b"here"
