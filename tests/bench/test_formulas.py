"""A part of every closed form's grid; `python -m bench.simulate --only forms` runs all of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bench.closed_forms import Form, outcomes
from bench.formulas import conditional, exact

from penstock.schedule.families import FAMILIES
from tests.support.lanes import slow

FORMS = list(exact())
FIRST = {form.family: form for form in reversed(FORMS)}
"""One form of each family, which proves its order; the other forms price the same orders otherwise."""


@pytest.mark.parametrize(
    "form",
    [*FIRST.values(), *slow(*(form for form in FORMS if form not in FIRST.values()))],
    ids=lambda form: f"{form.family}: {form.says}",
)
def test_a_closed_form_holds_exactly(form: Form):
    cases = list(form.cases)
    (outcome,) = outcomes([replace(form, cases=cases[:: 1 + len(cases) // 4])])
    assert outcome.cases > 0
    assert not outcome.failed


@pytest.mark.slow
@pytest.mark.parametrize("form", [form for form, _ in conditional()], ids=lambda form: form.family)
def test_a_form_said_to_need_a_condition_does_fail_without(form: Form):
    (outcome,) = outcomes([form])
    assert outcome.failed


def test_every_family_but_those_without_one_has_a_form():
    assert set(FAMILIES) - {form.family for form in FORMS} == {"zb-auto", "searched"}


def test_a_wrong_formula_is_told():
    form = next(form for form in FORMS if form.family == "1f1b")
    cases = list(form.cases)[:3]
    (outcome,) = outcomes([replace(form, cases=cases, value=lambda case: form.value(case) + 1)])
    assert len(outcome.failed) == 3
    assert outcome.failed[0].startswith("p=2 m=1 v=1 f,b,w=10,10,10: 60, not 61")
