"""Each kind on its own, so that one that is broken is named."""

from __future__ import annotations

import pytest

from penstock.schedule.families import FAMILIES
from tests.zoo.case import Case
from tests.zoo.docs import PAGE, table
from tests.zoo.judge import judge
from tests.zoo.kind import KINDS
from tests.zoo.not_yet import ready
from tests.zoo.piped import piped


@pytest.mark.parametrize(
    "schedule", ["zb-h1", *(pytest.param(name, marks=pytest.mark.slow) for name in ("1f1b", "zb-v"))]
)
@pytest.mark.parametrize("name", ready())
def test_a_kind_is_as_in_plain_pytorch_or_refused_by_name(name, schedule):
    # It comes second: the rank of the first stage has nobody to hand a gradient to, and so splits no backward.
    case = Case(7, ("mlp", name), schedule, virtual_stages=FAMILIES[schedule].virtual_stages)
    verdict = judge(case, [piped(0, case)])
    assert verdict.outcome != "FAILED", f"{verdict.why}\npython -m bench.zoo --case '{case.text()}'"
    if KINDS[name].bounded:
        assert verdict.outcome == "bounded"


def test_there_are_kinds_enough():
    assert len(KINDS) >= 60
    assert all(kind.what for kind in KINDS.values())


def test_the_table_in_the_docs_is_the_zoos():
    assert table() in PAGE.read_text(), "python -m tests.zoo.docs writes it"
