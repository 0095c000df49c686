from __future__ import annotations

from penstock.trace.messages import message_delays, producers
from tests.support.simulated import built, timed
from tests.support.traces import trace_of


def test_forwards_take_from_the_stage_before_and_backwards_from_the_stage_after():
    trace = trace_of("0F0@0-1 0F1@1-2 0B0@4-6 OPTIMIZER@9-10", "1F0@1-2 1I0@2-4 1W0@4-5 REDUCE@5-6")
    assert producers(trace).tolist() == [-1, -1, 5, -1, 0, -1, -1, -1]
    assert producers(trace_of("", "1F0@1-2 1B0@2-4")).tolist() == [-1, -1]


def test_every_op_but_the_ends_of_the_pipeline_takes_from_one():
    trace = timed(built("zb-v", 4, 6), 1, 1, 1)
    source = producers(trace)
    receives = source >= 0
    assert receives.sum() == 2 * (trace.stage.max() * 6)
    assert (trace.end[source[receives]] <= trace.start[receives]).all()
    assert (trace.microbatch[source[receives]] == trace.microbatch[receives]).all()


def test_a_message_is_timed_where_its_op_was_waited_for():
    # The forward of stage 1 waits for that of stage 0, 0.5 s; the second one arrives while the first one runs.
    trace = trace_of("0F0@0-1 0F1@1-2 0B0@5-6", "1F0@1.5-3 1F1@3-4 1B0@4-4.75")
    assert message_delays(trace).tolist() == [0.25, 0.5]
    assert message_delays(trace_of("0F0@0-1", "")).tolist() == []
