"""Kernels give the same compiled and as they are."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.schedule import jit
from penstock.schedule.families import build_schedule
from penstock.schedule.program import lower
from tests.support.lanes import slow

AUTO = {"costs": (1.5, 1.25, 1.1), "rounds": 0}


# Plain Python lists orders; annealing them would take minutes.
@pytest.mark.parametrize(
    ("name", "options"),
    [("v-half", {}), *slow(*((name, {}) for name in ("zb-v", "v-min", "dualpipe")), ("zb-auto", AUTO))],
)
def test_compiled_and_plain_kernels_agree(name: str, options: dict, monkeypatch: pytest.MonkeyPatch):
    found = []
    for threshold in (0, 10**9):
        monkeypatch.setattr(jit, "COMPILE_FROM", threshold)
        schedule = build_schedule(name, 6, 13, **options)
        found.append((schedule, lower(schedule).level))
    assert found[0][0] == found[1][0]
    assert np.array_equal(found[0][1], found[1][1])


@pytest.mark.filterwarnings("ignore:.*without numba")
def test_without_numba_the_same_schedule_is_made(monkeypatch: pytest.MonkeyPatch):
    made = build_schedule("v-half", 6, 13)
    monkeypatch.setattr(jit, "find_spec", lambda name: None)
    monkeypatch.setattr(jit, "COMPILE_FROM", 0)
    assert build_schedule("v-half", 6, 13) == made


def test_long_work_without_numba_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jit, "find_spec", lambda name: None)
    with pytest.warns(RuntimeWarning, match=r"pip install 'penstock-torch\[fast\]'"):
        assert jit.choose(lower, jit.SLOW_FROM) is lower
    assert jit.choose(lower, jit.SLOW_FROM - 1) is lower  # a warning would be an error
