"""Which steps' traces a run keeps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.runtime.kept_traces import KeptTraces


@pytest.mark.parametrize(
    ("every", "kept"), [(0, [3, 9]), (1, [*range(3, 10)]), (2, [3, 4, 6, 8, 9]), (3, [3, 6, 9]), (20, [3, 9])]
)
def test_the_first_and_the_last_step_and_those_between_that_were_asked_for(tmp_path: Path, every, kept):
    gathered: list[int] = []
    traces = KeptTraces(tmp_path, 9, every, writes=False, say=pytest.fail, api="train")
    for step in range(3, 10):  # a run that was resumed after step 2

        def gather(step: int = step) -> object:
            gathered.append(step)
            return object()

        pipe = SimpleNamespace(gather_expert_load=lambda: None, is_first=True, gather_trace=gather)
        assert traces.after(step, pipe) is None  # another process writes
    assert gathered == kept


def test_processes_of_other_replicas_gather_no_trace(tmp_path: Path):
    pipe = SimpleNamespace(gather_expert_load=lambda: None, is_first=False)
    assert KeptTraces(tmp_path, 1, 1, writes=True, say=pytest.fail, api="train").after(1, pipe) is None
    assert list(tmp_path.iterdir()) == []
