"""Which processes a collective is of."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from penstock.runtime.workers import collectives
from penstock.runtime.workers.collectives import Collectives


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "cuda:nccl"])
@pytest.mark.parametrize("group", ["some", None])
def test_values_are_gathered_from_a_group_or_from_all(group, backend: str, monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple] = []

    def gather_values(value: object, members: object, *finish: object) -> list[object]:
        seen.append((members, len(finish)))
        return [value]

    monkeypatch.setattr(collectives, "gather_values", gather_values)
    monkeypatch.setattr(collectives, "dist", SimpleNamespace(get_backend_config=lambda members: backend))
    every = SimpleNamespace(everyone="all")
    assert Collectives.gather(every, 5, group, "compare") == [5]
    # Waits of a group for GPUs alone cannot be cut into short ones.
    assert seen == [(group or "all", int("cpu" in backend))]
