from __future__ import annotations

from dataclasses import replace

from penstock.schedule.families import build_schedule
from penstock.schedule.memory import peak
from penstock.show.analysis import StepAnalysis, advise
from penstock.show.planned import plan
from tests.support.simulated import built, timed
from tests.support.traces import trace_of


def advice(trace):
    return advise(trace, plan(trace))


def test_the_largest_cause_of_the_ranks_that_have_events_is_named():
    assert StepAnalysis("", timed(built("gpipe", 4, 8), 1, 1, 1)).where == (
        "27.3% of the ranks' time was idle. The largest part, 18.2%, was warm-up: the pipeline fills."
    )
    assert StepAnalysis("", trace_of("0F0@0-1 0B0@1-3")).where == "The ranks computed all the time."
    trace = trace_of("", "1F0@1.0-2.0 1B0@3.0-5.0")
    assert StepAnalysis("", trace).where.startswith("25.0% of the ranks' time was idle.")


def test_schedules_that_hold_no_more_and_are_shorter_are_proposed_with_what_simulating_them_gives():
    advised = advice(timed(built("1f1b", 4, 8), 4, 4, 4))
    zbv = timed(built("zb-v", 4, 8), 4, 4, 4)
    (change,) = [c for c in advised.changes if c.schedule == "zb-v"]
    assert change.makespan == zbv.end.max()
    assert change.words == "with zb-v in the same memory"
    assert advised.changes[0].makespan == 132
    assert "the step would be 23% shorter and 5.9% idle instead of 27.3% (simulated)" in advised.sentence
    assert [line for change in advised.proposed for line in change.lines.of("")] == [
        "penstock train --set schedule.name=interleaved-zb parallel.virtual_stages=2 schedule.split=even",
        'Pipeline(..., schedule="interleaved-zb", virtual_stages=2, split="even")',
    ]
    assert advised.changes[0].memory == peak(build_schedule("1f1b", 4, 8)).max()
    assert all(change.memory <= advised.changes[0].memory for change in advised.changes)
    assert {"gpipe", "zb-h2"}.isdisjoint(change.schedule for change in advised.changes)
    now, *others = advised.changes
    assert advised.better == tuple(c for c in others if c.makespan < 0.998 * now.makespan)
    assert 0 < len(advised.better) < len(others)


def test_a_measured_steps_advice_names_its_own_baseline():
    """The measured step is 27.3% idle; with one slow op it is more, and the simulation of usual ops still has 27.3%."""
    trace = timed(built("1f1b", 4, 8), 4, 4, 4)
    end = trace.end.astype(float)
    end[trace.rank_slices()[0].stop - 1] += 20
    step = StepAnalysis("", replace(trace, end=end, info={**trace.info, "source": "measured"}))
    assert step.where.startswith("33.6% of the ranks' time was idle.")
    assert "(simulated; the present order, simulated the same way, is 27.3% idle)" in step.advice.sentence


def test_where_nothing_helps_this_is_said():
    advised = advice(timed(built("zb-v", 4, 16), 4, 4, 4))
    assert advised.sentence.startswith("None of the ")
    assert advised.sentence.endswith("simulated within the same memory makes the step 2% shorter.")
    alone = advice(timed(built("chimera", 4, 4), 4, 4, 4))
    assert alone.sentence.startswith("No change was simulated")


def compared(trace):
    return StepAnalysis("", replace(trace, info={"source": "measured"})).over_plan


def test_the_difference_to_the_plan_is_named():
    trace = timed(built("1f1b", 2, 4), 1, 1, 1)
    assert compared(trace) == "The step took as long as planned from its usual op times."
    end, last = trace.end.astype(float), trace.rank_slices()[0].stop - 1
    end[last] += 7.5
    late = replace(trace, end=end)
    assert compared(late) == (
        "The step took 50.0% longer than planned from its usual op times. The largest part of the difference, 50.0% of the "
        "plan, is work of the busiest rank, whose ops took longer than usual."
    )
