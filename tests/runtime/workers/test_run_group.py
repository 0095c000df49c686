from __future__ import annotations

import pytest
import torch
from torch import distributed as dist
from torch import nn

from penstock.base.errors import ConfigError, PeerError
from penstock.runtime.health.hang import Timeout
from penstock.runtime.health.peers import PeerRegistry
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.start.place import Place
from penstock.runtime.workers.collectives import Collectives
from penstock.runtime.workers.pool import LocalProcesses
from penstock.runtime.workers.run_group import RunGroup
from tests.support import plain


def test_one_process_decides_for_itself():
    alone = RunGroup(None)
    assert alone.leads
    assert alone.decide(lambda: "this") == "this"
    assert alone.total(2.5) == 2.5


@pytest.mark.parametrize("place", [None, Place(0, 1)])
def test_a_run_of_one_process_meets_nobody(place: Place | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("penstock.runtime.workers.run_group.current_place", lambda: place)
    met = RunGroup.meet(Timeout(0.1))
    assert (met.size, met.rank, met.leads) == (1, 0, True)
    assert not dist.is_initialized()
    assert met.each(lambda: "this") == ["this"]


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


def leave_with_an_error(rank: int) -> str:
    torch.set_num_threads(1)
    pipe = Pipeline(plain.model(4), nn.functional.mse_loss, microbatches=2, ranks=2, timeout=60)
    pipe.step(*plain.batch(0, 8))
    if rank == 1:
        # As at the end of a process, which may take longer than the others wait for it.
        assert pipe.world is not None
        pipe.world.peer_registry.report_error("KeyError: 'no such column'")
        dist.destroy_process_group()
        return ""
    with pytest.raises(PeerError) as raised:
        RunGroup.of(pipe.world).each(lambda: 0)
    return str(raised.value)


def test_the_error_of_a_process_that_has_not_ended_is_told(processes: LocalProcesses):
    told = processes.run(2, leave_with_an_error)[0]
    assert told.startswith("rank 1 failed; its error: KeyError: 'no such column', while"), told
