from __future__ import annotations

import json

import pytest

from penstock.show.analysis import StepAnalysis
from penstock.show.palette import CAUSES
from penstock.show.report_page import mean_times, overview_figure, overview_table
from penstock.show.units import TICKS
from tests.support.simulated import built, timed
from tests.support.traces import trace_of


def steps() -> list[StepAnalysis]:
    return [StepAnalysis(f"step {n}", timed(built("1f1b", 2, m), 1, 1, 1)) for n, m in ((1, 2), (50, 6))]


def test_the_parts_of_a_step_add_up_to_it():
    for step in steps():
        assert sum(mean_times(step)) == pytest.approx(float(step.bubbles.makespan))


def test_ranks_without_events_do_not_count():
    step = StepAnalysis("", trace_of("", "1F0@1.0-2.0 1B0@3.0-5.0"))
    assert mean_times(step)[0] == 3
    assert sum(mean_times(step)) == 4


def test_every_step_has_a_bar_of_its_length_and_a_line_in_the_table():
    first = steps()[0].trace
    named = [StepAnalysis("<b>evil", first), *(StepAnalysis(f"step {n}", first) for n in range(1, 101))]
    text = json.dumps(overview_figure(named, TICKS))
    assert "evil" not in text
    assert '"1"' in text
    assert sum(f'"{n}"' in text for n in range(1, 101)) < 20
    table = overview_table(steps(), TICKS)
    assert [row[:3] for row in table["rows"]] == [["step 1", "9", "33.3%"], ["step 50", "21", "14.3%"]]
    assert table["rows"][0][3] == f"{CAUSES['warm_up'].meaning} 16.7%"
