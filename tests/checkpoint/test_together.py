"""A background thread waits for other processes only as long as they may still answer."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest

from penstock.base.errors import PeerError, PenstockError
from penstock.checkpoint.together import Together


class Work:
    """A collective that is done after some waits."""

    def __init__(self, waits: int, message: str = "timed out") -> None:
        self.waits, self.message = waits, message

    def wait(self, timeout: timedelta) -> None:
        assert timeout.total_seconds() < 5
        self.waits -= 1
        if self.waits >= 0:
            raise RuntimeError(self.message)


def waiting(timeout: float, peers: object = None) -> Together:
    together = Together(None, timeout)
    together._peers = peers
    return together


def test_a_wait_goes_on_until_the_limit():
    seen: list[str] = []
    peers = SimpleNamespace(require_all=lambda: seen.append("asked"))
    waiting(60.0, peers)._finish(Work(3))
    assert seen == ["asked"] * 3
    waiting(60.0)._finish(Work(3))
    with pytest.raises(RuntimeError, match="timed out"):
        waiting(-1.0)._finish(Work(1))
    waiting(-1.0)._finish(Work(0))


def test_a_wait_ends_with_the_process_or_the_connection():
    def gone() -> None:
        raise PeerError("rank 1 has ended")

    with pytest.raises(PeerError, match="rank 1 has ended"):
        waiting(60.0, SimpleNamespace(require_all=gone))._finish(Work(1))
    with pytest.raises(RuntimeError, match="Connection closed"):
        waiting(60.0)._finish(Work(1, "Connection closed"))


def test_one_process_runs_its_jobs_alone_and_leads():
    alone = Together(None, 1.0)
    assert alone.leads
    assert alone.each(lambda: 5) == [5]

    def full() -> None:
        raise OSError(28, "No space left on device", "a file")

    with pytest.raises(PenstockError) as error:
        alone.each(full)
    assert "No space left on device" in str(error.value)
    assert "rank" not in str(error.value)
