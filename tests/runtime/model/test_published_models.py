"""Models in the forms in which they are published train as they are, with the bits of plain PyTorch."""

from __future__ import annotations

import pytest

from penstock.runtime.workers.pool import LocalProcesses
from tests.support.groups import run_cases
from tests.support.lanes import exhaustive, slow
from tests.support.published_models import FORMS, differences, piped, plainly

LAYOUTS = {
    "1f1b": {"schedule": "1f1b", "ranks": 2},
    "1f1b, 4 ranks": {"schedule": "1f1b", "ranks": 4},
    "gpipe": {"schedule": "gpipe", "ranks": 2},
    "interleaved": {"schedule": "interleaved-1f1b", "ranks": 2, "virtual_stages": 2},
    "zb-h1": {"schedule": "zb-h1", "ranks": 2},
    "zb-v": {"schedule": "zb-v", "ranks": 2},
    "dualpipe": {"schedule": "dualpipe", "ranks": 2},
    "recompute": {"schedule": "1f1b", "ranks": 2, "recompute": "full"},
}


def exact(layout: str) -> bool:
    """Whether a layout runs the microbatches of each stage in the batch's order."""
    return layout != "dualpipe"


# Every form and every layout once.
ONCE = [*zip(FORMS, LAYOUTS, strict=False), ("unet", "dualpipe"), ("dit", "recompute"), ("resnet", "zb-v")]
REST = [(name, layout) for name in FORMS for layout in LAYOUTS if (name, layout) not in ONCE]


@pytest.mark.parametrize(("name", "layout"), [*slow(*ONCE), *exhaustive(*REST)])
def test_threads_train_it_as_plain_pytorch_does(name: str, layout: str):
    assert differences(piped(name, **LAYOUTS[layout]), plainly(name), exact(layout)) == []


def in_process(rank: int, name: str, layout: str) -> list[str]:
    return differences(piped(name, timeout=300, **LAYOUTS[layout]), plainly(name), exact(layout))


@pytest.mark.parametrize(
    "layouts",
    [
        *slow(["1f1b", "zb-h1"] * 3),
        *exhaustive(["dualpipe", "interleaved"] * 3, ["interleaved", "dualpipe"] * 3),
    ],
)
def test_processes_train_it_as_plain_pytorch_does(processes: LocalProcesses, layouts: list[str]):
    cases = list(zip(FORMS, layouts, strict=True))
    assert run_cases(processes, 2, in_process, cases) == [[[], []]] * len(cases)
