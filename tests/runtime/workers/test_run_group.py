from __future__ import annotations

import pytest

from penstock.base.errors import ConfigError
from penstock.runtime.health.hang import Timeout
from penstock.runtime.health.peers import PeerRegistry
from penstock.runtime.workers.collectives import Collectives
from penstock.runtime.workers.pool import LocalProcesses
from penstock.runtime.workers.run_group import RunGroup


def test_one_process_decides_for_itself():
    alone = RunGroup(None)
    assert alone.leads
    assert alone.decide(lambda: "this") == "this"
    assert alone.total(2.5) == 2.5


def in_a_process(rank: int) -> tuple[bool, list[str], float, str]:
    run_group = RunGroup(Collectives(Timeout(60.0), PeerRegistry()))
    said = [run_group.decide(lambda text=text: text if rank == 0 else "not asked") for text in ("äöü", "")]

    def refuse() -> str:
        raise ConfigError("no such thing")

    with pytest.raises(ConfigError) as raised:
        run_group.decide(refuse)
    return run_group.leads, said, run_group.total(rank + 0.5), str(raised.value)


def test_the_leader_decides_for_all(processes: LocalProcesses):
    first, second = processes.run(2, in_a_process)
    assert first == (True, ["äöü", ""], 2.0, "no such thing")
    assert second == (False, ["äöü", ""], 2.0, "no such thing")
