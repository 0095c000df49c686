"""Each kind on its own, so that one that is broken is named."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.runtime.workers.pool import LocalProcesses
from penstock.schedule.families import FAMILIES
from tests.support.lanes import exhaustive, slow
from tests.zoo.case import Case
from tests.zoo.docs import PAGE, table
from tests.zoo.forward import FORWARDS
from tests.zoo.judge import judge
from tests.zoo.kind import KINDS
from tests.zoo.not_yet import ready
from tests.zoo.piped import piped, piped_many

LAYOUTS = {
    "zb-h1": {"schedule": "zb-h1", "habit": "evaluate"},
    "1f1b": {"schedule": "1f1b", "habit": "module_mode"},
    "dualpipe": {"schedule": "dualpipe", "habit": "module_mode"},
}


def in_lanes(names: tuple[str, ...], entries: dict[str, Any], every: int) -> list[Any]:
    """Of each group the first in the fast lane, some of the rest in the slow one, and the others in the exhaustive one."""
    first = {entries[name].group: name for name in reversed(names)}.values()
    rest = [name for name in names if name not in first]
    some = rest[::every]
    return [*first, *slow(*some), *exhaustive(*(name for name in rest if name not in some))]


@pytest.mark.parametrize("schedule", ["zb-h1", *exhaustive("1f1b", "zb-v")])
@pytest.mark.parametrize("name", in_lanes(ready(), KINDS, 3))
def test_a_kind_is_as_in_plain_pytorch_or_refused_by_name(name, schedule):
    # It comes second: the rank of the first stage has nobody to hand a gradient to, and so splits no backward.
    case = Case(
        seed=7, kinds=("mlp", name), schedule=schedule, virtual_stages=FAMILIES[schedule].virtual_stages
    )
    verdict = judge(case, [piped(0, case)])
    assert verdict.outcome != "FAILED", f"{verdict.why}\npython -m bench.zoo --case '{case.text()}'"
    if KINDS[name].bounded:
        assert verdict.outcome == "bounded"


@pytest.mark.parametrize("layout", ["zb-h1", *exhaustive("1f1b", "dualpipe")])
@pytest.mark.parametrize("name", in_lanes(tuple(FORWARDS), FORWARDS, 2))
def test_a_forward_is_as_in_plain_pytorch_or_refused_by_name(name, layout):
    case = Case(seed=7, kinds=("mlp", "layer_norm"), forward=name, **LAYOUTS[layout])
    verdict = judge(case, [piped(0, case)])
    assert verdict.outcome != "FAILED", f"{verdict.why}\npython -m bench.zoo --case '{case.text()}'"
    if not FORWARDS[name].refused:
        assert verdict.outcome in ("bit-equal", "bounded")


@pytest.mark.parametrize(("layout", "every"), [*slow(("zb-h1", 4)), *exhaustive(("zb-h1", 1), ("1f1b", 1))])
def test_forwards_in_processes_are_as_in_plain_pytorch(processes: LocalProcesses, layout: str, every: int):
    cases = [
        Case(seed=7, kinds=("mlp", "layer_norm"), forward=name, transport="processes", **LAYOUTS[layout])
        for name in list(FORWARDS)[::every]
    ]
    runs = processes.run(2, piped_many, [case.text() for case in cases])
    verdicts = {case.forward: judge(case, [run[n] for run in runs]) for n, case in enumerate(cases)}
    assert {name: v.why for name, v in verdicts.items() if v.outcome == "FAILED"} == {}
    must = [case.forward for case in cases if not FORWARDS[case.forward].refused]
    assert {name: verdicts[name].why for name in must if verdicts[name].outcome == "refused"} == {}


def test_the_table_in_the_docs_is_the_zoos():
    assert all(entry.what for entry in (*KINDS.values(), *FORWARDS.values()))
    assert table() in PAGE.read_text(), "python -m tests.zoo.docs writes it"
