from __future__ import annotations

from penstock.schedule.ops import Kind
from penstock.trace.join import merged_halves
from tests.support.simulated import built, timed
from tests.support.traces import trace_of


def test_halves_of_the_first_stage_that_follow_each_other_are_merged():
    trace = trace_of("0F0@0-1 0I0@3-5 0W0@5-5 0F1@5-6 0I1@8-9 0F2@9-10 0W1@10-11", "1F0@1-2 1I0@2-3 1W0@3-4")
    assert merged_halves(trace).tolist() == [False, True, True, *[False] * 7]
    assert merged_halves(trace_of("")).tolist() == []


def test_every_merged_half_has_the_other_beside_it_and_whole_backwards_have_none():
    assert not merged_halves(timed(built("gpipe", 2, 4), 1, 1, 1)).any()
    trace = timed(built("zb-h1", 3, 9), 1, 1, 1)
    merged = merged_halves(trace)
    assert merged.any()
    assert (trace.kind[merged][::2] == Kind.I).all()
    assert (trace.kind[merged][1::2] == Kind.W).all()
    assert (trace.stage[merged] == 0).all()
