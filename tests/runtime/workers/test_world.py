"""Processes meet through a file, and nobody listens where other machines could reach it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from penstock.base.errors import ConfigError, WaitTimeoutError
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.start.meeting import STORE
from penstock.runtime.workers.pool import LocalProcesses
from penstock.runtime.workers.world import World
from tests.support import plain
from tests.support.listening import listening

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_processes_meet_through_a_file_and_listen_on_loopback_alone(tmp_path):
    environment = os.environ | {"WORLD_SIZE": "2", STORE: str(tmp_path / "store")}
    environment.pop("GLOO_SOCKET_IFNAME", None)
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.listening_rank"],
            env=environment | {"RANK": str(rank)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [process.communicate(timeout=120)[0] for process in started]
    loss = plain.train(4, 4, steps=1)[0][0].mean().item()
    # gloo of torch 2.10 prints to stdout, too.
    last = [text.splitlines()[-1] for text in told]
    assert last == [f"rank {r} of 2: {loss!r} on ['127.0.0.1']" for r in range(2)]


def test_a_store_in_no_folder_is_refused_at_once(monkeypatch, tmp_path):
    monkeypatch.setenv(STORE, str(tmp_path / "none" / "store"))
    with pytest.raises(ConfigError, match="that folder is not there"):
        World(0, 2, 60.0)


def test_processes_that_do_not_come_to_the_store_end_the_wait(monkeypatch, tmp_path):
    monkeypatch.setenv(STORE, str(tmp_path / "store"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with pytest.raises(WaitTimeoutError, match=r"rank 0 did not meet all 2 processes .* within 0.3 s"):
        World(0, 2, 0.3)


def test_threads_listen_nowhere():
    before = listening()
    with Pipeline(plain.model(4), nn.functional.mse_loss, microbatches=4, ranks=2) as pipe:
        pipe.step(*plain.batch(0, 8))
        assert listening() == before


def addresses(rank: int) -> set[str]:
    with Pipeline(plain.model(4), nn.functional.mse_loss, microbatches=4, ranks=2) as pipe:
        pipe.step(*plain.batch(0, 8))
        return listening()


def test_local_processes_listen_on_loopback_alone(processes: LocalProcesses):
    assert processes.run(2, addresses) == [{"127.0.0.1"}] * 2


def test_what_listens_is_seen():
    with socket.create_server(("0.0.0.0", 0)):
        assert "0.0.0.0" in listening()
