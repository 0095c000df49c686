"""Chrome JSON follows the format: slices of a track do not overlap, and flows begin and end inside slices."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from penstock.base.errors import ConfigError
from penstock.schedule.families import FAMILIES
from penstock.show.chrome import chrome_events, write_chrome
from penstock.trace.events import Trace
from penstock.trace.messages import producers
from tests.support.lanes import exhaustive
from tests.support.measured import measured
from tests.support.simulated import built, timed
from tests.support.traces import trace_of


def validated(trace: Trace) -> dict[str, list[dict]]:
    """Check everything that the format requires, and return the events by phase."""
    told = json.loads(json.dumps(chrome_events(trace)))
    events = defaultdict(list)
    for event in told["traceEvents"]:
        events[event["ph"]].append(event)
        assert isinstance(event["pid"], int)
        assert event["ph"] == "M" or event["ts"] >= 0
    assert set(events) <= {"M", "X", "s", "f", "C"}
    tracks = defaultdict(list)
    for event in events["X"]:
        tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in tracks.values():
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(sorted(slices)))
    named = {(e["pid"], e["tid"]) for e in events["M"] if e["name"] == "thread_name"}
    assert named == set(tracks)
    starts, ends = ({e["id"]: e for e in events[phase]} for phase in "sf")
    assert len(starts) == len(events["s"]) == len(ends) == len(events["f"])
    assert starts.keys() == ends.keys()
    for number, start in starts.items():
        end = ends[number]
        assert start["ts"] <= end["ts"]
        assert (start["name"], start["cat"]) == (end["name"], end["cat"])
        assert start["pid"] != end["pid"]
        for event in (start, end):
            around = tracks[event["pid"], event["tid"]]
            assert any(a <= event["ts"] < b or a == event["ts"] == b for a, b in around)
    return events


# One stage a rank and several, there and back, copied ones, whole and split backwards.
FEW = ["1f1b", "hanayo", "zb-v", "dualpipe"]


@pytest.mark.parametrize("family", [*FEW, *exhaustive(*(name for name in FAMILIES if name not in FEW))])
def test_every_family_follows_the_rules(family):
    trace = timed(built(family, 4, 8), 1, 2, 1, 0.37)
    events = validated(trace)
    assert len(events["X"]) == len(trace) - trace.paired.sum()
    giver = producers(trace)
    assert len(events["s"]) == (trace.rank[giver] != trace.rank)[giver >= 0].sum()


def test_a_rank_is_a_process_and_every_group_a_track():
    trace = trace_of("0F0@0-2 SEND@2-3 0B0@4-6 REDUCE@5-7 OPTIMIZER@7-8", "1F0@3-4 RECV@3-4 1B0@4-5")
    events = validated(trace)
    named = [e for e in events["M"] if e["name"] in ("thread_name", "process_name")]
    assert {(e["pid"], e["tid"]): e["args"]["name"] for e in named} == {
        (0, 0): "compute", (0, 1): "communication", (0, 2): "replicas", (1, 0): "compute", (1, 1): "communication",
    }  # fmt: skip
    assert [(e["name"], e["ts"], e["dur"]) for e in events["X"] if e["pid"] == 0] == [
        ("0F0", 0, 2e6), ("send", 2e6, 1e6), ("0B0", 4e6, 2e6), ("reduction", 5e6, 2e6), ("optimizer", 7e6, 1e6),
    ]  # fmt: skip


def test_a_pair_is_one_slice_and_what_overlaps_is_continued_on_another_track():
    events = validated(trace_of("0F3&@1-4 0B1@1-4"))
    (pair,) = events["X"]
    assert (pair["name"], pair["ts"], pair["dur"]) == ("(0F3;0B1)", 0, 3e6)
    assert pair["args"]["backward"] == {"stage": 0, "microbatch": 1}
    events = validated(trace_of("SEND@0-3 SEND@1-4 SEND@3-5"))
    assert [e["tid"] for e in events["X"]] == [0, 1, 0]


def test_counters_follow_what_is_held():
    counters = [
        (e["ts"], e["args"]["bytes"]) for e in validated(measured("1f1b", 2, 3))["C"] if e["pid"] == 0
    ]
    # Taken when a forward starts, given back when a backward ends.
    assert [*counters[:2], counters[-1]] == [(0, 2**20), (10_000, 2**21), (120_000, 0)]


def test_a_message_that_came_before_it_left_has_no_arrow():
    trace = timed(built("1f1b", 2, 3), 1, 1, 1)
    early = np.where(trace.rank == 1, -5.0, 0.0)
    shifted = replace(trace, start=trace.start + early, end=trace.end + early)
    assert chrome_events(trace)["otherData"]["arrows left out"] == 0
    assert chrome_events(shifted)["otherData"]["arrows left out"] == 3
    assert len(validated(shifted)["s"]) == 3


def test_measured_times_never_overlap_by_rounding():
    random = np.random.default_rng(0)
    edges = np.cumsum(random.random(400) * 1e-5)
    trace = replace(trace_of(" ".join(f"0F{n}@0.0-1.0" for n in range(399))), start=edges[:-1], end=edges[1:])
    assert len(validated(trace)["X"]) == 399


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path):
    assert validated(trace_of("", ""))["X"] == []
    trace = trace_of("0F0@0-1")
    assert json.loads(write_chrome(trace, tmp_path / "a.json").read_text())["traceEvents"]
    with pytest.raises(ConfigError, match="cannot write"):
        write_chrome(trace, tmp_path / "no" / "a.json")
